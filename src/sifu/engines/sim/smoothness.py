"""How curved a client's loss can be: beta of a linear model, measured as an upper bound (docs/theory.md, section 5.7).

With X the n x d matrix of samples extended by a column of ones and f the mean loss over the samples,

    beta = factor * lambda_max(X'X) / n,       factor = 1/2 softmax, 1/4 logistic, 1 half squared error,

plus weight decay, which adds to every eigenvalue. A mini-batch of b samples descends another loss; all
batches of a client are covered by (docs/theory.md, section 5.4)

    beta_batch <= min( (n / b_min) beta, max_rows factor (||x||^2 + 1) ),

as X_B'X_B <= X'X, and a mean of matrices x x' has no larger norm than the largest of them.
Convexity gives mu >= 0 and nothing better, so mu is the weight decay alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sifu.engines.sim.client_blocks import groups_of, padded_rows, padded_samples
from sifu.engines.sim.embedded_clients import CheckedClient
from sifu.engines.sim.local_training import LocalTraining
from sifu.engines.sim.objectives import Objective
from sifu.errors import InputError
from sifu.theory.arrays import Floats, Integers
from sifu.theory.rounding import UNIT_ROUNDOFF

_MARGIN = 1.0 + 1e-9
"""Covers the eigensolver's own error, a small multiple of n * 2**-53."""
_STACK_BYTES = 2**26
"""This many bytes of samples are looked at together."""


@dataclass(frozen=True)
class LinearCurvature:
    """Bounds that hold for every batch each client can draw, one number per client.

    `smoothness` is beta, weight decay included. `energy` is factor * ||X_B||_F^2 / b, the sum of the
    eigenvalues of which beta bounds the largest (weight decay not included); rounding grows with it.
    """

    smoothness: Floats
    energy: Floats


def linear_curvature(
    clients: Sequence[CheckedClient], objective: Objective, training: LocalTraining
) -> LinearCurvature:
    """beta and energy of every client, from its samples in the type that training uses; many at a time.

    >>> from sifu.engines.sim.objectives import OBJECTIVES
    >>> client = CheckedClient("a", np.array([[1.0, 0.0]]), np.array([0]))
    >>> curvature = linear_curvature([client], OBJECTIVES["softmax"], LocalTraining(rate=0.1, steps=1))
    >>> 1.0 <= float(curvature.smoothness[0]) <= 1.0 + 1e-8
    True
    """
    samples = np.array([client.samples for client in clients])
    curvature = LinearCurvature(np.zeros(samples.size), np.zeros(samples.size))
    width = clients[0].x.shape[1] + 1
    padded = padded_rows(samples)
    for group in groups_of(padded):
        rows = int(padded[group[0]])
        step = max(1, _STACK_BYTES // (8 * width * rows))
        for start in range(0, group.size, step):
            some = group[start : start + step]
            chosen = [clients[i] for i in some]
            curvature.smoothness[some], curvature.energy[some] = _stacked_curvature(
                chosen, rows, samples[some], objective, training
            )
    return curvature


def _stacked_curvature(
    clients: Sequence[CheckedClient], rows: int, samples: Integers, objective: Objective, training: LocalTraining
) -> tuple[Floats, Floats]:
    """beta and energy of clients side by side; those that pad a client to `rows` rows are zeros and change neither."""
    factor = objective.curvature_factor
    extended: Floats = padded_samples(clients, rows, "float64").astype(np.float64, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        row_energy = np.einsum("kij,kij->ki", extended, extended)
        trace = row_energy.sum(axis=1)
        whole = factor * _top_eigenvalue_up(extended, trace, clients) / samples
    row_bound = factor * row_energy.max(axis=1) * _MARGIN
    batch_size = samples if training.batch_size is None else np.minimum(samples, training.batch_size)
    smallest = np.where(samples % batch_size == 0, batch_size, samples % batch_size)
    batch = np.minimum(whole * samples / smallest * _MARGIN, row_bound)
    all_at_once = batch_size == samples
    smoothness = np.where(all_at_once, whole, batch) * _MARGIN + training.weight_decay
    return smoothness, np.where(all_at_once, factor * trace / samples * _MARGIN, row_bound)


def _top_eigenvalue_up(extended: Floats, trace: Floats, clients: Sequence[CheckedClient]) -> Floats:
    """Upper bounds of lambda_max(X'X) = lambda_max(XX'), from the smaller of the two matrices.

    Forming a Gram matrix with inner products of m terms in float64 is off by at most m u trace(X'X) in the
    Frobenius norm (Higham 2002, section 3.5), which is added.
    """
    count, width = extended.shape[1:]
    other = extended.transpose(0, 2, 1)
    gram = extended @ other if count <= width else other @ extended
    finite = np.isfinite(gram).all(axis=(1, 2))
    if not finite.all():
        owner = clients[int(np.argmin(finite))].name
        raise InputError(f"the samples of client {owner!r} are so large that their squares overflow; scale them down")
    top = np.linalg.eigvalsh(gram)[:, -1]
    largest: Floats = np.maximum(top, 0.0) + 2.0 * max(count, width) * UNIT_ROUNDOFF * trace
    return largest
