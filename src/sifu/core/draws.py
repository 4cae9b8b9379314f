"""Draws that any device makes alike: a hash of where a draw belongs, instead of a running generator.

A round draws its participants, its batches and its dropped units from integers alone,

    key(seed, purpose, a, b, ...) = mix(... mix(mix(base + G (a+1)) + G (b+1)) ...),    score_j = mix(key + G (j+1)),

modulo 2^64, with `mix` the finaliser of splitmix64 (Steele, Lea and Flood 2014) and `base` from SHA-256 of seed and
purpose. Integer arithmetic is exact, so numpy, torch on a GPU and a Triton kernel agree on every score; nothing
depends on who else takes part, and thousands of clients are drawn for in one vectorised call. This is for
schedules; noise that protects anyone comes from `sifu.core.noise`.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import ArrayLike, NDArray

Scores = NDArray[np.uint64]

GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)


def mix(values: Scores) -> Scores:
    """The finaliser of splitmix64, element by element.

    >>> hex(int(mix(np.array([1], dtype=np.uint64))[0]))
    '0x5692161d100b05e5'
    """
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(SHIFTS[0]))) * np.uint64(MULTIPLIERS[0])
        values = (values ^ (values >> np.uint64(SHIFTS[1]))) * np.uint64(MULTIPLIERS[1])
        return values ^ (values >> np.uint64(SHIFTS[2]))


def base_key(seed: int, purpose: str) -> int:
    """The 64-bit key of a purpose, from which places are derived."""
    return int.from_bytes(hashlib.sha256(f"{int(seed)}:{purpose}".encode()).digest()[:8], "little")


def place_key(base: ArrayLike, *place: ArrayLike) -> Scores:
    """The key of a place under `base`; arrays broadcast, so one call serves many clients.

    >>> a = place_key(base_key(7, "batches"), 0, 3, np.array([5, 6]))
    >>> int(a[1]) == int(place_key(base_key(7, "batches"), 0, 3, 6))
    True
    """
    key = np.asarray(base, dtype=np.uint64)
    for part in place:
        key = scores(key, part)
    return key


def scores(key: ArrayLike, index: ArrayLike) -> Scores:
    """score_j of each index under a key: uniform on 0..2^64-1."""
    with np.errstate(over="ignore"):
        step = (np.asarray(index).astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
        return mix(np.atleast_1d(np.asarray(key, dtype=np.uint64) + step)).reshape(
            np.broadcast_shapes(np.shape(key), np.shape(index))
        )


def fractions(drawn: Scores) -> NDArray[np.float64]:
    """Scores as numbers in [0, 1) with 53 bits."""
    return (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-53
