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
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import rfc8785

GENESIS = bytes(32)
"""The hash before the first event."""

NONCE_BYTES = 32
SEALED = "sealed"
"""The key of a payload that commits to what the event measured on clients' data."""
FIGURES_SALT = "figures_salt"
"""The sealed key of the salt in the event's digests of rows and clients; without it they tell nothing."""
LOCAL_RATES = "local_rates"
"""The sealed key, and that of the run table, of automatic local rates, each under the fresh model that training at it
began from."""
RELEASE_DISTANCES = "release_distances"
"""The sealed key of how far a released head is from the heads without each client, and without one of its records."""
SEALED_KEYS = (
    "evaluations", "forgotten_accuracy", "relative_penalty", "auto", "psi_max", FIGURES_SALT, LOCAL_RATES,
    RELEASE_DISTANCES,
)  # fmt: skip
"""What is never in a payload itself: figures that a guess of a client's data can be held against."""


LARGEST_INTEGER = 2**53 - 1
"""RFC 8785 has no number beyond what a float64 holds exactly; a larger integer is written as text."""

_UNLIKE = re.compile(r"\d\.0(?!\d)|\de[+-]|\d{16}")
"""Where Python may write a number in another way than ECMAScript; long texts of digits match too, which is harmless."""


def canonical_json(value: Any) -> bytes:
    """The one byte string of a JSON value by RFC 8785, so that a program in any language makes the same bytes.

    Keys are sorted by UTF-16 code units, there are no spaces, numbers are written as ECMAScript writes them. NaN,
    infinities, integers beyond 2^53 and halves of characters are refused with a ValueError.

    >>> canonical_json({"b": 1.5, "a": [True, None, 1e21, 2.0]})
    b'{"a":[true,null,1e+21,2],"b":1.5}'
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    if _UNLIKE.search(text) or not (text.isascii() or max(text) <= "\uffff"):
        return rfc8785.dumps(value)
    return text.encode("utf-8")  # the same bytes, several times faster


def read_json(content: bytes | str, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """A JSON value as canonical JSON means it: a number that is not an integer up to 2^53 is a float64.

    `pairs` makes an object of its keys and values, for callers that must notice a repeated key.

    >>> read_json(b"[1, 1e3, 100000000000000000000]")
    [1, 1000.0, 1e+20]
    """
    return json.loads(content, parse_int=_number, object_pairs_hook=pairs)


def _number(digits: str) -> int | float:
    if len(digits) <= 17 and abs(value := int(digits)) <= LARGEST_INTEGER:
        return value
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"a number of {len(digits)} digits is beyond float64")
    return number


def finite_or_text(value: float | None) -> float | str | None:
    """A float as JSON can hold it: an infinite Psi becomes the word."""
    return value if value is None or math.isfinite(value) else str(value)


def plain_values(value: Any) -> Any:
    """A value as JSON can hold it, for people and other programs: figures that it cannot hold become null."""
    if isinstance(value, dict):
        return {str(key): plain_values(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


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
    signature: bytes | None = None
    """The operator's, over this event and so over all before it; None where the key was not available."""
    sealed: bytes | None = None
    """What was measured on clients' data: outside the payload, which commits to it with a salt, so it can be erased."""

    @property
    def head(self) -> str:
        """`SEQ:HASH`, as the end of a ledger is named."""
        return f"{self.seq}:{self.hash.hex()}"

    @cached_property
    def content(self) -> dict[str, Any]:
        """The payload and what is sealed, read once; not to be changed by the caller."""
        content: dict[str, Any] = read_json(self.payload)
        if self.sealed is not None:
            sealed = read_json(self.sealed)
            content |= {key: sealed[key] for key in SEALED_KEYS if key in sealed}
        return content


def seal(previous: bytes, seq: int, time: str, kind: str, payload: Any, nonce: bytes) -> Event:
    """The next event of a chain whose last hash is `previous`."""
    content = canonical_json(payload)
    commitment = commit(nonce, content)
    return Event(seq, time, kind, content, nonce, commitment, chain(previous, seq, time, kind, commitment))


def seal_commitment(salt: bytes, content: bytes) -> str:
    """How a payload names its sealed part: SHA-256(salt || content). Without the salt it tells nothing."""
    return hashlib.sha256(salt + content).hexdigest()


def broken_links(events: Iterable[Event], erased_before: int = 0) -> Iterator[str]:
    """A sentence for every event that does not recompute.

    Of events before `erased_before` whose nonce is gone, a purge erased a part: they cannot be opened any more.
    """
    previous = GENESIS
    for expected, event in enumerate(events, start=1):
        if event.seq != expected:
            yield f"ledger: event {expected} is missing or out of order (found event {event.seq})"
            return
        opens = bool(event.nonce) or event.seq >= erased_before
        if opens and commit(event.nonce, event.payload) != event.commitment:
            yield f"ledger: the content of event {event.seq} ({event.kind}) does not match its commitment"
        if chain(previous, event.seq, event.time, event.kind, event.commitment) != event.hash:
            yield f"ledger: event {event.seq} ({event.kind}) does not follow from the events before it"
        previous = event.hash
