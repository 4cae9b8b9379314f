"""Tools of a forger: edited rows, added or rebuilt events with matching hashes, re-signed certificates."""

from __future__ import annotations

import hashlib
import json
import secrets
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from run_tools import connect
from sifu.core.ledger import GENESIS, Event, seal
from sifu.requests.certification import RecordedRequest, public_form
from sifu.store.checkpoints import Signer
from sifu.store.files import certificate_path
from sifu.store.history_tables import clients_digest, rows_digest
from sifu.store.keys import KEY_FILE, create_key, sign
from sifu.store.projection import KEYS, changes
from sifu.store.reader import RunReader

Edit = Callable[[str, dict[str, Any]], None]


def execute(folder: Path, *statements: str) -> None:
    connection = connect(folder)
    for statement in statements:
        connection.execute(statement)
    connection.close()


def rebuild_chain(folder: Path, edit: Edit | None = None, *, with_key: bool = True) -> None:
    """Recompute every digest, commitment and hash after the tables were edited; `edit` may change payloads too.

    With the operator's key every event is signed again, as a cheating operator would do; without it, invalid signatures
    are removed.
    """
    connection = connect(folder)
    reader = RunReader(folder)
    previous = GENESIS
    for seq, time, kind, payload, nonce in connection.execute(
        "SELECT seq, time, kind, payload, nonce FROM events ORDER BY seq"
    ).fetchall():
        content = json.loads(payload)
        if "rows" in content:
            first, last = content["rows"]["first"], content["rows"]["last"]
            content["rows"]["digest"] = rows_digest(
                reader.nodes(first, last),
                reader.participation().between(first, last),
            )
        if "clients_digest" in content.get("run", {}):
            known = reader.read_clients()[: int(content["run"]["client_count"])]
            digest = clients_digest(known)
            content["run"]["clients_digest"] = digest
            connection.execute("UPDATE run SET value = ? WHERE key = 'clients_digest'", (digest,))
        if edit is not None:
            edit(kind, content)
        event = seal(previous, seq, time, kind, content, nonce)
        if with_key:
            signature = signature_over(folder, connection, event)
        else:
            same = "SELECT signature FROM events WHERE seq = ? AND hash = ?"
            (signature,) = connection.execute(same, (seq, event.hash)).fetchone() or (None,)
        connection.execute(
            "UPDATE events SET payload = ?, commitment = ?, hash = ?, signature = ? WHERE seq = ?",
            (event.payload.decode(), event.commitment, event.hash, signature, seq),
        )
        previous = event.hash
    connection.execute("UPDATE run SET value = ? WHERE key = 'head'", (f"{seq}:{previous.hex()}",))
    connection.close()
    reader.close()


def signature_over(folder: Path, connection: sqlite3.Connection, event: Event) -> bytes | None:
    """Return the operator's signature over an event, with the key in the folder."""
    (run,) = connection.execute("SELECT value FROM run WHERE key = 'run'").fetchone()
    (public_key,) = connection.execute("SELECT value FROM run WHERE key = 'public_key'").fetchone()
    return Signer(folder, public_key).sign(run, event)


def replace_certificate(folder: Path, request: str, form: str, text: str) -> None:
    """Replace a certificate in its file, the table and the ledger, and rebuild the chain."""
    certificate_path(folder, request, form).write_text(text)
    connection = connect(folder)
    connection.execute(
        "UPDATE certificates SET content = ? WHERE request = ? AND form = ?",
        (text, request, form),
    )
    connection.close()

    def edit(kind: str, content: dict[str, Any]) -> None:
        if kind == "request done" and content["request"] == request:
            content["certificates"][form] = hashlib.sha256(text.encode()).hexdigest()

    rebuild_chain(folder, edit)


def resign_everything(folder: Path) -> None:
    """Issue every certificate again over the current chain, with the key in the folder."""
    for number in range(len(RunReader(folder).requests())):
        reader = RunReader(folder)
        request = reader.requests()[number]
        if request.status != "done":
            continue
        events = {event.seq: event for event in reader.events()}
        done = {}
        before = 0
        for seq, event in events.items():
            content = json.loads(event.payload)
            if content.get("request") == request.request and event.kind == "request done":
                done, before = content, seq - 1
        issued = json.loads(reader.certificates()[(request.request, "public")])["body"]["issued"]
        signature = (events[before].signature or b"").hex()
        body = RecordedRequest(reader, request).auditor_form(
            done["certified_models"], events[before], signature, issued
        )
        public = reader.value("public_key")
        reader.close()
        for form in (body, public_form(body)):
            text = json.dumps(sign(folder, form, public), indent=1, sort_keys=True)
            replace_certificate(folder, request.request, form["form"], text)


def sign_again(folder: Path, *, run: str | None = None) -> str:
    """Divide all drifts by a hundred and sign the whole chain with another key, under another run
    id if one is given.
    """
    execute(folder, "UPDATE participation SET drift = drift / 100")
    (folder / KEY_FILE).unlink()
    public = create_key(folder)
    execute(folder, f"UPDATE run SET value = '{public}' WHERE key = 'public_key'")
    if run is not None:
        execute(folder, f"UPDATE run SET value = '{run}' WHERE key = 'run'")

    def edit(kind: str, content: dict[str, Any]) -> None:
        if kind == "run created":
            content["run"] |= {"public_key": public} | ({} if run is None else {"run": run})

    rebuild_chain(folder, edit)
    return public


def add_event(folder: Path, kind: str, payload: dict[str, Any]) -> None:
    """Append an event, signed with the key in the folder, and change the tables accordingly."""
    connection = connect(folder)
    seq, previous, time = connection.execute("SELECT seq, hash, time FROM events ORDER BY seq DESC LIMIT 1").fetchone()
    event = seal(previous, seq + 1, time, kind, payload, secrets.token_bytes(32))
    connection.execute(
        "INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(event.seq, event.time, kind, event.payload.decode(), event.nonce, event.commitment, event.hash),
            signature_over(folder, connection, event),
        ),
    )
    for change in changes(kind, event.time, event.content):
        where = " AND ".join(f"{key} = ?" for key in KEYS[change.table])
        present = connection.execute(f"SELECT 1 FROM {change.table} WHERE {where}", change.key).fetchone()
        if change.values is None:
            connection.execute(f"DELETE FROM {change.table} WHERE {where}", change.key)
        elif present:
            values = ", ".join(f"{key} = ?" for key in change.values)
            connection.execute(
                f"UPDATE {change.table} SET {values} WHERE {where}", (*change.values.values(), *change.key)
            )
        else:
            names = [*KEYS[change.table], *change.values]
            connection.execute(
                f"INSERT INTO {change.table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})",
                (*change.key, *change.values.values()),
            )
    head = f"{event.seq}:{event.hash.hex()}"
    connection.execute("UPDATE run SET value = ? WHERE key = 'head'", (head,))
    connection.close()
