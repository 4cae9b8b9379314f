"""This user's list of known operator keys, stored outside the run folders.

A run folder cannot prove which key should have signed it: the whole folder can be signed again with another key. The
key of every run that is created or opened is therefore remembered in a file of the user, as ssh does in `known_hosts`.
The entry is stored under the run's id. The first event names this id, and copies, moves and backups keep it. From then
on the run must be signed with that key, or with a successor that the key signed for (`sifu key rotate`). The folder's
path is remembered as well: a different run in the same folder is refused. Opening, verifying, writing and restoring a
run store this entry; listing runs does not. With `sifu key accept`, the user accepts a changed key.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sifu.errors import InputError, RunDamagedError
from sifu.store.files import TEMPORARY_PREFIX, append_to, private_folder, sync_folder
from sifu.store.keys import KEY_FILE, check_keys, is_encrypted, keys_of
from sifu.store.reader import RunReader

KNOWN_KEYS = "SIFU_KNOWN_KEYS"
"""Environment variable: file of known keys, instead of `sifu/known_keys` in the user's configuration folder."""
LARGEST_FILE = 64 << 20
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KnownRun:
    """A run as last seen here: its keys in order, whether its private key was encrypted, and its folder."""

    keys: tuple[str, ...]
    encrypted: bool
    folder: str


@dataclass
class KnownKeys:
    """Content of the file of known keys."""

    runs: dict[str, KnownRun] = field(default_factory=dict)
    folders: dict[str, str] = field(default_factory=dict)
    """Id of the run last seen in each folder, by path."""

    def add(self, run: str, key: str, encrypted: bool, folder: str, accepted: bool) -> None:
        """Add an entry of the file; an `accepted` entry replaces all earlier entries of the run."""
        earlier = None if accepted else self.runs.get(run)
        keys = () if earlier is None else tuple(before for before in earlier.keys if before != key)
        self.runs[run] = KnownRun((*keys, key), encrypted, folder)
        self.folders[folder] = run

    def held_before(self, folder: Path, run: str) -> str | None:
        """Return the id of a different run last seen in this folder, under its path or a link to it, or None."""
        seen = (self.folders.get(place) for place in _places(folder))
        return next((other for other in seen if other is not None and other != run), None)


_read: dict[Path, tuple[tuple[int, int, int], KnownKeys]] = {}
"""Parsed files of known keys, reused until the file changes."""


def known_keys_file() -> Path:
    """Return the path of this user's file of known keys."""
    named = os.environ.get(KNOWN_KEYS, "").strip()
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")) / "sifu" / "known_keys"


def read_known_keys(path: Path) -> KnownKeys:
    """Return the content of the file of known keys, or empty content if there is no file.

    Raises:
        InputError: If the file cannot be read. Without it a changed key would go unnoticed.
    """
    try:
        status = path.stat()
        stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
        if path in _read and _read[path][0] == stamp:
            return _read[path][1]
        if status.st_size > LARGEST_FILE:
            raise InputError(f"{path} has {status.st_size} bytes, too many for a file of known keys")
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return KnownKeys()
    except (OSError, ValueError) as error:
        raise InputError(f"the known keys in {path} cannot be read: {error}. See {KNOWN_KEYS}") from error
    content = KnownKeys()
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        try:
            entry: dict[str, Any] = json.loads(line)
            texts = [str(entry[name]) for name in ("run", "key", "folder")]
            content.add(texts[0], texts[1], bool(entry["encrypted"]), texts[2], bool(entry.get("accepted")))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if not line.endswith("\n"):  # an interrupted process wrote a part of the last line
                break
            raise InputError(
                f"{path}, line {number}, does not contain a run's key: correct or remove the line"
            ) from error
    _read[path] = (stamp, content)
    return content


def key_problem(reader: RunReader) -> str | None:
    """Return how a run's key, its encryption or its folder differs from the known entry, or None if all agree.

    A successor of the known key is accepted if both keys signed the rotation.
    """
    run, key = reader.value("run"), reader.value("public_key")
    path = known_keys_file()
    remembered = read_known_keys(path)
    earlier = remembered.runs.get(run)
    way_out = f"If the operator published this key, and you know why: sifu key accept {reader.folder} {key}"
    before = remembered.held_before(reader.folder, run)
    if before is not None:
        return (
            f"key: {reader.folder} held run {before} when it was last used here, and now holds run {run[:40]}, signed "
            f"with the key {key} ({path}). {way_out}"
        )
    if earlier is None:
        return None
    if key != earlier.keys[-1] and not _signed_for(reader, earlier.keys[-1]):
        return (
            f"key: run {run} is known here ({path}) by the key {earlier.keys[-1]}, and is now signed with {key}, for "
            f"which that key did not sign: its history was rewritten, or an older state was restored. {way_out}"
        )
    if earlier.encrypted and (reader.folder / KEY_FILE).is_file() and not is_encrypted(reader.folder):
        return (
            f"key: {KEY_FILE} of run {run} was encrypted when it was last used here, and is now stored without a "
            f"passphrase. Put the encrypted file back. {way_out}"
        )
    return None


def _signed_for(reader: RunReader, remembered: str) -> bool:
    """Return whether the ledger's keys lead from a known key to the current one, each change signed by both keys."""
    return remembered in [key for _, key in keys_of(reader)] and next(check_keys(reader), None) is None


def check_known_key(reader: RunReader) -> None:
    """Check the run's key against the key known here, without remembering anything.

    Raises:
        RunDamagedError: If `key_problem` finds a problem.
    """
    problem = key_problem(reader)
    if problem:
        raise RunDamagedError(f"{problem}. Nothing was done")


def check_place(folder: Path, run: str) -> None:
    """Check that no other run was last seen in the folder that a run will be restored to.

    Raises:
        InputError: If another run was seen there.
    """
    before = read_known_keys(known_keys_file()).held_before(folder, run)
    if before is not None:
        raise InputError(
            f"{folder} held run {before} when last used here, and the backup is of run {run[:40]}: restore it into "
            "another folder. Nothing was restored"
        )


def remember_key(reader: RunReader, *, accepted: bool = False) -> None:
    """Remember the run's key and folder if they are new; only warn if the file cannot be written.

    If the user `accepted` the key, it replaces all earlier keys of the run.
    """
    run, key, places = reader.value("run"), reader.value("public_key"), _places(reader.folder)
    path = known_keys_file()
    remembered = read_known_keys(path)
    earlier, encrypted = remembered.runs.get(run), is_encrypted(reader.folder)
    if earlier is not None and not accepted:
        encrypted = encrypted or earlier.encrypted
        same_place = all(remembered.folders.get(place) == run for place in places)
        if (earlier.keys[-1], earlier.encrypted) == (key, encrypted) and same_place:
            return
    if reader.folder.name.startswith(TEMPORARY_PREFIX):
        # A restoration in progress: its folder is remembered under its final name.
        if earlier is None or not accepted:
            return
        places = (earlier.folder,)
    seen = () if earlier is None or accepted else earlier.keys
    new_keys = [named for _, named in keys_of(reader) if named != key and named not in seen] + [key]
    named_at = [(named, places[0]) for named in new_keys] + [(key, place) for place in places[1:]]
    entries = [{"run": run, "key": named, "encrypted": encrypted, "folder": place} for named, place in named_at]
    if accepted:
        entries[0]["accepted"] = True
    try:
        private_folder(path.parent, parents=True)
        with os.fdopen(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600), "ab+") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            append_to(stream, b"".join(json.dumps(entry).encode() + b"\n" for entry in entries))
        sync_folder(path.parent)
    except OSError as error:
        log.warning(
            "the key of %s cannot be remembered in %s (%s), so a change of it would go unnoticed: name a file that can "
            "be written with %s",
            reader.folder,
            path,
            error.strerror,
            KNOWN_KEYS,
        )


def known_key_problem(run: str, key: str) -> str | None:
    """Return a description of the problem if a certificate's key never belonged to this known run, or None."""
    earlier = read_known_keys(known_keys_file()).runs.get(run)
    if earlier is None or key in earlier.keys:
        return None
    return f"key: run {run} is known here by the key {earlier.keys[-1]}, the certificate is signed with {key}"


def _places(folder: Path) -> tuple[str, ...]:
    """Return the resolved path of a folder, and its unresolved path if that contains a link."""
    return tuple(dict.fromkeys((str(folder.resolve()), os.path.abspath(folder))))
