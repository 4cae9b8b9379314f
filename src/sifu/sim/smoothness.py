"""How curved a client's loss can be: beta of a linear model, measured as an upper bound.

With X the n x d matrix of samples extended by a column of ones and f the mean loss over the samples,

    beta = factor * lambda_max(X'X) / n,       factor = 1/2 softmax, 1/4 logistic, 1 half squared error,

plus weight decay, which adds to every eigenvalue. A mini-batch of b samples descends another loss; all
batches of a client are covered by (DESIGN section 4)

    beta_batch <= min( (n / b_min) beta, max_rows factor (||x||^2 + 1) ),

as X_B'X_B <= X'X, and a mean of matrices x x' has no larger norm than the largest of them.
Convexity gives mu >= 0 and nothing better, so mu is the weight decay alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sifu.core.errors import InputError
from sifu.core.upward import UNIT_ROUNDOFF
from sifu.sim.local_training import LocalTraining
from sifu.sim.objectives import Objective

_MARGIN = 1.0 + 1e-9
"""Covers the eigensolver's own error, a small multiple of n * 2**-53."""


@dataclass(frozen=True)
class LinearCurvature:
    """Bounds that hold for every batch a client can draw.

    `smoothness` is beta, weight decay included. `energy` is factor * ||X_B||_F^2 / b, the sum of the
    eigenvalues of which beta bounds the largest (weight decay not included); rounding grows with it.
    """

    smoothness: float
    energy: float


def linear_curvature(
    samples: NDArray[np.floating], objective: Objective, training: LocalTraining, owner: str
) -> LinearCurvature:
    """beta and energy of one client, from its samples in the type that training uses.

    >>> from sifu.sim.objectives import OBJECTIVES
    >>> one = np.array([[1.0, 0.0]])
    >>> found = linear_curvature(one, OBJECTIVES["softmax"], LocalTraining(rate=0.1, steps=1), "a")
    >>> 1.0 <= found.smoothness <= 1.0 + 1e-8
    True
    """
    count = samples.shape[0]
    factor = objective.curvature_factor
    with np.errstate(over="ignore", invalid="ignore"):
        extended = np.ones((count, samples.shape[1] + 1), dtype=np.float64)
        extended[:, :-1] = samples
        row_energy = np.einsum("ij,ij->i", extended, extended)
        whole = factor * _top_eigenvalue_up(extended, float(row_energy.sum()), owner) / count
    row_bound = factor * float(row_energy.max()) * _MARGIN
    if training.whole_batches(count):
        return LinearCurvature(whole * _MARGIN + training.weight_decay, factor * float(row_energy.mean()) * _MARGIN)
    batch = min(whole * count / training.smallest_batch(count) * _MARGIN, row_bound)
    return LinearCurvature(batch * _MARGIN + training.weight_decay, row_bound)


def _top_eigenvalue_up(extended: NDArray[np.float64], trace: float, owner: str) -> float:
    """An upper bound of lambda_max(X'X) = lambda_max(XX'), from the smaller of the two matrices.

    Forming a Gram matrix with inner products of m terms in float64 is off by at most m u trace(X'X) in the
    Frobenius norm (Higham 2002, section 3.5), which is added.
    """
    count, width = extended.shape
    gram = extended @ extended.T if count <= width else extended.T @ extended
    if not np.isfinite(gram).all():
        raise InputError(f"the samples of client {owner!r} are so large that their squares overflow; scale them down")
    top = float(np.linalg.eigvalsh(gram)[-1])
    return float(max(top, 0.0) + 2.0 * max(count, width) * UNIT_ROUNDOFF * trace)
