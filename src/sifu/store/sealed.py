"""Whether the clients' samples are still those a run was made with: salted digests in the ledger, salts in a file.

The ledger keeps the digest of a client's samples for ever. It is salted, and the salt lies in the file `salts.json`
alone: once the client is forgotten its salt is erased, and then the digest cannot confirm that some samples were the
client's. A client whose records are being forgotten keeps it until it has joined again with the rest. Clients of Flower
keep their samples to themselves, and have neither.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sifu.core.ledger import NONCE_BYTES, SEALED, SEALED_KEYS, Event, canonical_json, read_json, seal_commitment
from sifu.errors import InputError
from sifu.store.files import SALT_BYTES, read_plain, write_atomically
from sifu.store.reader import JOINED, RunReader, remainder_to_join

SALTS_FILE = "salts.json"
WITHOUT_SALTS = (
    "put the file back from a backup of the run. Where there is none, nothing more can be trained or forgotten here: "
    "train the clients that stay in a new folder, which never sees the others' data, and delete this one "
    "(docs/security.md, a lost salts.json)"
)
"""What an operator can do once salts are lost."""


def salted_sample_digest(salt: str, digest: str) -> str:
    """SHA-256 over the salt and the digest of the samples, all of them in hexadecimal digits.

    >>> salted_sample_digest("00" * 32, "11" * 32)[:8]
    '8878b15a'
    """
    return hashlib.sha256(bytes.fromhex(salt) + bytes.fromhex(digest)).hexdigest()


def add_salts(folder: Path, digests: Mapping[int, str]) -> dict[int, str]:
    """Write a new salt for each client, before the event that records the salted digests, which are returned."""
    new = {client: secrets.token_hex(SALT_BYTES) for client in digests}
    if new:
        _write(folder, read_salts(folder) | new)
    return {client: salted_sample_digest(new[client], digest) for client, digest in digests.items()}


def recorded_digests(reader: RunReader) -> dict[int, str]:
    """The salted digest of each client's samples by the client's number, of those that have one."""
    joined, count = reader.joined(), len(reader.clients())
    recorded: dict[int, str] = dict(enumerate(reader.payload(1).get("sample_digests", [])))
    for client, seq in enumerate(joined, start=count - len(joined)):
        payload = reader.payload(seq)
        if "sample_digest" in payload:
            recorded[client] = payload["sample_digest"]
    return recorded


def outlived(reader: RunReader) -> set[int]:
    """Clients whose salt is to be erased: everyone forgotten, but for whom is still to join again with less.

    Clients forgotten after a backup stay forgotten in a restoration, before their request is carried out again.
    """
    waiting = remainder_to_join(reader)
    forgotten = {client for subject in reader.subjects() for client in subject.clients}
    restored = reader.query("SELECT payload FROM events WHERE kind = 'restored'")
    again = {request for (payload,) in restored for request in json.loads(payload)["requests"]}
    names = {name for row in reader.requests() if row.request in again for name in row.clients}
    forgotten |= {client for client, profile in enumerate(reader.clients()) if profile.name in names}
    return forgotten - ({waiting.before} if waiting else set())


def erase_salts(reader: RunReader) -> None:
    """Erase the salts of everyone forgotten, and of clients that were never recorded."""
    salts = read_salts(reader.folder)
    gone = outlived(reader) if salts else set()
    stay = {client: salt for client, salt in salts.items() if client not in gone and client < len(reader.clients())}
    if stay != salts:
        _write(reader.folder, stay)


def read_salts(folder: Path) -> dict[int, str]:
    """Salts by the client's number; none where there is no file. A file that is not ours is refused."""
    path = folder / SALTS_FILE
    try:
        content: dict[str, Any] = json.loads(read_plain(path))
        salts = {int(client): str(salt) for client, salt in content.items()}
        if any(len(bytes.fromhex(salt)) != SALT_BYTES for salt in salts.values()):
            raise ValueError("a salt has another length")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path} cannot be read ({error}): {WITHOUT_SALTS}") from error
    return salts


def _write(folder: Path, salts: Mapping[int, str]) -> None:
    write_atomically(folder / SALTS_FILE, canonical_json({str(client): salt for client, salt in sorted(salts.items())}))


PURGED = "purged"
"""The kind of a purge's event."""
ALL_FIGURES = "all_figures"
"""The key of its payload where it erased the figures that certificates by noise rested on, at the operator's wish."""
OF_THE_FORGOTTEN = ("request done", "comparison", JOINED, PURGED)
"""Events that may tell of the data of clients that were forgotten before: by what was measured, or by a digest that
covers them."""


def set_apart(payload: dict[str, Any]) -> tuple[bytes, bytes] | None:
    """Take what is to be sealed out of a payload, which then commits to it; returns salt and content."""
    private = {key: payload.pop(key) for key in SEALED_KEYS if key in payload}
    if not private:
        return None
    salt, content = secrets.token_bytes(NONCE_BYTES), canonical_json(private)
    payload[SEALED] = seal_commitment(salt, content)
    return salt, content


def erased_by_purges(events: Iterable[Event]) -> dict[int, int]:
    """The events whose sealed part a purge erased, each with the event of the first such purge.

    A purge erases everything that was measured before the last request was rolled back, when a forgotten client was
    still among the clients, and what was measured on the data of the forgotten since; one of all figures erases all.
    """
    erased: dict[int, int] = {}
    before: list[Event] = []
    rolled_back = 0
    for event in events:
        if event.kind == PURGED and rolled_back:
            whole = ALL_FIGURES in event.content
            for earlier in before:
                if whole or earlier.seq <= rolled_back or earlier.kind in OF_THE_FORGOTTEN:
                    erased.setdefault(earlier.seq, event.seq)
        if event.kind == "rolled back":
            rolled_back = event.seq
        before.append(event)
    return {
        event.seq: erased[event.seq] for event in before if event.seq in erased and SEALED in read_json(event.payload)
    }


def erased_by_next_purge(events: Sequence[Event]) -> list[Event]:
    """The events whose sealed part a purge would erase now, other than the last purge itself."""
    next_purge = replace(events[-1], seq=events[-1].seq + 1, kind=PURGED)
    erased, before = erased_by_purges([*events, next_purge]), erased_by_purges(events)
    return [event for event in events if event.seq in erased.keys() - before.keys() and event.kind != PURGED]


def erase_sealed(connection: sqlite3.Connection, events: Iterable[Event]) -> None:
    """Delete what the last purge erases, and the rows that came of it; inside the transaction of its event."""
    erased = erased_by_purges(events)
    gone, stays = set[tuple[int, str]](), set[tuple[int, str]]()
    models: dict[str, float] = {}
    for seq, text in connection.execute("SELECT seq, content FROM sealed ORDER BY seq").fetchall():
        content = read_json(text)
        rows = {(row["node"], row["subset"]) for row in content.get("evaluations", [])}
        (gone if seq in erased else stays).update(rows)
        psi_max = content.get("psi_max", {})
        models |= dict.fromkeys(psi_max, 0.0) if seq in erased else psi_max
    connection.executemany("DELETE FROM sealed WHERE seq = ?", [(seq,) for seq in erased])
    connection.executemany(
        "UPDATE models SET psi_max = ? WHERE node = ?", [(psi, int(node)) for node, psi in models.items()]
    )
    connection.executemany("DELETE FROM evaluations WHERE node = ? AND subset = ?", sorted(gone - stays))
    if erased:
        connection.execute("UPDATE comparisons SET forgotten_accuracy = NULL")


def check_sealed(reader: RunReader) -> Iterator[str]:
    """Every sealed part is the one its event commits to, or was erased by a purge."""
    stored = {seq: (salt, content) for seq, salt, content in reader.query("SELECT seq, salt, content FROM sealed")}
    events = reader.events()
    erased = erased_by_purges(events)
    for event in events:
        payload = read_json(event.payload)
        wrong = sorted(set(payload) & set(SEALED_KEYS))
        if wrong:
            yield f"ledger: event {event.seq} holds {', '.join(wrong)} in the open, which would outlive a purge"
        part = stored.pop(event.seq, None)
        if part is None:
            if SEALED in payload and event.seq not in erased:
                yield f"ledger: the sealed part of event {event.seq} ({event.kind[:40]}) is missing (no such seq)"
            continue
        salt, content = part
        if event.seq in erased:
            yield (
                f"ledger: event {erased[event.seq]} erased what event {event.seq} measured, and it is there again: "
                "find out where it comes from"
            )
        if len(salt) != NONCE_BYTES or seal_commitment(salt, content.encode()) != payload.get(SEALED):
            yield (
                f"ledger: salt and content of the sealed part of event {event.seq} ({event.kind[:40]}) are not what it "
                "commits to"
            )
        elif not set(read_json(content)) <= set(SEALED_KEYS) or canonical_json(read_json(content)) != content.encode():
            yield f"ledger: the sealed part of event {event.seq} holds other things than figures of its kind"
    for seq in sorted(stored):
        yield f"ledger: there is a sealed part with seq {seq}, an event that does not exist"


def erased_notes(reader: RunReader) -> list[str]:
    """What can no longer be recomputed because a purge erased it."""
    erased = erased_by_purges(reader.events())
    if not erased:
        return []
    return [
        f"what {len(erased)} events up to event {max(erased)} measured on clients' data was erased by the purge at "
        f"event {max(erased.values())}: losses and accuracies of that time can neither be shown nor compared"
    ]
