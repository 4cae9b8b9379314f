"""Selection of a round's participants, and the keyed draws that it uses."""

from __future__ import annotations

import hashlib
import math
import re
import typing
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from sifu.errors import InputError
from sifu.theory.arrays import Floats, Integers, Words

Scores = Words

GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
_STIRS = tuple(
    (np.uint64(shift), np.uint64(multiplier)) for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False)
)
_LAST_SHIFT = np.uint64(SHIFTS[2])


def mix(values: Scores) -> Scores:
    """Apply the finaliser of splitmix64 to each element.

    >>> hex(int(mix(np.array([1], dtype=np.uint64))[0]))
    '0x5692161d100b05e5'
    """
    values = np.array(values, dtype=np.uint64)
    return _finish(_stir(values, np.empty_like(values)))


def _stir(values: Scores, scratch: Scores) -> Scores:
    """Apply `mix` in place except for its last shift; the first 31 bits are then those of the score."""
    for shift, multiplier in _STIRS:
        values ^= np.right_shift(values, shift, out=scratch)
        values *= multiplier
    return values


def _finish(values: Scores) -> Scores:
    values ^= values >> _LAST_SHIFT
    return values


def base_key(seed: int, purpose: str) -> int:
    """Return the 64-bit key of a purpose, from which `place_key` derives the keys of places."""
    return int.from_bytes(hashlib.sha256(f"{int(seed)}:{purpose}".encode()).digest()[:8], "little")


def place_key(base: ArrayLike, *place: ArrayLike) -> Scores:
    """Derive the key of a place, such as (branch, round, client), from `base`; arrays give the keys of many places.

    >>> a = place_key(base_key(7, "batches"), 0, 3, np.array([5, 6]))
    >>> int(a[1]) == int(place_key(base_key(7, "batches"), 0, 3, 6))
    True
    """
    if all(
        isinstance(value, int) for value in (base, *place)
    ):  # for a single key, Python integers are ten times faster
        whole = typing.cast("int", base)
        for part in place:
            whole = _mix_one((whole + GOLDEN * (typing.cast("int", part) + 1)) % 2**64)
        return np.asarray(whole, dtype=np.uint64)
    key = np.asarray(base, dtype=np.uint64)
    for part in place:
        key = scores(key, part)
    return key


def _mix_one(value: int) -> int:
    """Apply `mix` to one number."""
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        value = (value ^ (value >> shift)) * multiplier % 2**64
    return value ^ (value >> SHIFTS[2])


def scores(key: ArrayLike, index: ArrayLike) -> Scores:
    """Return the score of each index under a key, uniform on 0..2^64-1."""
    with np.errstate(over="ignore"):
        step = (np.asarray(index).astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
        places = np.asarray(np.asarray(key, dtype=np.uint64) + step)
        return mix(np.atleast_1d(places)).reshape(places.shape)


def fractions(drawn: Scores) -> Floats:
    """Convert scores to numbers in [0, 1) with 53 bits."""
    return (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-53


_PIECE = 65536
"""Number of scores drawn at once, so that they fit into a core's own cache."""
_FEW = 4096
"""Largest number of places for which all scores are computed completely."""


@dataclass(frozen=True)
class Places:
    """Indices prepared for repeated draws.

    The score of an index depends on a key and on the index's number j; `steps` holds the terms GOLDEN * (j + 1).
    """

    index: Integers
    steps: Scores

    @staticmethod
    def of(index: Integers, numbers: Integers | None = None) -> Places:
        """Prepare a copy of `index`; each index has the score of its entry in `numbers`, by default its own."""
        own = np.array(index, dtype=np.int64)
        drawn_for = own if numbers is None else np.array(numbers, dtype=np.int64)
        with np.errstate(over="ignore"):
            return Places(own, (drawn_for.view(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN))


def _scores_of(key: ArrayLike, places: Places) -> Scores:
    """Return the `scores` for prepared places."""
    values = places.steps + np.asarray(key, dtype=np.uint64)  # an array plus a scalar wraps around without a warning
    return _finish(_stir(values, np.empty_like(values)))


def scores_below(key: ArrayLike, places: Places, limit: int) -> tuple[Integers, Scores]:
    """Return the positions in `places` whose score under `key` is below `limit` (0..2^64), in order, and their scores.

    A first pass leaves out the last step of `mix` and selects candidates; only their scores are completed.
    """
    size = places.index.size
    if limit <= 0 or size == 0:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.uint64)
    whole = np.asarray(key, dtype=np.uint64)
    # `_stir` already gives the first 31 bits of a score; if the score is below `limit`, its result is at most `rough`.
    rough = np.uint64((((limit - 1) >> 33) << 33) + 2**33 - 1)
    values, scratch = np.empty((2, min(_PIECE, size)), dtype=np.uint64)
    near, finished = [], []
    for start in range(0, size, _PIECE):
        piece = places.steps[start : start + _PIECE]
        stirred = _stir(np.add(piece, whole, out=values[: piece.size]), scratch[: piece.size])
        rather = np.flatnonzero(stirred <= rough)
        near.append(rather + start)
        finished.append(_finish(stirred[rather]))
    everywhere, drawn = np.concatenate(near), np.concatenate(finished)
    below = drawn <= np.uint64(limit - 1)
    return everywhere[below], drawn[below]


def fraction_limit(fraction: float) -> int:
    """Return the limit such that score < limit if and only if `fractions(score)` < fraction, for 0 <= fraction <= 1."""
    return math.ceil(fraction * 2.0**53) << 11


def smallest_scores(key: ArrayLike, places: Places, count: int) -> Integers:
    """Return the positions in `places` of the `count` smallest scores under `key`, in order. Ties go to the earlier.

    With many places, only scores below a limit are sorted. The limit leaves `count` plus eight standard deviations in
    expectation, so a second pass over all places is almost never needed.
    """
    size = places.index.size
    if count >= size:
        return np.arange(size)
    if count > 0 and size <= _FEW:
        values = _scores_of(key, places)
        chosen = np.flatnonzero(values <= np.partition(values, count - 1)[count - 1])
        # There are more than `count` only if the largest score is tied.
        return chosen if chosen.size == count else np.sort(values.argsort(kind="stable")[:count])
    expected = count + 8.0 * math.sqrt(count) + 16.0
    near, drawn = scores_below(key, places, fraction_limit(min(1.0, expected / size)))
    if near.size < count:
        near, drawn = scores_below(key, places, 2**64)
    return np.sort(near[np.argsort(drawn, kind="stable")[:count]])


ClientIndices = Integers


@dataclass(frozen=True)
class Participation:
    """Rule that selects a round's participants: `all`, `poisson(rate)` or `fixed(count)`."""

    kind: Literal["all", "poisson", "fixed"]
    rate: float = 1.0
    count: int = 0

    @staticmethod
    def parse(text: str) -> Participation:
        """Read `all`, `poisson(0.1)` or `fixed(10)`.

        >>> Participation.parse("poisson(0.25)")
        Participation(kind='poisson', rate=0.25, count=0)
        """
        if text == "all":
            return Participation("all")
        match = re.fullmatch(r"(poisson|fixed)\(\s*([0-9.eE+-]+)\s*\)", text.strip())
        try:
            if match and match[1] == "poisson" and 0.0 < (rate := float(match[2])) <= 1.0:
                return Participation("poisson", rate=rate)
            if match and match[1] == "fixed" and (count := int(match[2])) >= 1:
                return Participation("fixed", count=count)
        except ValueError:
            pass
        raise InputError(
            f"participation {text!r} is not valid: write all, poisson(RATE) with 0 < RATE <= 1, or fixed(COUNT) with "
            "COUNT >= 1"
        )

    def __str__(self) -> str:
        if self.kind == "poisson":
            return f"poisson({self.rate!r})"
        if self.kind == "fixed":
            return f"fixed({self.count})"
        return "all"

    @property
    def independent(self) -> bool:
        """True if clients take part independently of each other."""
        return self.kind != "fixed"

    def draw(self, active: ClientIndices | Places, key: ArrayLike) -> ClientIndices:
        """Return the sorted participants of one round.

        Client i has score_i under the round's key. `poisson` selects the clients whose fraction is below the rate,
        `fixed` the `count` clients with the smallest scores, with ties broken by index. A client's score does not
        depend on other clients, so a Poisson draw does not change when another client leaves.

        Args:
            active: Indices of the clients to draw from. For repeated draws from the same clients, pass `Places` in
                increasing order.
            key: Key of the round's random draws.
        """
        places = active if isinstance(active, Places) else Places.of(np.sort(np.asarray(active, dtype=np.int64)))
        if self.kind == "all":
            return places.index.copy()
        if self.kind == "poisson":
            return places.index[scores_below(key, places, fraction_limit(self.rate))[0]]
        return places.index[smallest_scores(key, places, self.count)]
