r"""Randomised check that statistics are the sum of their parts, without Gram matrices of parts stored as rows.

Parts that are statistics are subtracted from the sum. The remainder [G H] must equal Phi^' [Phi^ T^], the statistics of
the rows. Both are multiplied by m random vectors modulo 2^64 (Freivalds 1977). This takes time proportional to the
number of entries and avoids the product of the rows with themselves.

If the matrices differ, the difference has an entry e with 0 < |e| < 2^B, so e = 2^t o with odd o and t < B. For any
values of the other elements of a uniformly drawn vector, at most 2^t of the 2^64 values of the element that multiplies
e hide the difference. All vectors together hide it with a probability of at most 2^(-m (65 - B)), and m is chosen so
that this is at most 2^-64. The operating system draws the vectors after the files were written, so files cannot be
prepared for them.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable

import numpy as np

from sifu.theory.arrays import Integers
from sifu.theory.closed_form.fixed_point import LARGEST_SUM
from sifu.theory.closed_form.rows import Rows
from sifu.theory.closed_form.sums import STRIP, Statistics, rows_of_triangle, triangle_size

SECURITY_BITS = 64
"""Negative binary logarithm of the largest probability that a wrong sum passes."""
WORD_BITS = 64


def is_sum_of(whole: Statistics, parts: Iterable[Statistics | Rows]) -> bool:
    """Return whether `whole` is the sum of `parts`; a wrong sum passes with a probability of at most 2^-64."""
    fixed = whole.fixed
    bound = max(whole.samples, 0) * max(fixed.row_limit, fixed.target_limit)
    limit = min(bound + bound // 10**6 + max(whole.samples, 0), LARGEST_SUM)  # `Rows.largest` rounds up
    vectors = _vectors(fixed.width + fixed.outputs, vectors_needed(limit))
    rest, image = whole.words.copy(), np.zeros((fixed.width, vectors.shape[1]), dtype=np.int64)
    largest, is_alike = 0, True
    for part in parts:
        is_alike &= part.fixed == fixed
        largest += part.largest()
        if not is_alike:
            continue
        if isinstance(part, Statistics):
            np.subtract(rest, part.words, out=rest)
            continue
        samples = np.empty((part.samples, fixed.width + fixed.outputs), dtype=np.int64)
        samples[:, : fixed.features], samples[:, fixed.width :] = part.features, part.targets
        samples[:, fixed.features] = fixed.unit
        image += samples[:, : fixed.width].T @ (samples @ vectors)
        energy = np.einsum("ij,ij->", samples[:, fixed.width :], samples[:, fixed.width :])
        rest[-2:] -= part.samples, int(energy)
    # The number of vectors suffices for entries up to the limit, which no samples exceed.
    if not is_alike or max(whole.largest(), largest) > limit or np.any(rest[-2:]):
        return False
    return np.array_equal(_product(Statistics(fixed, rest), vectors), image)


def vectors_needed(limit: int) -> int:
    """Return the number of vectors needed if the entries of both matrices are at most `limit`.

    >>> vectors_needed(10_000 * 2**39), vectors_needed(2**61)
    (6, 32)
    """
    return math.ceil(SECURITY_BITS / (WORD_BITS + 1 - (2 * limit).bit_length()))


def _vectors(length: int, count: int) -> Integers:
    """Return uniform numbers of 64 bits, one vector per column."""
    return np.frombuffer(secrets.token_bytes(8 * length * count), dtype=np.int64).reshape(count, length).T


def _product(statistics: Statistics, vectors: Integers) -> Integers:
    """Return [G H] times the vectors, modulo 2^64."""
    width = statistics.fixed.width
    result = statistics.cross @ vectors[width:]
    for first in range(0, width, STRIP):
        last = min(first + STRIP, width)
        strip = np.zeros((last - first, last), dtype=np.int64)
        for row, entries in rows_of_triangle(statistics.words[: triangle_size(width)], first, last):
            strip[row - first, : row + 1] = entries
        result[first:last] += strip @ vectors[:last]
        strip[np.arange(last - first), np.arange(first, last)] = 0  # count the diagonal once only
        result[:last] += strip.T @ vectors[first:last]
    return result
