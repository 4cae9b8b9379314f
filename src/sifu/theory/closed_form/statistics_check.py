"""Checks that refuse statistics that no samples can have, and state the reason.

The (G, H, n, q) of any real data satisfy (docs/theory.md, section 14.5):

    G positive semi-definite,   G_kk = n 2^2a at the constant,   trace(G) <= n row_limit,
    |G_jl|^2 <= G_jj G_ll,   0 <= q <= n target_limit,   |H_jo|^2 <= G_jj q,
    G_jj = s_j mod 2 with s_j = G_jk / 2^a,   |s_j|^2 <= n G_jj,

where s_j is the sum of column j of Phi^. It is a whole number because the constant is 2^a in every row, and a square
has the parity of its root. All conditions but one are compared as exact integers. Positive semi-definiteness is decided
in float64, on G scaled to a unit diagonal, by two tests; section 14.5 derives their tolerances. The first test, for
low rank, can only accept. A client that invents plausible data passes: these checks exclude impossible statistics, not
false ones.
"""

from __future__ import annotations

import enum

import numpy as np
from threadpoolctl import threadpool_limits

from sifu.theory.arrays import Floats, Integers
from sifu.theory.closed_form.sums import Statistics

LOW_RANK = 10
"""Smallest ratio of a matrix's size to its rank at which the low-rank test is tried, because it is faster there."""
COLUMNS_AT_ONCE = 256
ROUNDOFF = float(np.finfo(np.float64).eps)


def is_semi_definite(gram: Integers, rank_at_most: int) -> bool:
    """Return whether a symmetric matrix with a nonnegative diagonal is positive semi-definite.

    Args:
        gram: Symmetric matrix with a nonnegative diagonal.
        rank_at_most: Expected upper bound on its rank.

    >>> is_semi_definite(np.array([[4, 2], [2, 1]]), 1), is_semi_definite(np.array([[4, 3], [3, 1]]), 1)
    (True, False)
    """
    scaled = _with_unit_squares(gram)
    size = len(scaled)
    with threadpool_limits(limits=1):
        if rank_at_most * LOW_RANK <= size and _is_low_rank(scaled, rank_at_most, 4.0 * size * ROUNDOFF):
            return True
        return _has_factor(scaled, 4.0 * size**2 * ROUNDOFF)


def _with_unit_squares(gram: Integers) -> Floats:
    """Return K, the matrix scaled to a unit diagonal, without features that are zero in every sample."""
    squares = np.diagonal(gram)
    if not np.all(squares > 0):
        gram = gram[np.ix_(squares > 0, squares > 0)]
        squares = np.diagonal(gram)
    lengths = np.sqrt(squares.astype(np.float64))
    scaled = gram / lengths[:, None]
    scaled /= lengths[None, :]
    return scaled


def _is_low_rank(scaled: Floats, rank: int, tolerance: float) -> bool:
    """Return whether K = L L' + R, with at most `rank` columns in L and no entry of R larger than the tolerance."""
    factor = np.zeros((rank, len(scaled)))
    left = scaled.diagonal().copy()
    for step in range(rank):
        pivot = int(np.argmax(left))
        if left[pivot] <= tolerance:
            factor = factor[:step]
            break
        row = scaled[pivot] - factor[:step, pivot] @ factor[:step]
        row /= np.sqrt(left[pivot])
        factor[step] = row
        left -= row * row
    for start in range(0, len(scaled), COLUMNS_AT_ONCE):
        rest = scaled[start : start + COLUMNS_AT_ONCE] - factor[:, start : start + COLUMNS_AT_ONCE].T @ factor
        if not (rest.max() <= tolerance and rest.min() >= -tolerance):  # NaN fails as well
            return False
    return True


def _has_factor(scaled: Floats, shift: float) -> bool:
    """Return whether K + shift I has a Cholesky factor.

    The shift covers the rounding of the factorisation. For an m x m matrix with a unit diagonal, the factorisation can
    fail only if the smallest eigenvalue is below m^2 times the unit roundoff (Higham 2002, theorem 10.7, and its remark
    on scaling).
    """
    import scipy.linalg

    scaled[np.diag_indices_from(scaled)] += shift
    # Column order lets LAPACK work in place instead of on a copy; the matrix is symmetric.
    _, failed = scipy.linalg.lapack.dpotrf(scaled.T, lower=1, overwrite_a=1, clean=0)
    return bool(failed == 0)


BLOCK = 256
"""Number of rows compared at once; the columns they are compared with fit into the processor's cache."""


class Flaw(enum.Enum):
    """Reasons to refuse statistics; each value completes an error message."""

    SAMPLES = "the number of samples is negative, zero with other statistics, or beyond what a sum has room for"
    CONSTANT = "the square of the constant feature is not n 2^2a"
    WHOLE_SUMS = "the product of a feature with the constant is not a multiple of 2^a"
    DIAGONAL = "a square of G is negative"
    PARITY = "the square of a feature is odd where its sum is even, or the other way round"
    COLUMN_SUM = "the sum of a feature is larger than its square and the number of samples allow"
    TRACE = "the trace of G is larger than samples of the agreed norm can give"
    CAUCHY_SCHWARZ = "an entry of G is larger than its two squares allow"
    SEMI_DEFINITE = "G has a negative direction"
    TARGETS = "the target energy is negative or larger than targets of the agreed norm can give"
    CROSS = "an entry of H is larger than the square of its feature and the target energy allow"


def find_flaw(statistics: Statistics) -> tuple[Flaw | None, str]:
    """Return the first flaw of these statistics and the values found, or (None, "") if there is none.

    >>> import numpy as np
    >>> from sifu.theory.closed_form import FixedPoint, statistics_of
    >>> find_flaw(statistics_of(FixedPoint(features=1, outputs=1), np.array([[3.0]]), np.array([[1.0]])))
    (None, '')
    """
    fixed, gram, cross = statistics.fixed, statistics.gram, statistics.cross
    samples, energy = statistics.samples, statistics.target_energy
    if not 0 <= samples <= fixed.samples_at_most:
        return Flaw.SAMPLES, f"{samples} samples"
    if samples == 0 and (energy or np.any(gram) or np.any(cross)):
        return Flaw.SAMPLES, "no samples, but not all zero"
    squares = np.diagonal(gram)
    if int(squares[-1]) != samples * fixed.unit**2:
        return Flaw.CONSTANT, f"{int(squares[-1])} for {samples} samples"
    sums, rest = np.divmod(gram[-1], fixed.unit)
    if np.any(rest):
        return Flaw.WHOLE_SUMS, f"feature {int(np.argmax(rest != 0))}"
    if np.any(squares < 0):
        return Flaw.DIAGONAL, f"feature {int(np.argmin(squares))}: {int(squares.min())}"
    if np.any((squares - sums) & 1):
        return Flaw.PARITY, f"feature {int(np.argmax((squares - sums) & 1))}"
    diagonal = [int(square) for square in squares]
    for feature, (column_sum, square) in enumerate(zip(sums.tolist(), diagonal, strict=True)):
        if column_sum**2 > samples * square:
            return Flaw.COLUMN_SUM, f"feature {feature}: sum {column_sum}, square {square}, {samples} samples"
    if sum(diagonal) > samples * fixed.row_limit:
        return Flaw.TRACE, f"{sum(diagonal)} where {samples * fixed.row_limit} is the limit"
    if not 0 <= energy <= samples * fixed.target_limit:
        return Flaw.TARGETS, f"{energy} where {samples * fixed.target_limit} is the limit"
    place = _beyond(gram, diagonal, diagonal)
    if place is not None:
        return Flaw.CAUCHY_SCHWARZ, f"row {place[0]}, column {place[1]}: {int(gram[place])}"
    place = _beyond(cross, diagonal, [energy] * fixed.outputs)
    if place is not None:
        return Flaw.CROSS, f"row {place[0]}, column {place[1]}: {int(cross[place])}"
    if not is_semi_definite(gram, rank_at_most=samples):
        return Flaw.SEMI_DEFINITE, "beyond what rounding can be"
    return None, ""


def _beyond(entries: Integers, rows: list[int], columns: list[int]) -> tuple[int, int] | None:
    """Return the indices of an entry whose square exceeds rows[i] * columns[j], or None.

    Candidates are found in float64 and then compared exactly.
    """
    left, right = (np.sqrt(np.array(bounds, dtype=np.float64)) for bounds in (rows, columns))
    square = entries.shape[0] == entries.shape[1]
    for start in range(0, len(rows), BLOCK):
        # Convert before abs: the smallest int64 has no positive counterpart.
        magnitudes = np.abs(entries[start : start + BLOCK].astype(np.float64))
        near = magnitudes > (left[start : start + BLOCK] * (1.0 - 1e-12))[:, None] * right[None, :]
        if square:  # diagonal entries equal their own bound
            near[np.arange(len(near)), start + np.arange(len(near))] = False
        for row, column in np.argwhere(near):
            if int(entries[start + row, column]) ** 2 > rows[start + row] * columns[column]:
                return int(start + row), int(column)
    return None
