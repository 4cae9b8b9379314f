"""Noise on every release of a closed-form head, and its privacy guarantee (docs/theory.md, section 14.7).

Release t publishes V_t + N(0, sigma^2 I), with sigma fixed before any data is seen. For a client or record x in
release t, d_t is the distance between V_t and the head that the same rule gives without x. To an observer of all
releases, a federation with x is as distinguishable from one without x as N(mu, 1) is from N(0, 1), with

    mu = sqrt(sum_t d_t^2) / sigma

which is (epsilon, delta)-close by section 7.1. The distances are computed on the actual data: this is a per-instance
guarantee, not worst-case differential privacy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from threadpoolctl import threadpool_limits

from sifu.errors import InputError
from sifu.theory.arrays import Array, Floats
from sifu.theory.calibration import LARGEST_EPSILON, delta_reached_up, gaussian_epsilon
from sifu.theory.closed_form.ridge import Head, fit_head, scaled_sums
from sifu.theory.closed_form.sums import Statistics
from sifu.theory.rounding import norm_up, slack

RECORDS_TOGETHER = 256
"""Number of records whose distances are computed at once."""
SOLVERS_AGREE = 2.0
"""Safety factor in bounds on solver errors."""


@dataclass(frozen=True)
class Release:
    """One release for privacy accounting: its sums, its relative penalty r and its head."""

    statistics: Statistics
    relative_penalty: float

    @cached_property
    def head(self) -> Head:
        """Head without noise."""
        return fit_head(self.statistics, self.relative_penalty)

    @cached_property
    def _eigen(self) -> tuple[Floats, Floats, Floats]:
        """Eigenvalues and eigenvectors Q of G / 2^2a, and Q' H / 2^(a+b)."""
        import scipy.linalg

        gram, cross = scaled_sums(self.statistics)
        with threadpool_limits(limits=1):
            values, vectors = scipy.linalg.eigh(gram, driver="evd", overwrite_a=True, check_finite=False)
        return np.maximum(values, 0.0), vectors, vectors.T @ cross

    def at(self, relative_penalty: float) -> Release:
        """Return the release with another r; both releases share one eigendecomposition."""
        other = Release(self.statistics, relative_penalty)
        other.__dict__["_eigen"] = self._eigen
        return other

    def _rounded(self, phi: Array, targets: Array) -> tuple[Floats, Floats]:
        """Return the features, with the constant, and the targets, both rounded to the fixed-point format."""
        fixed = self.statistics.fixed
        features = np.ldexp(fixed.quantised_features(phi), -fixed.feature_bits)
        return features, np.ldexp(fixed.quantised_targets(targets), -fixed.target_bits)

    def distance_without(self, client: Statistics) -> float:
        """Return an upper bound on the distance to the head without a client.

        Both heads are solved as in docs/theory.md, section 14.4. Lambda is proportional to the trace of G, so the
        two heads have different lambdas. Bounds on the errors of both solves are added: a residual R moves a head by at
        most ||R|| / lambda.

        Args:
            client: Statistics of the client, which are part of the release's sums.

        Returns:
            Distance in the Frobenius norm, rounded up. The head without any client is zero.
        """
        left = self.statistics - client
        if left.samples == 0:
            return norm_up(self.head.weights) + _solver_error(self.head, self.statistics)
        other = fit_head(left, self.relative_penalty)
        distance = norm_up(self.head.weights - other.weights)
        errors = _solver_error(self.head, self.statistics) + _solver_error(other, left)
        return (distance + errors) * slack(4)

    def distances_of_records(self, phi: Array, targets: Array) -> Floats:
        """Return upper bounds on the distances to the heads without each of these records.

        With the penalty lambda of the trace without the record, M = (G + lambda I)^-1 and U = M H, the head without the
        record (phi, t) is U - M phi (t - U' phi)' / (1 - phi' M phi), by Sherman and Morrison. In the basis of the
        eigenvectors of G all of this is diagonal, so one decomposition serves every record.

        Args:
            phi: Features of records that are part of the release, without the constant.
            targets: Targets of these samples.

        Returns:
            One distance for each record, rounded up.
        """
        fixed, (features, wanted) = self.statistics.fixed, self._rounded(phi, targets)
        values, vectors, cross = self._eigen
        trace = math.ldexp(sum(self.statistics.diagonal.tolist()), -2 * fixed.feature_bits)
        scale = self.relative_penalty / fixed.width
        rotated_head = vectors.T @ self.head.weights
        largest = float(values[-1])
        result = np.zeros(len(features))
        for start in range(0, len(features), RECORDS_TOGETHER):
            rows = slice(start, start + RECORDS_TOGETHER)
            squares = np.einsum("ij,ij->i", features[rows], features[rows])
            penalties = scale * (trace - squares)
            if self.statistics.samples < 2 or np.any(penalties <= 0.0):
                raise InputError(
                    "the distance for a record needs at least one other record in the head: add clients or records"
                )
            inverse = 1.0 / (values[None, :] + penalties[:, None])
            rotated = features[rows] @ vectors
            solved = rotated * inverse  # M phi
            kept = 1.0 - np.einsum("ij,ij->i", rotated, solved)
            heads = inverse[:, :, None] * cross[None, :, :]
            missed = wanted[rows] - np.einsum("ij,ijo->io", rotated, heads)
            heads -= solved[:, :, None] * (missed / kept[:, None])[:, None, :]
            heads -= rotated_head[None, :, :]
            norms = np.sqrt(np.einsum("ijo,ijo->i", heads, heads))
            # A computed eigendecomposition is exact for a matrix whose distance to G is a few units of rounding times
            # (k + 1) ||G||.
            off = SOLVERS_AGREE * 2.0 * fixed.width * np.finfo(np.float64).eps * largest / penalties
            lengths = norm_up(self.head.weights) + norms
            result[rows] = (norms + off / np.maximum(kept, off) * lengths) * slack(fixed.width * fixed.outputs)
        return result + _solver_error(self.head, self.statistics)


def _solver_error(head: Head, statistics: Statistics) -> float:
    """Return an upper bound on the distance of a computed head from the exact solution of its equations."""
    fixed = statistics.fixed
    cross = norm_up(statistics.cross.astype(np.float64)) * math.ldexp(1.0, -fixed.feature_bits - fixed.target_bits)
    return SOLVERS_AGREE * head.residual * cross / head.penalty


def ratio_of(distances: Iterable[float], noise_std: float) -> float:
    """Return mu, the ratio of all releases together, rounded up.

    Args:
        distances: Distances d_t of the releases that the client or record is in.
        noise_std: Standard deviation of the noise on every release.

    >>> round(ratio_of([3.0, 4.0], 10.0), 9), ratio_of([], 10.0)
    (0.5, 0.0)
    """
    if not noise_std > 0.0:
        raise InputError(f"the noise of a release must be positive, found {noise_std}")
    squares = [distance * distance for distance in distances]
    return math.sqrt(math.fsum(squares)) / noise_std * slack(len(squares) + 8)


def epsilon_reached(distances: Iterable[float], noise_std: float, delta: float) -> float:
    """Return the smallest epsilon at `delta` for an observer of all releases, rounded up, or infinity if there is none.

    >>> round(epsilon_reached([1.0], 0.3501, 0.01), 2), epsilon_reached([1e9], 0.1, 0.01)
    (10.0, inf)
    """
    ratio = ratio_of(distances, noise_std)
    if not math.isfinite(ratio) or (ratio > 0.0 and delta_reached_up(LARGEST_EPSILON, 1.0 / ratio) > delta):
        return math.inf
    return gaussian_epsilon(ratio, delta)


def rounded_up(epsilon: float) -> float:
    """Return epsilon rounded up to two significant digits, as certificates state it.

    >>> rounded_up(2.91), rounded_up(0.0123), rounded_up(3.0), rounded_up(0.0)
    (3.0, 0.013, 3.0, 0.0)
    """
    if epsilon == 0.0:
        return 0.0
    place = 1 - math.floor(math.log10(epsilon))
    result = round(math.ceil(epsilon * 10.0**place - 1e-9) / 10.0**place, max(place, 0))
    return result if result >= epsilon else math.nextafter(epsilon, math.inf)
