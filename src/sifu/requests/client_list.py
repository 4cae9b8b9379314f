"""The operator's list of clients: the key of each client's node, and which clients are blocked.

Before a run exists, the list is a file in its folder. Afterwards the ledger holds it, and every change is an event. A
key can be replaced, a client can be blocked, and a new client can join, but a forgotten client cannot return.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sifu.core import client_names
from sifu.core.ledger import read_json
from sifu.errors import InputError, RunBusyError
from sifu.run.run_view import RunView
from sifu.store.database import CLIENTS_FILE, DATABASE
from sifu.store.files import LOCK_FILE, WriterLock, private_folder, write_atomically
from sifu.store.inbox import post
from sifu.store.projection import NewEvent
from sifu.store.reader import RunReader
from sifu.store.seen_heads import check_seen
from sifu.store.writer import RunWriter
from sifu.theory.facts import AUTHENTICATED, BY_OPERATOR, CLAIMED

ADMITTED = "admitted"
"""Key of the run table that holds the list."""


def fingerprint_of_file(path: Path) -> str:
    """Return the fingerprint of a public key file: an OpenSSH line (ssh-keygen's .pub) or PEM.

    Raises:
        InputError: If the file cannot be read or holds no public key.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        PublicFormat,
        load_pem_public_key,
        load_ssh_public_key,
    )

    try:
        content = path.read_bytes()
        key = (load_pem_public_key if b"BEGIN PUBLIC KEY" in content else load_ssh_public_key)(content)
    except OSError as error:
        raise InputError(f"cannot read the key {path}: {error.strerror}") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        hint = "it is a private key, which stays at its client" if b"PRIVATE KEY" in content else str(error)
        raise InputError(f"{path} holds no public key: give the .pub file of ssh-keygen, or PEM ({hint})") from error
    return client_names.key_fingerprint(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


def recorded_clients(reader: RunReader) -> tuple[client_names.Admitted, ...]:
    """Return the list in the ledger."""
    return client_names.admitted_of(json.loads(reader.value(ADMITTED, "[]")))


def listed_clients(folder: Path) -> tuple[client_names.Admitted, ...]:
    """Return the list of a run, or of a folder that will become one."""
    if (folder / DATABASE).exists():
        with RunReader(folder) as reader:
            return _known_clients(reader)
    return _clients_of_file(folder)


def _known_clients(reader: RunReader) -> tuple[client_names.Admitted, ...]:
    """Return the list in the ledger, or the list in the file if the ledger has none yet (after a run's first event)."""
    return recorded_clients(reader) if reader.value(ADMITTED, "") else _clients_of_file(reader.folder)


def _clients_of_file(folder: Path) -> tuple[client_names.Admitted, ...]:
    path = folder / CLIENTS_FILE
    if not path.exists():
        return ()
    try:
        return client_names.admitted_of(read_json(path.read_bytes()))
    except ValueError as error:
        raise InputError(f"{path} is not a list of clients: {error}") from error


def run_id(folder: Path) -> str | None:
    """Return the random id of a run, which signed requests name, or None if the folder holds no run yet."""
    if not (folder / DATABASE).exists():
        return None
    with RunReader(folder) as reader:
        return reader.value("run")


def ask_for_change(folder: Path, change: dict[str, Any]) -> bool:
    """Change the list now, or post the change to the inbox if another process writes to the run.

    Args:
        folder: Folder of the run, or of a future run.
        change: `do` (add, replace or block), `name` and, unless blocking, `key`.

    Returns:
        True if the change was made, or False if it waits in the inbox.
    """
    if not (folder / DATABASE).exists():
        _changed(listed_clients(folder), change)  # fail before the folder is created
        private_folder(folder, parents=True)
        # The lock keeps concurrent changes from overwriting each other, and from running while a run is created.
        with WriterLock(folder / LOCK_FILE):
            if not (folder / DATABASE).exists():
                changed = _changed(listed_clients(folder), change)
                write_atomically(
                    folder / CLIENTS_FILE, json.dumps(client_names.plain(changed), indent=1).encode() + b"\n"
                )
                return True
    try:
        writer = RunWriter.open(folder)
    except RunBusyError:
        with RunReader(folder) as reader:
            _check(reader, change)
        post(folder, "clients", f"c-{secrets.token_hex(4)}", change)
        return False
    with writer:
        change_clients(writer, change)
    return True


def change_clients(writer: RunWriter, change: dict[str, Any]) -> None:
    """Record a change to the list of a run, unless it changes nothing."""
    before = _known_clients(writer)
    after = _check(writer, change)
    if after != before:
        writer.record(NewEvent("clients changed", {"run": {ADMITTED: client_names.plain(after)}, "change": change}))


def _check(reader: RunReader, change: dict[str, Any]) -> tuple[client_names.Admitted, ...]:
    """Return the list of a run after a change.

    A remote client without a key enters the list only by being blocked.

    Raises:
        InputError: If the change is not possible.
    """
    before = _known_clients(reader)
    view = RunView(reader)
    name = str(change.get("name"))
    gone = view.forgotten | view.asking
    owner = next((entry.name for entry in before if entry.key == change.get("key")), name)
    for client in (name, owner):
        if change.get("do") != "block" and view.index_of.get(client) in gone:
            raise InputError(
                f"{client} asked to be forgotten: readmitting it would void its certificate. Start a new run with it"
            )
    without_key = name in view.index_of and name not in {entry.name for entry in before}
    if change.get("do") == "block" and without_key and view.facts.identity in (BY_OPERATOR, CLAIMED):
        before = (*before, client_names.Admitted(name, ""))
    after = _changed(before, change)
    if change["do"] == "add" and after != before:
        if name in view.index_of:
            raise InputError(f"{name} is already a client of this run: use --replace to give it another key")
        if view.facts.identity != AUTHENTICATED:
            raise InputError(f"{name} cannot join: only Flower runs with node keys accept new clients")
    return after


def joining(reader: RunReader) -> tuple[client_names.Admitted, ...]:
    """Return the listed clients that are not in the run yet; each joins once its node is online."""
    names = {client.name for client in reader.clients()}
    return tuple(entry for entry in recorded_clients(reader) if entry.status == "allowed" and entry.name not in names)


def _changed(entries: tuple[client_names.Admitted, ...], change: dict[str, Any]) -> tuple[client_names.Admitted, ...]:
    """Return the list after a change.

    Adding a client that is already listed with the same key changes nothing.

    Raises:
        InputError: If the change is malformed, or the key or name is taken.
    """
    try:
        do, name = change["do"], str(change["name"])
        if do not in ("add", "replace", "block"):
            raise InputError(f"a change to the list of clients must be add, replace or block, found {do!r}")
        key = "" if do == "block" else str(change["key"])
    except KeyError as error:
        raise InputError(f"the change has no {error}") from error
    listed = {entry.name: entry for entry in entries}
    if do != "add" and name not in listed:
        raise InputError(f"{name} is not on the list of clients; it has {', '.join(listed) or 'no entries'}")
    if do == "block":
        return tuple((listed | {name: client_names.Admitted(name, listed[name].key, "blocked")}).values())
    if do == "add":
        client_names.check_names([name])
        client_names.check_lookalikes([*listed, name])
    entry = client_names.Admitted(name, client_names.check_key(key))
    if do == "add" and listed.get(name) == entry:
        return entries
    owner = next((owner for owner in entries if owner.key == key), None)
    if owner is not None and (do == "add" or owner.name != name):
        raise InputError(f"this key belongs to {owner.name} ({owner.status}): every client needs its own key")
    if do == "add" and name in listed:
        raise InputError(f"{name} is on the list with another key ({listed[name].status}): use --replace for a new key")
    return tuple((listed | {name: entry}).values())


def described_clients(folder: Path) -> list[dict[str, str]]:
    """Return the list as plain values for display.

    The status is allowed, joining, blocked, waiting to be forgotten, or forgotten.
    """
    listed = [asdict(entry) for entry in listed_clients(folder)]
    if not (folder / DATABASE).exists():
        return listed
    with RunReader(folder) as reader:
        check_seen(reader)
        view, newcomers = RunView(reader), {entry.name for entry in joining(reader)}
        for entry in listed:
            client = view.index_of.get(entry["name"])
            if client in view.forgotten:
                entry["status"] = "forgotten"
            elif client in view.asking:
                entry["status"] = "waiting to be forgotten"
            elif entry["name"] in newcomers:
                entry["status"] = "joining"
    return listed
