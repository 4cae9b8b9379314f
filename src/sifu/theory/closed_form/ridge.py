"""Ridge regression from the sums alone, with lambda fixed or chosen by generalised cross-validation.

    W = (G / 2^2a + lambda I)^-1 (H / 2^(a+b)),      lambda = r trace(G) / (2^2a (k + 1))

See docs/theory.md, section 14.4. The relative penalty r is given, or it is the value of a fixed grid with the smallest
generalised cross-validation score (Golub, Heath and Wahba 1979), computed from G, H, n and q of the remaining clients.

Heads of up to `WIDE` features are solved on one thread. The same statistics then give the same bits on the same
machine, and a head with a relative residual below 1e-9 on any other machine. The distance between two such heads
depends on r (section 14.3). Wider heads meet the same limit, but their bits may depend on the number of threads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from threadpoolctl import threadpool_limits

from sifu.errors import InputError
from sifu.theory.arrays import Floats
from sifu.theory.closed_form.fixed_point import FixedPoint
from sifu.theory.closed_form.sums import Statistics, mirror

GRID: tuple[float, ...] = tuple(10.0 ** (eighth / 8.0) for eighth in range(-64, 17))
"""Values of r for cross-validation: eight per factor of ten, from 1e-8 to 100."""
RESIDUAL = 1e-9
"""Largest accepted residual of a head, relative to the right-hand side."""
WIDE = 4096
"""Number of features above which heads are solved by conjugate gradients with a float32 factor, three times faster."""
LARGEST_ITERATIONS = 200
"""Number of iterations after which a preconditioned solve stops; about ten are usual."""


@dataclass(frozen=True, eq=False)
class Head:
    """Linear model on the features and the constant, with its penalty.

    `weights` has the shape (k + 1, outputs). `relative_penalty` is r, `penalty` is lambda, and `residual` is the
    residual of the equations relative to H.
    """

    fixed: FixedPoint
    weights: Floats
    relative_penalty: float
    penalty: float
    residual: float


def penalty(statistics: Statistics, relative: float) -> float:
    """Return lambda = r trace(G) / (2^2a (k + 1)).

    >>> from sifu.theory.closed_form.sums import statistics_of
    >>> fixed = FixedPoint(features=1, outputs=1)
    >>> penalty(statistics_of(fixed, np.array([[3.0]]), np.array([[1.0]])), 0.1)  # trace 3^2 + 1^2
    0.5
    """
    if not 0.0 < relative < math.inf:
        raise InputError(f"the relative penalty r must be a positive number, found {relative}")
    fixed = statistics.fixed
    trace = sum(statistics.diagonal.tolist())
    return relative * math.ldexp(trace / fixed.width, -2 * fixed.feature_bits)


def fit_head(statistics: Statistics, relative: float | None = None) -> Head:
    """Return the head fitted to these statistics.

    Args:
        statistics: Sums over the samples.
        relative: Relative penalty r, or None for generalised cross-validation.

    Raises:
        InputError: If there is no sample, or if r is too small to solve the equations accurately.

    >>> from sifu.theory.closed_form.sums import statistics_of
    >>> fixed = FixedPoint(features=1, outputs=1)
    >>> data = statistics_of(fixed, np.array([[-1.0], [1.0]]), np.array([[-0.5], [0.5]]))
    >>> fit_head(data, 0.25).weights.round(6)  # slope 0.5 * 2 / (2 + 0.5), intercept 0
    array([[0.4],
           [0. ]])
    """
    import scipy.linalg

    if statistics.samples < 1:
        raise InputError("no client is left: a head needs the statistics of at least one sample")
    with threadpool_limits(limits=1):
        chosen = relative_penalty_by_gcv(statistics) if relative is None else float(relative)
        ridge = penalty(statistics, chosen)
    gram, cross = scaled_sums(statistics)
    gram[np.diag_indices_from(gram)] += ridge
    if statistics.fixed.features > WIDE:
        weights = _conjugate_gradients(gram, cross)
        residual = _relative(cross - gram @ weights, cross)
    else:
        with threadpool_limits(limits=1):
            # G is symmetric, so its transpose gives LAPACK the column order without a copy.
            factor = scipy.linalg.cho_factor(gram.T, lower=True, check_finite=False)
            weights = scipy.linalg.cho_solve(factor, cross, check_finite=False)
            left = cross - gram @ weights
            weights += scipy.linalg.cho_solve(factor, left, check_finite=False)  # refines the solution
            residual = _relative(cross - gram @ weights, cross)
    if not residual <= RESIDUAL:  # NaN fails as well
        raise InputError(
            f"the equations of the head have a relative residual of {residual:.2g}, above the allowed {RESIDUAL:g}: "
            f"r = {chosen:g} is too small for these features"
        )
    return Head(statistics.fixed, weights, chosen, ridge, residual)


def _conjugate_gradients(gram: Floats, cross: Floats) -> Floats:
    """Solve gram W = cross in float64, preconditioned by a Cholesky factor in float32.

    The factor takes half the time of one in float64. Every column stops at a residual a hundred times below `RESIDUAL`.
    """
    import scipy.linalg

    try:
        factor = scipy.linalg.cho_factor(
            gram.T.astype(np.float32, order="F"), lower=True, overwrite_a=True, check_finite=False
        )
    except np.linalg.LinAlgError:  # the penalty vanishes in the rounding of float32
        factor = scipy.linalg.cho_factor(gram.T, lower=True, check_finite=False)
    precision = factor[0].dtype

    def preconditioned(columns: Floats) -> Floats:
        scale = np.max(np.abs(columns), axis=0)
        unit = (columns / np.where(scale > 0.0, scale, 1.0)).astype(precision)
        solved: Floats = scipy.linalg.cho_solve(factor, unit, check_finite=False).astype(np.float64) * scale
        return solved

    weights, left = np.zeros_like(cross), cross.copy()
    target = RESIDUAL / 100.0 * np.linalg.norm(cross, axis=0)
    step = preconditioned(left)
    direction, energy = step, np.sum(left * step, axis=0)
    for _ in range(LARGEST_ITERATIONS):
        if np.all(np.linalg.norm(left, axis=0) <= target):
            break
        image = gram @ direction
        curvature = np.sum(direction * image, axis=0)
        size = np.divide(energy, curvature, out=np.zeros_like(energy), where=curvature > 0.0)
        weights += size * direction
        left -= size * image
        step = preconditioned(left)
        before, energy = energy, np.sum(left * step, axis=0)
        direction = step + np.divide(energy, before, out=np.zeros_like(energy), where=before > 0.0) * direction
    return weights


def residual_of(statistics: Statistics, relative: float, weights: Floats) -> float:
    """Return the residual of (G / 2^2a + lambda I) W = H / 2^(a+b) for these weights, relative to the right side."""
    gram, cross = scaled_sums(statistics)
    gram[np.diag_indices_from(gram)] += penalty(statistics, relative)
    with threadpool_limits(limits=1):
        return _relative(cross - gram @ weights, cross)


def relative_penalty_by_gcv(statistics: Statistics) -> float:
    """Return the r of `GRID` with the smallest score; ties go to the largest r, which gives the smoothest head.

    All scores are equal if no residual can be distinguished from rounding, for example if all targets are zero.
    """
    scores = gcv_scores(statistics)
    return GRID[len(GRID) - 1 - int(np.argmin(scores[::-1]))]


def gcv_scores(statistics: Statistics) -> Floats:
    """Return the generalised cross-validation score of each r of `GRID`.

    A score is infinite if the residual cannot be distinguished from rounding, or if no degrees of freedom remain.
    G is reduced to tridiagonal form once, G = Q D Q'. Each r then costs a tridiagonal solve, and the eigenvalues are
    computed without eigenvectors.
    """
    import scipy.linalg

    samples, fixed = statistics.samples, statistics.fixed
    if samples < 1:
        raise InputError("no client is left: cross-validation needs the statistics of at least one sample")
    gram, cross = scaled_sums(statistics)
    live = np.flatnonzero(np.diagonal(gram))  # drops features that are zero in every sample, such as dropped blocks
    if live.size < fixed.width:
        gram, cross = gram[np.ix_(live, live)], cross[live]
    energy = math.ldexp(statistics.target_energy, -2 * fixed.target_bits)
    with threadpool_limits(limits=1):
        diagonal, subdiagonal, rotated = _tridiagonal(gram, cross)
        values = scipy.linalg.eigh_tridiagonal(diagonal, subdiagonal, eigvals_only=True, check_finite=False)
        values = np.maximum(values, 0.0)
        scores = np.full(len(GRID), np.inf)
        noise = 64.0 * np.finfo(np.float64).eps * fixed.width * energy
        for place, relative in enumerate(GRID):
            ridge = penalty(statistics, relative)
            if diagonal.size > 1:
                bands = np.stack([diagonal + ridge, np.append(subdiagonal, 0.0)])
                weights = scipy.linalg.solveh_banded(bands, rotated, lower=True, check_finite=False)
            else:  # only the constant remains; LAPACK accepts no empty subdiagonal
                weights = rotated / (diagonal + ridge)[:, None]
            # W'(G + lambda I)W = W'H, so q - 2 tr(W'H) + tr(W'GW) = q - tr(W'H) - lambda ||W||^2.
            fitted = float(np.sum(weights * rotated))
            left = energy - fitted - ridge * float(np.sum(weights * weights))
            free = 1.0 - float(np.sum(values / (values + ridge))) / samples
            if left > noise and free > 1e-9:
                scores[place] = left / samples / (free * free)
    return scores


def scaled_sums(statistics: Statistics) -> tuple[Floats, Floats]:
    """Return G / 2^2a and H / 2^(a+b) in float64; scaling by a power of two is exact."""
    fixed = statistics.fixed
    gram, scale = np.empty((fixed.width, fixed.width)), math.ldexp(1.0, -2 * fixed.feature_bits)
    for row, entries in statistics.rows_of_gram():
        np.multiply(entries, scale, out=gram[row, : row + 1])
    mirror(gram)
    return gram, np.multiply(statistics.cross, math.ldexp(1.0, -fixed.feature_bits - fixed.target_bits))


def _tridiagonal(gram: Floats, cross: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the diagonal and the subdiagonal of D = Q'GQ, and Q'H."""
    import scipy.linalg

    work, _ = scipy.linalg.lapack.dsytrd_lwork(gram.shape[0], lower=1)
    reduced, diagonal, subdiagonal, scales, failed = scipy.linalg.lapack.dsytrd(
        np.asfortranarray(gram), lower=1, lwork=int(work), overwrite_a=1
    )
    if failed:
        raise InputError(
            f"the tridiagonal form of G could not be computed (LAPACK code {failed}): check that its entries are finite"
        )
    # The first row and column of Q are those of the identity. The rest is the product of the reflectors as dgeqrf
    # stores them.
    rotated = np.array(cross, order="F")
    if gram.shape[0] > 1:
        work = scipy.linalg.lapack.dormqr("L", "T", reduced[1:, :-1], scales, rotated[1:], lwork=-1)[1]
        rotated[1:], _, failed = scipy.linalg.lapack.dormqr(
            "L", "T", reduced[1:, :-1], scales, rotated[1:], lwork=int(work[0])
        )
        if failed:
            raise InputError(f"H could not be rotated to the tridiagonal form of G (LAPACK code {failed})")
    return diagonal, subdiagonal, rotated


def _relative(left: Floats, reference: Floats) -> float:
    scale = float(np.linalg.norm(reference))
    return float(np.linalg.norm(left)) / scale if scale else float(np.linalg.norm(left))
