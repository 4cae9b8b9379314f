"""Fixed-point features and targets: whole numbers small enough that sums of their products are exact.

A float64 matrix product is exact, and independent of order, threads and library, as long as every partial sum is an
integer of at most 2^53. By Cauchy-Schwarz, sum_i ||Phi^_i||^2 <= 2^53 is sufficient (docs/theory.md, section 14.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sifu.errors import InputError
from sifu.theory.arrays import Array, Floats

EXACT = 2**53
"""Largest n such that float64 represents every whole number up to n exactly."""
LARGEST_SUM = 2**63 - 1
"""Largest sum over clients that int64 can hold."""


@dataclass(frozen=True)
class FixedPoint:
    """Fixed-point format of a federation, agreed on before any client sends statistics and part of every digest.

    `feature_bits` is a, `target_bits` is b, `norm` is c (the largest length of a sample's features), `features` is k
    (without the constant 1), `outputs` is the width of a target, and `target_norm` is the largest length of a target.

    >>> FixedPoint(features=2048, outputs=10).samples_at_most
    21260760
    """

    features: int
    outputs: int
    feature_bits: int = 16
    target_bits: int = 16
    norm: float = 10.0
    target_norm: float = 1.0

    def __post_init__(self) -> None:
        for name in ("features", "outputs", "feature_bits", "target_bits"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name} of the fixed point must be a whole number of at least 1, found {value!r}")
        for name in ("norm", "target_norm"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and 0.0 < value < math.inf):
                raise InputError(f"{name} of the fixed point must be a positive number, found {value!r}")
            object.__setattr__(self, name, float(value))  # 10 and 10.0 must have the same digest
        if max(self.feature_bits, self.target_bits) > 52 or max(self.row_limit, self.target_limit) > EXACT:
            raise InputError(
                f"a sample of norm {self.norm} in units of 2^-{self.feature_bits} and a target of norm "
                f"{self.target_norm} in units of 2^-{self.target_bits} do not fit 53 bits: use fewer bits"
            )

    @property
    def width(self) -> int:
        """Number of features including the constant, k + 1."""
        return self.features + 1

    @property
    def unit(self) -> int:
        """2^a, the constant 1 in fixed point."""
        return 1 << self.feature_bits

    @property
    def row_limit(self) -> int:
        """Largest ||Phi^||^2 of a sample: (2^a c + sqrt(k) / 2)^2 + 2^2a, as rint moves entries by at most 1/2."""
        longest = math.ldexp(self.norm, self.feature_bits) + math.sqrt(self.features) / 2.0
        return math.ceil(longest * longest * (1.0 + 1e-9)) + self.unit**2

    @property
    def target_limit(self) -> int:
        """Largest ||T^||^2 of a sample: (2^b times the largest length of a target + sqrt(outputs) / 2)^2."""
        longest = math.ldexp(self.target_norm, self.target_bits) + math.sqrt(self.outputs) / 2.0
        return math.ceil(longest * longest * (1.0 + 1e-9))

    @property
    def samples_at_most(self) -> int:
        """Largest number of samples of all clients together for which no sum of valid statistics can overflow int64."""
        return LARGEST_SUM // max(self.row_limit, self.target_limit)

    def quantised_features(self, phi: Array) -> Floats:
        """Return Phi^ = rint(2^a phi) with the constant 2^a appended, as whole numbers in float64.

        >>> FixedPoint(features=2, outputs=1, feature_bits=4).quantised_features(np.array([[0.5, -0.26]]))
        array([[ 8., -4., 16.]])
        """
        rows = _rows(phi, self.features, "features")
        quantised = np.empty((rows.shape[0], self.width))
        np.rint(np.ldexp(rows, self.feature_bits), out=quantised[:, :-1])
        quantised[:, -1] = self.unit
        _check_lengths(quantised, self.row_limit, f"features of a sample are longer than norm = {self.norm}")
        return quantised

    def quantised_targets(self, targets: Array) -> Floats:
        """Return T^ = rint(2^b t), as whole numbers in float64.

        >>> FixedPoint(features=2, outputs=2, target_bits=4).quantised_targets(np.array([[0.5, -0.5]]))
        array([[ 8., -8.]])
        """
        rows = _rows(targets, self.outputs, "targets")
        quantised = np.rint(np.ldexp(rows, self.target_bits))
        _check_lengths(quantised, self.target_limit, f"a target is longer than target_norm = {self.target_norm}")
        return quantised

    def describe(self) -> str:
        """Return one line of text that two federations share if and only if they use the same format."""
        return (
            f"features={self.features} outputs={self.outputs} feature_bits={self.feature_bits} "
            f"target_bits={self.target_bits} norm={self.norm!r} target_norm={self.target_norm!r}"
        )


def _rows(values: Array, width: int, name: str) -> Floats:
    rows = np.asarray(values, dtype=np.float64)
    if rows.ndim != 2 or rows.shape[1] != width:
        raise InputError(f"{name} have shape {rows.shape}; ({width},) numbers for each sample were expected")
    if not np.all(np.isfinite(rows)):
        raise InputError(f"{name} hold NaN or infinity: nothing was computed from them")
    return rows


def _check_lengths(quantised: Floats, limit: int, complaint: str) -> None:
    """Refuse a row whose squared length exceeds the limit; rounding never hides such a row."""
    longest = float(np.max(np.einsum("ij,ij->i", quantised, quantised), initial=0.0))
    if longest > limit:
        raise InputError(f"{complaint}: {longest:.6g} found where {limit} is the limit; scale each sample on its own")
