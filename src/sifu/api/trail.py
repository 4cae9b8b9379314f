"""Events of a run's record, for people who examine it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from sifu.store.reader import RunReader


@dataclass(frozen=True)
class TrailEvent:
    """An event of the record: its content, its hash, and whether the operator signed it."""

    seq: int
    time: str
    kind: str
    content: dict[str, Any]
    hash: str
    signed: bool


@dataclass(frozen=True)
class Trail:
    """Latest events of some kinds, the last one first, and the number of all events of these kinds."""

    events: tuple[TrailEvent, ...]
    count: int


def trail_of(reader: RunReader, kind: str, most: int) -> Trail:
    """Return at most `most` of the latest events whose kind begins with `kind`."""
    of_kind = (len(kind), kind)
    ((count,),) = reader.query("SELECT COUNT(*) FROM events WHERE substr(kind, 1, ?) = ?", of_kind)
    rows = reader.query(
        "SELECT seq, time, kind, payload, hash, signature IS NOT NULL FROM events "
        "WHERE substr(kind, 1, ?) = ? ORDER BY seq DESC LIMIT ?",
        (*of_kind, most),
    )
    events = (
        TrailEvent(seq, when, event, json.loads(payload), bytes(digest).hex(), bool(signed))
        for seq, when, event, payload, digest, signed in rows
    )
    return Trail(tuple(events), count)
