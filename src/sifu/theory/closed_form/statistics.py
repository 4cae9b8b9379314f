"""What a client sends: (G, H, n, q) as exact integers, and how they are added, subtracted, written and digested.

G = Phi^' Phi^, H = Phi^' T^, n samples, q = sum ||T^||^2 (docs/theory.md, section 14.3). Addition of integers
has no order and no rounding: whatever joined, left or was replaced, the sum is that of the clients that are in it.

Canonical form. `words` are int64 numbers: the lower triangle of G row by row, H row by row, n, q. The digest is SHA-256
of the line `sifu statistics 1 <FixedPoint.describe()>\\n` in UTF-8 and then the words, little-endian.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from sifu.errors import InputError
from sifu.theory.arrays import Array, Floats, Integers
from sifu.theory.closed_form.fixed_point import EXACT, LARGEST_SUM, FixedPoint

BLOCK_ROWS = 4096
"""So many samples are multiplied at once at most, so that memory stays bounded."""


@dataclass(frozen=True, eq=False)
class Statistics:
    """(G, H, n, q) of some samples in one fixed point: `gram`, `cross`, `samples`, `target_energy`."""

    fixed: FixedPoint
    gram: Integers
    cross: Integers
    samples: int
    target_energy: int

    def __post_init__(self) -> None:
        expected = ((self.fixed.width, self.fixed.width), (self.fixed.width, self.fixed.outputs))
        for name, array, shape in zip(("gram", "cross"), (self.gram, self.cross), expected, strict=True):
            if array.dtype != np.int64 or array.shape != shape:
                raise InputError(f"{name} is {array.dtype} {array.shape}; int64 {shape} was expected")
            array.flags.writeable = False

    @staticmethod
    def nobody(fixed: FixedPoint) -> Statistics:
        """The statistics of no sample at all: zeros."""
        gram = np.zeros((fixed.width, fixed.width), dtype=np.int64)
        return Statistics(fixed, gram, np.zeros((fixed.width, fixed.outputs), dtype=np.int64), 0, 0)

    def __add__(self, other: Statistics) -> Statistics:
        """Both together; refused before any entry could leave int64."""
        return total(self.fixed, (self, other))

    def __sub__(self, other: Statistics) -> Statistics:
        """What is left without `other`, which must be part of this."""
        _check_same(self.fixed, other)
        left, energy = self.samples - other.samples, self.target_energy - other.target_energy
        short = np.diagonal(self.gram) < np.diagonal(other.gram)
        if left < 0 or energy < 0 or bool(np.any(short)):
            raise InputError(
                f"statistics of {other.samples} samples are not part of a sum of {self.samples}: it would be left with "
                f"{left} samples, target energy {energy} and {int(np.count_nonzero(short))} negative squares"
            )
        _check_room(_largest(self) + _largest(other))
        return Statistics(self.fixed, self.gram - other.gram, self.cross - other.cross, left, energy)

    def __eq__(self, other: object) -> bool:
        """Equal to the bit."""
        if not isinstance(other, Statistics):
            return NotImplemented
        return (
            self.fixed == other.fixed
            and (self.samples, self.target_energy) == (other.samples, other.target_energy)
            and np.array_equal(self.gram, other.gram)
            and np.array_equal(self.cross, other.cross)
        )

    __hash__ = None  # type: ignore[assignment]

    def words(self) -> Integers:
        """The canonical form: lower triangle of G row by row, H row by row, n, q. Also what masks are added to.

        >>> fixed = FixedPoint(features=1, outputs=1, feature_bits=2, target_bits=1)
        >>> statistics_of(fixed, np.array([[0.5], [1.0]]), np.array([[1.0], [-1.0]])).words()
        array([20, 24, 32, -4,  0,  2,  8])
        """
        triangle = [self.gram[row, : row + 1] for row in range(self.fixed.width)]
        return np.concatenate([*triangle, self.cross.ravel(), [self.samples, self.target_energy]], dtype=np.int64)

    @staticmethod
    def from_words(fixed: FixedPoint, words: Integers) -> Statistics:
        """The statistics that `words` wrote, or the sum of those of several clients."""
        expected = words_at(fixed)
        if words.shape != (expected,) or words.dtype != np.int64:
            raise InputError(f"statistics have {words.dtype} {words.shape}; int64 ({expected},) was expected")
        gram = np.empty((fixed.width, fixed.width), dtype=np.int64)
        start = 0
        for row in range(fixed.width):
            gram[row, : row + 1] = words[start : start + row + 1]
            gram[: row + 1, row] = gram[row, : row + 1]
            start += row + 1
        cross = words[start:-2].reshape(fixed.width, fixed.outputs).copy()
        return Statistics(fixed, gram, cross, int(words[-2]), int(words[-1]))

    def digest(self) -> str:
        """SHA-256 of the canonical form, in hexadecimal.

        >>> Statistics.nobody(FixedPoint(features=1, outputs=1)).digest()[:16]
        'cb7899166141193a'
        """
        return hashlib.sha256(self.canonical()).hexdigest()

    @staticmethod
    def heading(fixed: FixedPoint) -> bytes:
        """The line that the canonical form of statistics in this fixed point begins with."""
        return f"sifu statistics 1 {fixed.describe()}\n".encode()

    def canonical(self) -> bytes:
        """The canonical form: the heading and the words, little-endian."""
        return self.heading(self.fixed) + self.words().astype("<i8", copy=False).tobytes()


def words_at(fixed: FixedPoint) -> int:
    """How many words statistics have in this fixed point.

    >>> words_at(FixedPoint(features=2048, outputs=10)) * 8
    16965736
    """
    return fixed.width * (fixed.width + 1) // 2 + fixed.width * fixed.outputs + 2


def statistics_of(fixed: FixedPoint, phi: Array, targets: Array) -> Statistics:
    """(G, H, n, q) of samples with features `phi` (no constant yet) and `targets`, exactly.

    >>> fixed = FixedPoint(features=1, outputs=1, feature_bits=2, target_bits=1)
    >>> statistics_of(fixed, np.array([[0.5], [1.0]]), np.array([[1.0], [-1.0]])).gram
    array([[20, 24],
           [24, 32]])
    """
    return statistics_of_chunks(fixed, [(phi, targets)])


def statistics_of_chunks(fixed: FixedPoint, chunks: Iterable[tuple[Array, Array]]) -> Statistics:
    """The same of many samples that come in pieces; the pieces leave no trace in the result."""
    gram = np.zeros((fixed.width, fixed.width), dtype=np.int64)
    cross = np.zeros((fixed.width, fixed.outputs), dtype=np.int64)
    samples = energy = 0
    for phi, targets in chunks:
        if len(phi) != len(targets):
            raise InputError(f"{len(phi)} samples have {len(targets)} targets")
        samples += len(phi)
        if samples > fixed.samples_at_most:  # before any sum could leave int64
            raise InputError(
                f"{samples} samples could overflow the statistics, which have room for {fixed.samples_at_most}: "
                "use fewer feature_bits or a smaller norm"
            )
        for start in range(0, len(phi), BLOCK_ROWS):
            features = fixed.quantised_features(phi[start : start + BLOCK_ROWS])
            wanted = fixed.quantised_targets(targets[start : start + BLOCK_ROWS])
            for rows in exact_blocks(features, wanted):
                gram += _exact_product(features[rows], features[rows])
                cross += _exact_product(features[rows], wanted[rows])
                energy += int(np.einsum("ij,ij->", wanted[rows], wanted[rows]))
    return Statistics(fixed, gram, cross, samples, energy)


def exact_blocks(features: Floats, targets: Floats) -> Iterator[slice]:
    """Consecutive rows whose squared lengths sum to at most 2^53, of features and of targets each.

    >>> [(rows.start, rows.stop) for rows in exact_blocks(np.full((5, 1), 2.0**26), np.zeros((5, 1)))]
    [(0, 2), (2, 4), (4, 5)]
    """
    lengths = [np.einsum("ij,ij->i", rows, rows).astype(np.int64) for rows in (features, targets)]
    first, sums = 0, [0, 0]
    for row, pair in enumerate(zip(*(squares.tolist() for squares in lengths), strict=True)):
        sums = [before + square for before, square in zip(sums, pair, strict=True)]
        if max(sums) > EXACT:
            if row == first:
                raise InputError(f"sample {row} alone has a squared length of {max(pair)}, beyond 2^53")
            yield slice(first, row)
            first, sums = row, list(pair)
    if first < len(features):
        yield slice(first, len(features))


def _exact_product(left: Floats, right: Floats) -> Integers:
    """left' right as int64; no partial sum is beyond 2^53, so any order of summation gives these integers."""
    return (left.T @ right).astype(np.int64)


def total(fixed: FixedPoint, parts: Iterable[Statistics]) -> Statistics:
    """The sum of all parts, one at a time; refused before any entry could leave int64."""
    gram = np.zeros((fixed.width, fixed.width), dtype=np.int64)
    cross = np.zeros((fixed.width, fixed.outputs), dtype=np.int64)
    samples = energy = largest = 0
    for part in parts:
        _check_same(fixed, part)
        largest += _largest(part)
        _check_room(largest)
        gram += part.gram
        cross += part.cross
        samples += part.samples
        energy += part.target_energy
    return Statistics(fixed, gram, cross, samples, energy)


def _largest(part: Statistics) -> int:
    """The largest absolute value in the statistics; as a Python integer, so that -2^63 has one."""
    extremes = [int(bound) for array in (part.gram, part.cross) for bound in (array.min(), array.max())]
    return max(abs(value) for value in (*extremes, part.samples, part.target_energy))


def _check_room(largest: int) -> None:
    if largest > LARGEST_SUM:
        raise InputError(
            f"the sum of these statistics could reach {largest}, beyond int64: use fewer feature_bits, a smaller norm "
            "or fewer samples"
        )


def _check_same(fixed: FixedPoint, part: Statistics) -> None:
    if part.fixed != fixed:
        raise InputError(f"statistics in [{part.fixed.describe()}] do not belong to [{fixed.describe()}]")
