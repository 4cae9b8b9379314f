"""Samples of a client in fixed point; they are stored as rows if these take less space than statistics.

Rows of n samples with k features and O outputs take n (k + O) numbers of 4 bytes; their statistics take (k + 1)(k + 2)
/ 2 + (k + 1) O + 2 numbers of 8 bytes. Rows and statistics add the same integers to a sum (docs/theory.md, section
14.3). A product of float64 matrices is exact as long as no partial sum exceeds 2^53, so the rows of many clients are
multiplied at once, in blocks of any size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sifu.errors import InputError
from sifu.theory.arrays import Array, Floats
from sifu.theory.closed_form.fixed_point import EXACT, FixedPoint

RowNumbers = NDArray[np.int32]
ROW_TYPE = np.dtype("<i4")
"""Type of the numbers in a row. All numbers fit, because no squared length exceeds 2^53."""
BLOCK_ROWS = 4096
"""Largest number of samples multiplied at once, to bound memory."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Samples in fixed point: `features` (n, k) without the constant, and `targets` (n, outputs)."""

    fixed: FixedPoint
    features: RowNumbers
    targets: RowNumbers

    def __post_init__(self) -> None:
        count = self.features.shape[:1]
        expected = ((*count, self.fixed.features), (*count, self.fixed.outputs))
        for name, array, shape in zip(("features", "targets"), (self.features, self.targets), expected, strict=True):
            if array.dtype != ROW_TYPE or array.shape != shape:
                raise InputError(f"{name} are {array.dtype} {array.shape}; {ROW_TYPE} {shape} was expected")

    @property
    def samples(self) -> int:
        """Number of samples, n."""
        return len(self.features)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.features.nbytes + self.targets.nbytes

    def largest(self) -> int:
        """Return an upper bound on the entries of the rows' statistics: the sum of squared lengths, rounded up."""
        squares = [float(squared_lengths(array).sum()) for array in (self.features, self.targets)]
        return math.ceil(max(squares[0] + self.samples * self.fixed.unit**2, squares[1]) * (1.0 + 1e-9))

    def check(self, owner: str) -> None:
        """Refuse rows that no samples of the agreed norm can have.

        Raises:
            InputError: If a sample or a target is longer than the fixed-point format allows.
        """
        features = float(squared_lengths(self.features).max(initial=0.0)) + self.fixed.unit**2
        targets = float(squared_lengths(self.targets).max(initial=0.0))
        if features > self.fixed.row_limit or targets > self.fixed.target_limit:
            raise InputError(
                f"the rows of {owner} are refused: a sample has a squared length of {features:.6g} and a target of "
                f"{targets:.6g}, where {self.fixed.row_limit} and {self.fixed.target_limit} are the limits"
            )


def rows_are_smaller(fixed: FixedPoint, samples: int) -> bool:
    """Return whether rows of `samples` samples take less space than their statistics.

    >>> fixed = FixedPoint(features=5280, outputs=10)
    >>> rows_are_smaller(fixed, 100), rows_are_smaller(fixed, 6000)
    (True, False)
    """
    return _bytes_of_rows(fixed, samples) < 8 * words_at(fixed)


def kept_bytes(fixed: FixedPoint, samples: int) -> int:
    """Return the size in bytes of a client's stored data: its rows or its statistics, whichever is smaller.

    >>> kept_bytes(FixedPoint(features=5280, outputs=10), 100)
    2116000
    """
    return min(_bytes_of_rows(fixed, samples), 8 * words_at(fixed))


def _bytes_of_rows(fixed: FixedPoint, samples: int) -> int:
    return samples * (fixed.features + fixed.outputs) * ROW_TYPE.itemsize


def words_at(fixed: FixedPoint) -> int:
    """Return the number of 64-bit words in statistics of this fixed-point format.

    >>> words_at(FixedPoint(features=2048, outputs=10)) * 8
    16965736
    """
    return fixed.width * (fixed.width + 1) // 2 + fixed.width * fixed.outputs + 2


def rows_of_chunks(fixed: FixedPoint, chunks: Iterable[tuple[Array, Array]]) -> Rows:
    """Return the rows of samples that arrive in chunks of features (without the constant) and targets."""
    features = [np.zeros((0, fixed.features), dtype=ROW_TYPE)]
    targets = [np.zeros((0, fixed.outputs), dtype=ROW_TYPE)]
    for phi, wanted in chunks:
        if len(phi) != len(wanted):
            raise InputError(f"{len(phi)} samples have {len(wanted)} targets")
        features.append(fixed.quantised_features(phi)[:, :-1].astype(ROW_TYPE))
        targets.append(fixed.quantised_targets(wanted).astype(ROW_TYPE))
    return Rows(fixed, np.concatenate(features), np.concatenate(targets))


def stacked(fixed: FixedPoint, parts: Sequence[Rows]) -> tuple[Floats, Floats]:
    """Return the features of all parts with the constant, and their targets, as whole numbers in float64."""
    features = np.empty((sum(part.samples for part in parts), fixed.width))
    np.concatenate([part.features for part in parts], out=features[:, :-1], casting="safe")
    features[:, -1] = fixed.unit
    return features, np.concatenate([part.targets for part in parts], dtype=np.float64)


def squared_lengths(rows: RowNumbers) -> Floats:
    """Return the squared length of each row, exact up to 2^53."""
    values = rows.astype(np.float64)
    return np.asarray(np.einsum("ij,ij->i", values, values))


def exact_blocks(features: Floats, targets: Floats) -> Iterator[slice]:
    """Yield slices of consecutive rows: in each, squared lengths sum to at most 2^53, for features and for targets.

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
