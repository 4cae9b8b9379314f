"""Sealed parts of events: figures measured on clients' data that the ledger commits to and a purge erases."""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from sifu.core.ledger import NONCE_BYTES, SEALED, SEALED_KEYS, Event, canonical_json, commit, read_json
from sifu.store.reader import JOINED, RELEASED, RunReader

PURGED = "purged"
"""Kind of the event that records a purge."""
ALL_FIGURES = "all_figures"
"""Payload key of a purge that also erased the figures behind certificates with noise (`sifu purge --figures`)."""
OF_THE_FORGOTTEN = ("request done", JOINED, PURGED)
"""Kinds of events with measurements or digests that may reveal data of clients forgotten earlier."""


def split_sealed(payload: dict[str, Any]) -> tuple[bytes, bytes] | None:
    """Move the figures to be sealed out of an event's payload and put a commitment to them in their place.

    Returns:
        Salt and content of the sealed part, or None if the payload has no such figures.
    """
    private = {key: payload.pop(key) for key in SEALED_KEYS if key in payload}
    if not private:
        return None
    salt, content = secrets.token_bytes(NONCE_BYTES), canonical_json(private)
    payload[SEALED] = commit(salt, content).hex()
    return salt, content


def erased_by_purges(events: Iterable[Event]) -> dict[int, int]:
    """Return the events whose sealed part was erased: the number of the purge, by the number of the event.

    A purge erases every measurement up to the last rollback, because a forgotten client was still taking part. It also
    erases later events that may reveal data of forgotten clients (`OF_THE_FORGOTTEN`). Before the first rollback it
    erases nothing. A purge of all figures erases every sealed part. Any other purge keeps the distances of releases,
    because later certificates compose the cost of all releases from them.
    """
    erased: dict[int, int] = {}
    before: list[Event] = []
    rolled_back = 0
    for event in events:
        if event.kind == PURGED and rolled_back:
            whole = ALL_FIGURES in event.content
            for earlier in before:
                measured = earlier.kind != RELEASED and earlier.seq <= rolled_back
                if whole or measured or earlier.kind in OF_THE_FORGOTTEN:
                    erased.setdefault(earlier.seq, event.seq)
        if event.kind == "rolled back":
            rolled_back = event.seq
        before.append(event)
    return {
        event.seq: erased[event.seq] for event in before if event.seq in erased and SEALED in read_json(event.payload)
    }


def erased_by_next_purge(events: Sequence[Event]) -> list[Event]:
    """Return the events, other than purges, whose sealed part a purge would erase now."""
    next_purge = replace(events[-1], seq=events[-1].seq + 1, kind=PURGED)
    erased, before = erased_by_purges([*events, next_purge]), erased_by_purges(events)
    return [event for event in events if event.seq in erased.keys() - before.keys() and event.kind != PURGED]


def erase_sealed(connection: sqlite3.Connection, events: Iterable[Event]) -> None:
    """Delete the sealed parts that the last purge erases, and the rows derived from them.

    Call it inside the transaction that records the purge, with all events including the event of the purge.
    """
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


def check_sealed(reader: RunReader) -> Iterator[str]:
    """Yield a problem for each sealed part that is missing, present although erased, or differs from its commitment."""
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
        if len(salt) != NONCE_BYTES or commit(salt, content.encode()).hex() != payload.get(SEALED):
            yield (
                f"ledger: salt and content of the sealed part of event {event.seq} ({event.kind[:40]}) are not what it "
                "commits to"
            )
        elif not set(read_json(content)) <= set(SEALED_KEYS) or canonical_json(read_json(content)) != content.encode():
            yield f"ledger: the sealed part of event {event.seq} has keys other than figures, or is not canonical JSON"
    for seq in sorted(stored):
        yield f"ledger: there is a sealed part with seq {seq}, an event that does not exist"


def erased_notes(reader: RunReader) -> list[str]:
    """Return a note on the figures that purges erased, or an empty list if there are none."""
    erased = erased_by_purges(reader.events())
    if not erased:
        return []
    return [
        f"what {len(erased)} events up to event {max(erased)} measured on clients' data was erased by the purge at "
        f"event {max(erased.values())}: losses and accuracies of that time can neither be shown nor compared"
    ]
