"""Hash chain of a run: each event commits to its content with a salt, and to the event before it.

    commitment = SHA-256(nonce || payload)              nonce: 32 random bytes, payload: canonical JSON
    hash       = SHA-256(previous hash || seq || NUL || time || NUL || kind || NUL || commitment)

The chain of hashes can be made public: without the nonces it reveals nothing about the payloads. Anyone who has the run
folder can recompute every hash.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import rfc8785

GENESIS = bytes(32)
"""Hash before the first event."""

NONCE_BYTES = 32
RELEASE_DISTANCES = "release_distances"
"""Sealed key of the distances between a released head and the heads without each client or one of its records."""


LARGEST_INTEGER = 2**53 - 1
"""Largest integer that float64, and so RFC 8785, represents exactly; callers write larger integers as strings."""

_UNLIKE = re.compile(r"\d\.0(?!\d)|\de[+-]|\d{16}")
"""Pattern of numbers that Python may write differently from ECMAScript; it also matches long digit strings, harmlessly.
"""


def canonical_json(value: Any) -> bytes:
    """Return the canonical bytes of a JSON value by RFC 8785, which programs in any language can reproduce.

    Keys are sorted by UTF-16 code units, there are no spaces, and numbers are written as in ECMAScript.

    Raises:
        ValueError: If the value has a NaN, an infinity, an integer beyond 2^53 or an unpaired surrogate.

    >>> canonical_json({"b": 1.5, "a": [True, None, 1e21, 2.0]})
    b'{"a":[true,null,1e+21,2],"b":1.5}'
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    if _UNLIKE.search(text) or not (text.isascii() or max(text) <= "\uffff"):
        return rfc8785.dumps(value)
    return text.encode("utf-8")  # rfc8785 gives the same bytes but is several times slower


def read_json(content: bytes | str, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Parse JSON with the number types of canonical JSON: integers up to 2^53, and float64 otherwise.

    Args:
        content: JSON document.
        pairs: Function that builds an object from its keys and values, for callers that must notice a repeated key.

    Raises:
        ValueError: If the content is not JSON, or is nested too deeply to be read.

    >>> read_json(b"[1, 1e3, 100000000000000000000]")
    [1, 1000.0, 1e+20]
    """
    try:
        return json.loads(content, parse_int=_number, object_pairs_hook=pairs)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _number(digits: str) -> int | float:
    if len(digits) <= 17 and abs(value := int(digits)) <= LARGEST_INTEGER:
        return value
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"a number of {len(digits)} digits is beyond float64")
    return number


def finite_or_text(value: float | None) -> float | str | None:
    """Return a finite number or None unchanged, and an infinity or NaN as a string: JSON has no such numbers."""
    return value if value is None or math.isfinite(value) else str(value)


def plain_values(value: Any) -> Any:
    """Return a value in a form that JSON can represent; NaN and infinities become None."""
    if isinstance(value, dict):
        return {str(key): plain_values(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def commit(nonce: bytes, payload: bytes) -> bytes:
    """Return SHA-256(nonce || payload), which reveals nothing about the payload without the nonce."""
    return hashlib.sha256(nonce + payload).digest()


def chain(previous: bytes, seq: int, time: str, kind: str, commitment: bytes) -> bytes:
    """Return the hash of an event, which also covers all earlier events through `previous`."""
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
    signature: bytes | None = None
    """Operator's signature over this event and thereby over all earlier ones, or None if the key was not available."""

    @property
    def head(self) -> str:
        """`SEQ:HASH`, which identifies the ledger up to this event."""
        return f"{self.seq}:{self.hash.hex()}"

    @cached_property
    def content(self) -> dict[str, Any]:
        """Payload, parsed once; callers must not modify it."""
        content: dict[str, Any] = read_json(self.payload)
        return content


def seal(previous: bytes, seq: int, time: str, kind: str, payload: Any, nonce: bytes) -> Event:
    """Return the next event of a chain whose last hash is `previous`."""
    content = canonical_json(payload)
    commitment = commit(nonce, content)
    return Event(seq, time, kind, content, nonce, commitment, chain(previous, seq, time, kind, commitment))


def broken_links(events: Iterable[Event]) -> Iterator[str]:
    """Yield a problem for every event, in order, whose hash or commitment is wrong."""
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
