r"""Exact sums (G, H, n, q) that clients send: their arithmetic, canonical form and digest; and the targets of labels.

G = Phi^' Phi^, H = Phi^' T^, n samples, q = sum ||T^||^2 (docs/theory.md, section 14.3). Integer addition does not
depend on the order and has no rounding error. Whichever clients joined, left or were replaced, the result is the sum
over the current clients.

Canonical form: `words` are int64 numbers: the lower triangle of G row by row, H row by row, n, q. The digest is SHA-256
of the line `sifu statistics 1 <FixedPoint.describe()>\n` in UTF-8 and then the words, little-endian.

`Targets` turns labels and real numbers into the targets t of a head, by constants from the spec. None of these
constants is fitted to clients' data: a mean or a scale taken from the data would contain information about a client
that leaves.
"""

from __future__ import annotations

import hashlib
import math
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
    """(G, H, n, q) of some samples in one fixed point, as `words`: the canonical form without its heading."""

    fixed: FixedPoint
    words: Integers

    def __post_init__(self) -> None:
        expected = words_at(self.fixed)
        if self.words.shape != (expected,) or self.words.dtype != np.int64:
            raise InputError(f"statistics have {self.words.dtype} {self.words.shape}; int64 ({expected},) was expected")
        self.words.flags.writeable = False

    @staticmethod
    def of(fixed: FixedPoint, gram: Integers, cross: Integers, samples: int, target_energy: int) -> Statistics:
        """Return the statistics with these G, H, n and q; only the lower triangle of G is used.

        >>> fixed = FixedPoint(features=1, outputs=1, feature_bits=2, target_bits=1)
        >>> Statistics.of(fixed, np.array([[20, 24], [24, 32]]), np.array([[-4], [0]]), 2, 8).words
        array([20, 24, 32, -4,  0,  2,  8])
        """
        expected = ((fixed.width, fixed.width), (fixed.width, fixed.outputs))
        for name, array, shape in zip(("gram", "cross"), (gram, cross), expected, strict=True):
            if array.dtype != np.int64 or array.shape != shape:
                raise InputError(f"{name} is {array.dtype} {array.shape}; int64 {shape} was expected")
        triangle = [gram[row, : row + 1] for row in range(fixed.width)]
        words = np.concatenate([*triangle, cross.ravel(), [samples, target_energy]], dtype=np.int64)
        return Statistics(fixed, words)

    @staticmethod
    def empty(fixed: FixedPoint) -> Statistics:
        """Return the statistics of no samples: zeros."""
        return Statistics(fixed, np.zeros(words_at(fixed), dtype=np.int64))

    @property
    def samples(self) -> int:
        """n, the number of samples."""
        return int(self.words[-2])

    @property
    def target_energy(self) -> int:
        """q, the sum of the squared lengths of the targets."""
        return int(self.words[-1])

    @property
    def cross(self) -> Integers:
        """H."""
        return self.words[triangle_size(self.fixed.width) : -2].reshape(self.fixed.width, self.fixed.outputs)

    @property
    def diagonal(self) -> Integers:
        """Diagonal of G."""
        return self.words[np.cumsum(np.arange(1, self.fixed.width + 1)) - 1]

    @cached_property
    def gram(self) -> Integers:
        """G as a full symmetric matrix."""
        gram = np.empty((self.fixed.width, self.fixed.width), dtype=np.int64)
        for row, part in self.rows_of_gram():
            gram[row, : row + 1] = part
        mirror(gram)
        gram.flags.writeable = False
        return gram

    def rows_of_gram(self) -> Iterator[tuple[int, Integers]]:
        """Yield the number of each row of G and its entries up to the diagonal, which are not copied."""
        return rows_of_triangle(self.words, 0, self.fixed.width)

    def __add__(self, other: Statistics | Rows) -> Statistics:
        """Return the sum of these statistics and `other`; refuse it if an entry could overflow int64."""
        return total(self.fixed, (self, other))

    def __sub__(self, other: Statistics | Rows) -> Statistics:
        """Return the statistics without `other`, which must be part of them."""
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
        return hashlib.sha256(self.canonical()).hexdigest()

    @staticmethod
    def heading(fixed: FixedPoint) -> bytes:
        """Return the first line of the canonical form of statistics in this fixed point."""
        return f"sifu statistics 1 {fixed.describe()}\n".encode()

    def canonical(self) -> bytes:
        """Return the canonical form: the heading and the words, little-endian."""
        return self.heading(self.fixed) + self.words.astype("<i8", copy=False).tobytes()


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
        if samples > fixed.samples_at_most:  # before a sum could overflow int64
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
    """A running sum of statistics and rows; rows are collected until a large matrix product is possible.

    Args:
        fixed: Fixed-point format of all parts.
        start: Statistics that the sum begins with; nothing by default.
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
            InputError: If the part cannot be in the sum, because it has more samples or larger squares.
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
        """Return the sum; call this last."""
        self._multiply_waiting()
        self._words[-2:] = self._samples, self._energy
        return Statistics(self._fixed, self._words)


def mirror(matrix: Array) -> None:
    """Copy the part of a matrix below its diagonal to the part above."""
    for first in range(0, len(matrix), TILE):  # one tile at a time, which fits into the processor's cache
        for last in range(first, len(matrix), TILE):
            tile = matrix[last : last + TILE, first : first + TILE]
            matrix[first : first + TILE, last : last + TILE] = (
                tile.T if last > first else np.tril(tile) + np.tril(tile, -1).T
            )


def total(fixed: FixedPoint, parts: Iterable[Statistics | Rows]) -> Statistics:
    """Return the sum of all parts; refuse it if an entry could overflow int64."""
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


Task = Literal["classification", "multi_label", "regression"]

REACH = 8.0
"""Largest distance of a regression target from its shift, in scales."""


@dataclass(frozen=True)
class Targets:
    """Rule that turns labels into targets: one-hot minus 1/`outputs`, 0/1 minus `shift`, or (y - shift) / scale.

    `shift` and `scale` are one number for all outputs or one for each; classification ignores them.

    >>> Targets("classification", 4).encode(np.array([2]))
    array([[-0.25, -0.25,  0.75, -0.25]])
    >>> Targets("regression", 1, shift=(50.0,), scale=(10.0,)).encode(np.array([65.0]))
    array([[1.5]])
    """

    task: Task
    outputs: int
    shift: tuple[float, ...] = (0.5,)
    scale: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if self.task not in ("classification", "multi_label", "regression"):
            raise InputError(f"task {self.task!r} is unknown: write classification, multi_label or regression")
        if self.outputs < 1 or (self.task == "classification" and self.outputs < 2):
            raise InputError(
                f"{self.task} with {self.outputs} outputs is not possible: classification needs at least two"
            )
        for name, values in (("shift", self.shift), ("scale", self.scale)):
            if len(values) not in (1, self.outputs) or not all(math.isfinite(value) for value in values):
                raise InputError(f"{name} must be one number or {self.outputs}, found {values}")
        if min(self.scale) <= 0.0:
            raise InputError(f"every scale must be positive, found {self.scale}")
        if self.task == "multi_label" and not all(0.0 <= value <= 1.0 for value in self.shift):
            raise InputError(f"the shift of labels 0 and 1 must lie between them, found {self.shift}")

    @property
    def norm(self) -> float:
        """Largest possible length of a target: `target_norm` of the fixed point."""
        if self.task == "classification":
            return 1.0
        return math.sqrt(self.outputs) * (1.0 if self.task == "multi_label" else REACH)

    def encode(self, labels: Array) -> Floats:
        """Return the target of each label.

        Args:
            labels: Per sample a class number, a row of 0 and 1, or one real number for each output.

        Raises:
            InputError: If the labels do not fit the task, or a regression target is too far from the shift.
        """
        if self.task == "classification":
            return self._one_hot(np.asarray(labels))
        rows = np.asarray(labels, dtype=np.float64)
        if rows.ndim == 1 and self.outputs == 1:
            rows = rows[:, None]
        if rows.ndim != 2 or rows.shape[1] != self.outputs:
            raise InputError(f"labels have shape {rows.shape}; {self.outputs} for each sample were expected")
        if self.task == "multi_label":
            if not np.all((rows == 0.0) | (rows == 1.0)):
                raise InputError("labels of a multi-label task must be 0 or 1")
            return np.subtract(rows, self.shift)
        targets: Floats = (rows - np.asarray(self.shift)) / np.asarray(self.scale)
        if not np.all(np.abs(targets) <= REACH):  # also true for NaN
            worst = float(np.max(np.abs(targets)))
            raise InputError(
                f"a regression target lies {worst:.3g} scales from the shift, where {REACH:g} is the limit: choose "
                "shift and scale in the spec so that every plausible value fits"
            )
        return targets

    def _one_hot(self, labels: Array) -> Floats:
        if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
            raise InputError(f"class numbers were expected, one for each sample; found {labels.dtype} {labels.shape}")
        if labels.size and not (labels.min() >= 0 and labels.max() < self.outputs):
            raise InputError(
                f"class numbers run from {labels.min()} to {labels.max()}; 0 to {self.outputs - 1} were expected"
            )
        targets = np.full((labels.size, self.outputs), -1.0 / self.outputs)
        targets[np.arange(labels.size), labels] += 1.0
        return targets

    def decode(self, predictions: Floats) -> Array:
        """Return labels for predicted targets: the largest class, 0 or 1 for each label, or unscaled numbers.

        >>> Targets("multi_label", 2).decode(np.array([[0.1, -0.2]]))
        array([[1, 0]])
        """
        if self.task == "classification":
            return np.asarray(np.argmax(predictions, axis=1))
        if self.task == "multi_label":
            return np.asarray(predictions + np.asarray(self.shift) > 0.5, dtype=np.int64)
        return np.asarray(predictions * np.asarray(self.scale) + np.asarray(self.shift))
