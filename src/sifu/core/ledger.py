"""The hash chain of a run: each event commits to its content with a salt, and to the event before it.

    commitment = SHA-256(nonce || payload)              nonce: 32 random bytes, payload: canonical JSON
    hash       = SHA-256(previous hash || seq || NUL || time || NUL || kind || NUL || commitment)

The chain of hashes can be shown to anyone: without the nonces it tells nothing of the payloads. Anyone
who holds the folder recomputes all of it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

GENESIS = bytes(32)
"""The hash before the first event."""

NONCE_BYTES = 32


def canonical_json(value: Any) -> bytes:
    """The one byte string of a JSON value: keys sorted, no spaces, UTF-8, floats as Python's repr.

    NaN and infinities are refused; they are not JSON.

    >>> canonical_json({"b": 1.5, "a": [True, None]})
    b'{"a":[true,null],"b":1.5}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode("utf-8")


def finite_or_text(value: float | None) -> float | str | None:
    """A float as JSON can hold it: an infinite Psi becomes the word."""
    return value if value is None or math.isfinite(value) else str(value)


def commit(nonce: bytes, payload: bytes) -> bytes:
    """SHA-256(nonce || payload)."""
    return hashlib.sha256(nonce + payload).digest()


def chain(previous: bytes, seq: int, time: str, kind: str, commitment: bytes) -> bytes:
    """The hash of an event, which the next one builds on."""
    text = b"\0".join([str(seq).encode(), time.encode(), kind.encode()])
    return hashlib.sha256(previous + text + b"\0" + commitment).digest()


@dataclass(frozen=True)
class Event:
    """One entry of the ledger."""

    seq: int
    time: str
    kind: str
    payload: bytes
    nonce: bytes
    commitment: bytes
    hash: bytes

    @cached_property
    def content(self) -> dict[str, Any]:
        """The payload, read once; not to be changed by the caller."""
        found: dict[str, Any] = json.loads(self.payload)
        return found


def seal(previous: bytes, seq: int, time: str, kind: str, payload: Any, nonce: bytes) -> Event:
    """The next event of a chain whose last hash is `previous`."""
    content = canonical_json(payload)
    commitment = commit(nonce, content)
    return Event(seq, time, kind, content, nonce, commitment, chain(previous, seq, time, kind, commitment))


def broken_links(events: Iterable[Event]) -> Iterator[str]:
    """A sentence for every event that does not recompute."""
    previous = GENESIS
    for expected, event in enumerate(events, start=1):
        if event.seq != expected:
            yield f"ledger: event {expected} is missing or out of order (found event {event.seq})"
            return
        if commit(event.nonce, event.payload) != event.commitment:
            yield f"ledger: the content of event {event.seq} ({event.kind}) does not match its commitment"
        if chain(previous, event.seq, event.time, event.kind, event.commitment) != event.hash:
            yield f"ledger: event {event.seq} ({event.kind}) does not follow from the events before it"
        previous = event.hash
