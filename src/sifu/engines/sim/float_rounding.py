r"""Bounds for linear models: the curvature of a client's loss, and the floating-point error of a round.

With X the n x d matrix of samples extended by a column of ones and f the mean loss over the samples,

    beta = factor * lambda_max(X'X) / n,       factor = 1/2 softmax, 1/4 logistic, 1 half squared error,

plus weight decay, which adds to every eigenvalue (docs/theory.md, section 5.7). A mini-batch of b samples has another
loss. This bound covers all batches of a client (section 5.4):

    beta_batch <= min( (n / b_min) beta, max_rows factor (||x||^2 + 1) ),

since X_B'X_B <= X'X, and the norm of a mean of matrices x x' is at most the largest of their norms. Convexity only
gives mu >= 0, so mu is the weight decay alone.

Section 6.3 derives the allowance of a round; names follow the symbols there. The allowance holds while Psi <= 1000.
Code that determines a certificate's level must check this condition (`ROUNDING_HOLDS_UP_TO`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from sifu.engines.sim.client_blocks import PART_ROWS, groups_of, padded_rows, padded_samples
from sifu.engines.sim.embedded_clients import CheckedClient, Objective
from sifu.engines.sim.local_training import LocalTraining
from sifu.engines.sim.models import LinearModel
from sifu.errors import InputError
from sifu.theory.arrays import Floats, Integers
from sifu.theory.facts import ROUNDING_HOLDS_UP_TO
from sifu.theory.participation import ClientIndices
from sifu.theory.rounding import UNIT_ROUNDOFF, enlargement

_MARGIN = 1.0 + 1e-9
"""Factor that covers the eigensolver's own error, a small multiple of n * 2**-53."""
_STACK_BYTES = 2**26
"""Maximum number of bytes of samples that are processed together."""


def linear_curvature(
    clients: Sequence[CheckedClient], objective: Objective, training: LocalTraining
) -> tuple[Floats, Floats]:
    """Return the beta and the energy of every client, computed from its samples in the training type.

    Both hold for every batch that a client can draw. beta includes weight decay. The energy is
    factor * ||X_B||_F^2 / b. It is the sum of the eigenvalues, while beta (without weight decay) bounds the largest of
    them. Rounding errors grow with the energy.

    >>> from sifu.engines.sim.embedded_clients import OBJECTIVES
    >>> client = CheckedClient("a", np.array([[1.0, 0.0]]), np.array([0]))
    >>> smoothness, _ = linear_curvature([client], OBJECTIVES["softmax"], LocalTraining(rate=0.1, steps=1))
    >>> 1.0 <= float(smoothness[0]) <= 1.0 + 1e-8
    True
    """
    samples = np.array([client.samples for client in clients])
    smoothness, energy = np.zeros(samples.size), np.zeros(samples.size)
    width = clients[0].x.shape[1] + 1
    padded = padded_rows(samples)
    for group in groups_of(padded):
        rows = int(padded[group[0]])
        step = max(1, _STACK_BYTES // (8 * width * rows))
        for start in range(0, group.size, step):
            some = group[start : start + step]
            chosen = [clients[i] for i in some]
            smoothness[some], energy[some] = _stacked_curvature(chosen, rows, samples[some], objective, training)
    return smoothness, energy


def _stacked_curvature(
    clients: Sequence[CheckedClient], rows: int, samples: Integers, objective: Objective, training: LocalTraining
) -> tuple[Floats, Floats]:
    """Return the beta and the energy of clients that are all padded to `rows` rows; zero rows change neither."""
    factor = objective.curvature_factor
    extended = padded_samples(clients, rows)
    with np.errstate(over="ignore", invalid="ignore"):
        row_energy = np.einsum("kij,kij->ki", extended, extended)
        trace = row_energy.sum(axis=1)
        whole = factor * _top_eigenvalue_up(extended, trace, clients) / samples
    row_bound = factor * row_energy.max(axis=1) * _MARGIN
    smallest = training.smallest_batch(samples)
    batch = np.minimum(whole * samples / smallest * _MARGIN, row_bound)
    all_at_once = smallest == samples
    smoothness = np.where(all_at_once, whole, batch) * _MARGIN + training.weight_decay
    return smoothness, np.where(all_at_once, factor * trace / samples * _MARGIN, row_bound)


def _top_eigenvalue_up(extended: Floats, trace: Floats, clients: Sequence[CheckedClient]) -> Floats:
    """Return upper bounds on lambda_max(X'X) = lambda_max(XX'), from the smaller of the two matrices.

    Computing a Gram matrix with inner products of m terms in float64 has an error of at most m u trace(X'X) in the
    Frobenius norm (Higham 2002, section 3.5), which is added.
    """
    count, width = extended.shape[1:]
    other = extended.transpose(0, 2, 1)
    gram = extended @ other if count <= width else other @ extended
    finite = np.isfinite(gram).all(axis=(1, 2)) & np.isfinite(trace)
    if not finite.all():
        owner = clients[int(np.argmin(finite))].name
        raise InputError(f"the samples of client {owner!r} are so large that their squares overflow; scale them down")
    top = np.linalg.eigvalsh(gram)[:, -1]
    largest: Floats = np.maximum(top, 0.0) + 2.0 * max(count, width) * UNIT_ROUNDOFF * trace
    return largest


@dataclass(frozen=True)
class ClientSizes:
    """Quantities of each client from which a server computes the allowance of a round without the clients' data.

    `samples` is n, `batch_ratios` is n/b_min, and `rates` are the clients' steps eta_i. `steepness` is eta_i beta_i, at
    most 2, and `energy` eta_i times the energy that `linear_curvature` defines. `target_norms` is the largest ||y_row||
    (least squares only).
    """

    samples: Integers
    batch_ratios: Floats
    rates: Floats
    steepness: Floats
    energy: Floats
    target_norms: Floats

    @staticmethod
    def of(
        clients: Sequence[CheckedClient],
        objective: Objective,
        training: LocalTraining,
        rates: Floats,
        smoothness: Floats,
        energy: Floats,
    ) -> ClientSizes:
        """Compute the quantities of clients whose data are available, from their steps, beta and energy."""
        samples = np.array([client.samples for client in clients])
        ratios = samples / training.smallest_batch(samples)
        target_norms = np.zeros(len(clients))
        if not objective.labels:
            values = np.concatenate([client.y for client in clients])
            # Scale first, so that no square over- or underflows; the result bounds the norm of each row from above.
            largest = np.abs(values).max(axis=1).astype(np.float64)
            scaled = values / np.where(largest > 0.0, largest, 1.0)[:, None]
            norms = np.sqrt(np.square(scaled).sum(axis=1)) * largest * enlargement(values.shape[1] + 4)
            target_norms = np.maximum.reduceat(norms, np.cumsum(samples) - samples)
        return ClientSizes(samples, ratios, rates, rates * smoothness, rates * energy, target_norms)


def proven_allowance(
    model: LinearModel, training: LocalTraining, sizes: ClientSizes, dtype: str
) -> Callable[[float, ClientIndices], float] | None:
    """Return a function of a round's starting norm and participants that bounds the round's rounding error.

    The function bounds the error of a float64 round, summed over the run and its counterfactual. Its result may be
    infinite if many steps with momentum amplify errors without limit. Nothing is proven for other types than float64,
    and the result is then None.
    """
    if dtype != "float64":
        return None
    return partial(round_allowance, model=model, training=training, sizes=sizes)


def round_allowance(
    start_norm: float,
    participants: ClientIndices,
    *,
    model: LinearModel,
    training: LocalTraining,
    sizes: ClientSizes,
) -> float:
    """Return the rounding allowance of a round, computed from the maximum of each quantity over the participants."""
    samples, labels = sizes.samples[participants], model.objective.labels
    largest, width = int(samples.max()), model.features + 1
    rows = min(int(samples.sum()), max(largest, PART_ROWS))
    batch_ratio, rate, steepness, energy, target_norm = (
        float(values[participants].max())
        for values in (sizes.batch_ratios, sizes.rates, sizes.steepness, sizes.energy, sizes.target_norms)
    )
    decay = rate * training.weight_decay
    scale = math.sqrt(rate) * (1.0 if labels else max(1.0, target_norm))
    start, pull = start_norm + ROUNDING_HOLDS_UP_TO, 3.0 * scale
    radius = _path_radius(start, pull, math.sqrt(batch_ratio), decay if labels else steepness, decay, training, labels)
    spread = min(largest, width, max(1.0, energy / 2.0))
    terms = width + largest + model.outputs + 16
    step = 8.0 * UNIT_ROUNDOFF * terms * spread * (radius + scale)
    local = _after_all_steps(step, steepness, training) + step
    averaging = 4.0 * (participants.size + 8) * UNIT_ROUNDOFF * radius
    averaging += 2.0 * (rows + participants.size + 8) * UNIT_ROUNDOFF * spread * radius
    return 2.0 * (local + averaging)


def _path_radius(
    start: float, pull: float, stretch: float, linear: float, decay: float, training: LocalTraining, labels: bool
) -> float:
    """Return max(R, Q), a bound on all iterates in feature and in sample space; `stretch` is sqrt(n/b_min).

    `linear` and `decay` are factors of a step: the rate times the bound on the part of the gradient that grows with the
    model, and the rate times the weight decay.
    """
    if training.momentum == 0.0:
        radius = start + training.steps * pull
        return max(radius, training.steps * stretch * (pull if labels else 2.0 * radius + pull))
    radius, velocity, dual, dual_velocity = start, 0.0, 0.0, 0.0
    for _ in range(training.steps):
        push = decay * dual + stretch * (pull if labels else 2.0 * radius + pull)
        dual, dual_velocity = _lengthen(dual, push, dual_velocity, training)
        radius, velocity = _lengthen(radius, linear * radius + pull, velocity, training)
    return max(radius, dual)


def _after_all_steps(step: float, steepness: float, training: LocalTraining) -> float:
    """Return a bound on the accumulated effect of an error of at most `step` in each local step."""
    if training.momentum == 0.0:
        return training.steps * step
    position, velocity = 0.0, 0.0
    for _ in range(training.steps):
        position, velocity = _lengthen(position, steepness * position + step, velocity, training)
        position += step
    return position


def _lengthen(length: float, push: float, velocity: float, training: LocalTraining) -> tuple[float, float]:
    """Return bounds on the norms of value and velocity after one step, as if all terms had the same direction.

    Push and velocity are multiplied by the rate.
    """
    velocity = training.momentum * velocity + push
    return length + velocity, velocity
