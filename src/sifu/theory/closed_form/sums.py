r"""Exact sums (G, H, n, q) that clients send: their arithmetic, canonical form and digest.

G = Phi^' Phi^, H = Phi^' T^, n samples, q = sum ||T^||^2 (docs/theory.md, section 14.3). Integer addition does not
depend on the order and has no rounding error. Whichever clients joined, left or were replaced, the result is the sum
over the current clients.

The canonical form, `words`, consists of int64 numbers: the lower triangle of G row by row, H row by row, n, q. The
digest is SHA-256 of the line `sifu statistics 1 <FixedPoint.describe()>\n` in UTF-8 and then the words, little-endian.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from sifu.errors import InputError
from sifu.theory.arrays import Array, Floats, Integers
from sifu.theory.closed_form.fixed_point import LARGEST_SUM, FixedPoint
from sifu.theory.closed_form.rows import BLOCK_ROWS, Rows, exact_blocks, stacked, words_at

TILE = 128
STRIP = 512
"""Number of rows of G that are computed at once, up to the diagonal."""


@dataclass(frozen=True, eq=False)
class Statistics:
    """(G, H, n, q) of some samples in one fixed-point format, as `words`: the canonical form without its heading."""

    fixed: FixedPoint
    words: Integers

    def __post_init__(self) -> None:
        expected = words_at(self.fixed)
        if self.words.shape != (expected,) or self.words.dtype != np.int64:
            raise InputError(f"statistics have {self.words.dtype} {self.words.shape}; int64 ({expected},) was expected")
        self.words.flags.writeable = False

    @staticmethod
    def empty(fixed: FixedPoint) -> Statistics:
        """Return the statistics of an empty set of samples, which are all zero."""
        return Statistics(fixed, np.zeros(words_at(fixed), dtype=np.int64))

    @property
    def samples(self) -> int:
        """Number of samples, n."""
        return int(self.words[-2])

    @property
    def target_energy(self) -> int:
        """Sum of the squared lengths of the targets, q."""
        return int(self.words[-1])

    @property
    def cross(self) -> Integers:
        """Matrix H."""
        return self.words[triangle_size(self.fixed.width) : -2].reshape(self.fixed.width, self.fixed.outputs)

    @property
    def diagonal(self) -> Integers:
        """Diagonal of G."""
        return self.words[np.cumsum(np.arange(1, self.fixed.width + 1)) - 1]

    @cached_property
    def gram(self) -> Integers:
        """Complete symmetric matrix G."""
        gram = np.empty((self.fixed.width, self.fixed.width), dtype=np.int64)
        for row, part in self.rows_of_gram():
            gram[row, : row + 1] = part
        mirror(gram)
        gram.flags.writeable = False
        return gram

    def rows_of_gram(self) -> Iterator[tuple[int, Integers]]:
        """Yield the number of each row of G and a view of its entries up to the diagonal."""
        return rows_of_triangle(self.words, 0, self.fixed.width)

    def __add__(self, other: Statistics | Rows) -> Statistics:
        """Return the sum of these statistics and `other`; raise an `InputError` if an entry could overflow int64."""
        return total(self.fixed, (self, other))

    def __sub__(self, other: Statistics | Rows) -> Statistics:
        """Return the statistics minus `other`, which must be part of them."""
        result = RunningSum(self.fixed, self)
        result.subtract(other)
        return result.statistics()

    def __eq__(self, other: object) -> bool:
        """Return whether both are equal bit for bit."""
        if not isinstance(other, Statistics):
            return NotImplemented
        return self is other or (self.fixed == other.fixed and np.array_equal(self.words, other.words))

    __hash__ = None  # type: ignore[assignment]

    def largest(self) -> int:
        """Return the largest absolute value, as a Python integer because int64 cannot represent 2^63."""
        return max(abs(int(self.words.min())), abs(int(self.words.max())))

    @property
    def nbytes(self) -> int:
        """Size of the canonical form in bytes, without its heading."""
        return self.words.nbytes

    def digest(self) -> str:
        """Return SHA-256 of the canonical form, in hexadecimal.

        >>> Statistics.empty(FixedPoint(features=1, outputs=1)).digest()[:16]
        'cb7899166141193a'
        """
        heading = f"sifu statistics 1 {self.fixed.describe()}\n".encode()
        return hashlib.sha256(heading + self.words.astype("<i8", copy=False).tobytes()).hexdigest()


def triangle_size(width: int) -> int:
    """Return the number of entries of a matrix of this width on and below its diagonal."""
    return width * (width + 1) // 2


def rows_of_triangle(words: Integers, first: int, last: int) -> Iterator[tuple[int, Integers]]:
    """Yield the numbers of the rows of G from `first` to `last` and views of their entries up to the diagonal."""
    start = triangle_size(first)
    for row in range(first, last):
        yield row, words[start : start + row + 1]
        start += row + 1


def statistics_of(fixed: FixedPoint, phi: Array, targets: Array) -> Statistics:
    """Return (G, H, n, q), exactly, of samples with features `phi` (without the constant) and `targets`.

    >>> fixed = FixedPoint(features=1, outputs=1, feature_bits=2, target_bits=1)
    >>> statistics_of(fixed, np.array([[0.5], [1.0]]), np.array([[1.0], [-1.0]])).gram
    array([[20, 24],
           [24, 32]])
    """
    return statistics_of_chunks(fixed, [(phi, targets)])


def statistics_of_chunks(fixed: FixedPoint, chunks: Iterable[tuple[Array, Array]]) -> Statistics:
    """Return `statistics_of` samples that arrive in chunks; the result does not depend on the chunks."""
    result, samples = RunningSum(fixed), 0
    for phi, targets in chunks:
        if len(phi) != len(targets):
            raise InputError(f"{len(phi)} samples have {len(targets)} targets")
        samples += len(phi)
        if samples > fixed.samples_at_most:  # refuse before a sum can overflow int64
            raise InputError(
                f"{samples} samples could overflow the statistics, which allow at most {fixed.samples_at_most}: "
                "use fewer feature_bits or a smaller norm"
            )
        for start in range(0, len(phi), BLOCK_ROWS):
            features = fixed.quantised_features(phi[start : start + BLOCK_ROWS])
            wanted = fixed.quantised_targets(targets[start : start + BLOCK_ROWS])
            result.multiply(features, wanted)
    return result.statistics()


class RunningSum:
    """Running sum of statistics and rows; rows are collected until a large matrix product is possible.

    Args:
        fixed: Fixed-point format of all parts.
        start: Statistics that the sum begins with, by default statistics of no samples.
        in_place: True if the sum may overwrite `start`, which must not be used afterwards.
    """

    def __init__(self, fixed: FixedPoint, start: Statistics | None = None, *, in_place: bool = False) -> None:
        self._fixed, begin = fixed, Statistics.empty(fixed) if start is None else start
        _check_same(fixed, begin)
        self._largest = 0 if start is None else begin.largest()
        self._samples, self._energy = begin.samples, begin.target_energy
        self._words = begin.words if in_place or start is None else begin.words.copy()
        self._words.flags.writeable = True
        self._cross = self._words[triangle_size(fixed.width) : -2].reshape(fixed.width, fixed.outputs)
        self._waiting: list[Rows] = []

    def add(self, part: Statistics | Rows) -> None:
        """Add one part; refuse it if an entry could overflow int64."""
        self._check(part)
        if isinstance(part, Rows):
            self._waiting.append(part)
            if sum(rows.samples for rows in self._waiting) >= BLOCK_ROWS:
                self._multiply_waiting()
        else:
            self._add(part, 1)

    def subtract(self, part: Statistics | Rows) -> None:
        """Subtract one part, which must be in the sum.

        Raises:
            InputError: If n, q or a diagonal entry of G would become negative, so that the part cannot be in the sum.
        """
        self._check(part)
        self._multiply_waiting()
        if isinstance(part, Rows):
            self._multiply([part], -1)
        else:
            self._add(part, -1)
        squares = Statistics(self._fixed, self._words.view()).diagonal
        short = int(np.count_nonzero(squares < 0))
        if self._samples < 0 or self._energy < 0 or short:
            raise InputError(
                f"statistics of {part.samples} samples are not part of a sum of {self._samples + part.samples}: it "
                f"would be left with {self._samples} samples, target energy {self._energy} and {short} negative squares"
            )

    def _check(self, part: Statistics | Rows) -> None:
        _check_same(self._fixed, part)
        self._largest += part.largest()
        _check_room(self._largest)

    def _add(self, part: Statistics, sign: Literal[1, -1]) -> None:
        (np.add if sign > 0 else np.subtract)(self._words, part.words, out=self._words)
        self._samples += sign * part.samples
        self._energy += sign * part.target_energy

    def _multiply_waiting(self) -> None:
        """Add the products of the collected rows."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._multiply(waiting, 1)

    def _multiply(self, parts: list[Rows], sign: Literal[1, -1]) -> None:
        features, targets = stacked(self._fixed, parts)
        for start in range(0, len(features), BLOCK_ROWS):
            self.multiply(features[start : start + BLOCK_ROWS], targets[start : start + BLOCK_ROWS], sign)

    def multiply(self, features: Floats, targets: Floats, sign: Literal[1, -1] = 1) -> None:
        """Add, or subtract, the products of samples in fixed point, given as whole numbers in float64."""
        change = np.add if sign > 0 else np.subtract
        for rows in exact_blocks(features, targets):
            some = features[rows]
            for first in range(0, self._fixed.width, STRIP):
                last = min(first + STRIP, self._fixed.width)
                # No partial sum exceeds 2^53, so any order of summation gives these integers.
                product = some[:, first:last].T @ some[:, :last]
                for row, entries in rows_of_triangle(self._words, first, last):
                    change(entries, product[row - first, : row + 1].astype(np.int64), out=entries)
            change(self._cross, (some.T @ targets[rows]).astype(np.int64), out=self._cross)
            self._energy += sign * int(np.einsum("ij,ij->", targets[rows], targets[rows]))
        self._samples += sign * len(features)

    def statistics(self) -> Statistics:
        """Return the sum; the object must not be used afterwards."""
        self._multiply_waiting()
        self._words[-2:] = self._samples, self._energy
        return Statistics(self._fixed, self._words)


def mirror(matrix: Array) -> None:
    """Copy the part of a square matrix below its diagonal to the part above, in place."""
    for first in range(0, len(matrix), TILE):  # copy tiles that fit into the processor's cache
        for last in range(first, len(matrix), TILE):
            tile = matrix[last : last + TILE, first : first + TILE]
            matrix[first : first + TILE, last : last + TILE] = (
                tile.T if last > first else np.tril(tile) + np.tril(tile, -1).T
            )


def total(fixed: FixedPoint, parts: Iterable[Statistics | Rows]) -> Statistics:
    """Return the sum of all parts; raise an `InputError` if an entry could overflow int64."""
    result = RunningSum(fixed)
    for part in parts:
        result.add(part)
    return result.statistics()


def _check_room(largest: int) -> None:
    if largest > LARGEST_SUM:
        raise InputError(
            f"the sum of these statistics could reach {largest}, beyond int64: use fewer feature_bits, a smaller norm "
            "or fewer samples"
        )


def _check_same(fixed: FixedPoint, part: Statistics | Rows) -> None:
    if part.fixed != fixed:
        raise InputError(f"statistics in [{part.fixed.describe()}] do not belong to [{fixed.describe()}]")
