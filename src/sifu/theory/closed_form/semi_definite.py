"""Whether a matrix of whole numbers is positive semi-definite, as far as float64 can tell.

G is scaled to K with ones on its diagonal, K_jl = G_jl / sqrt(G_jj G_ll), of size m, and is accepted when its smallest
eigenvalue is above -4 m^2 u, with u the unit roundoff 2^-52. Two ways lead there (docs/theory.md, section 14.5):

* G of n samples has rank n at most. Where that is small, n steps of a Cholesky factorisation with pivots give
  K = L L' + R with L of n columns, and the smallest eigenvalue is at least -m max|R|. Accepted where max|R| <= 4 m u.
  Work: m^2 n.
* Otherwise, or where the first way does not end in acceptance, K + 4 m^2 u I has a Cholesky factor. Work: m^3 / 3.

The first way only ever accepts; what is refused is refused by the second.
"""

from __future__ import annotations

import numpy as np
from threadpoolctl import threadpool_limits

from sifu.theory.arrays import Floats, Integers

LOW_RANK = 10
"""The first way is tried up to a rank of a tenth of the size, where it is the faster one."""
BLOCK = 256
ROUNDOFF = float(np.finfo(np.float64).eps)


def is_semi_definite(gram: Integers, rank_at_most: int) -> bool:
    """Whether a symmetric matrix without negative squares has no negative direction; expected of at most this rank.

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
    """K; features that are zero in every sample are left out."""
    squares = np.diagonal(gram)
    if not np.all(squares > 0):
        gram = gram[np.ix_(squares > 0, squares > 0)]
        squares = np.diagonal(gram)
    lengths = np.sqrt(squares.astype(np.float64))
    scaled = gram / lengths[:, None]
    scaled /= lengths[None, :]
    return scaled


def _is_low_rank(scaled: Floats, rank: int, tolerance: float) -> bool:
    """Whether K = L L' + R with L of at most `rank` columns and no entry of R beyond the tolerance."""
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
    for start in range(0, len(scaled), BLOCK):
        rest = scaled[start : start + BLOCK] - factor[:, start : start + BLOCK].T @ factor
        if not (rest.max() <= tolerance and rest.min() >= -tolerance):  # NaN is refused as well
            return False
    return True


def _has_factor(scaled: Floats, shift: float) -> bool:
    """Whether K + shift I has a Cholesky factor.

    The shift is what rounding of the factorisation can be: with ones on the diagonal it fails at most when the smallest
    eigenvalue is below m^2 times the unit roundoff (Higham 2002, theorem 10.7, and its remark on scaling).
    """
    import scipy.linalg

    scaled[np.diag_indices_from(scaled)] += shift
    # Column order, so that LAPACK works in place instead of on a copy; the matrix is its own transpose.
    _, failed = scipy.linalg.lapack.dpotrf(scaled.T, lower=1, overwrite_a=1, clean=0)
    return bool(failed == 0)
