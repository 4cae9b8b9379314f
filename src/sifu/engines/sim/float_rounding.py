r"""Bounds of linear models: how curved a client's loss can be, and how far floating point can have moved a round.

How curved a client's loss can be: beta of a linear model, measured as an upper bound (docs/theory.md, section 5.7).

With X the n x d matrix of samples extended by a column of ones and f the mean loss over the samples,

    beta = factor * lambda_max(X'X) / n,       factor = 1/2 softmax, 1/4 logistic, 1 half squared error,

plus weight decay, which adds to every eigenvalue. A mini-batch of b samples descends another loss; all
batches of a client are covered by (docs/theory.md, section 5.4)

    beta_batch <= min( (n / b_min) beta, max_rows factor (||x||^2 + 1) ),

as X_B'X_B <= X'X, and a mean of matrices x x' has no larger norm than the largest of them.
Convexity gives mu >= 0 and nothing better, so mu is the weight decay alone.

How far floating point can have moved a round of a linear model from exact arithmetic.

docs/theory.md, section 6.3.

One local step in exact arithmetic is T(W) = W - eta (X'(s(XW) - Y)/b + lambda W) with X (b x d, bias column
included) the batch and s the softmax, the sigmoid or the identity. Write u = 2^-53, ||X|| for the spectral norm,
c for the curvature factor (s is c-Lipschitz: 1/2, 1/4, 1), and suppose eta beta <= 2. Then, for every batch
and for the whole data (n rows),

    (eta/b) c ||X||^2 <= 2,     (eta/b) c ||X||_F^2 <= 2 r,     1 <= r <= min(n, d),

r = max(1, eta energy / 2) measured. Let R bound ||W|| on the whole path, and y = 1 for class labels (then
||s - Y||_F <= sqrt(2b) for softmax, sqrt(b) for logistic) or at least the largest ||y_row|| for least squares,
whose residual is at most ||X|| R + sqrt(b) y. Errors of one computed step, first order (Higham 2002, chapter 3):

    outputs    ||dZ|| <= d u ||X||_F ||W||        times (eta/b) c ||X||:    <= 2 d r u R
    s(Z)       2(C + 8) u a row (exp(-t) t <= 1)  times (eta/b) ||X||:      <= 6 (C + 8) u sqrt(eta)
    residual   u ||s - Y||                        times (eta/b) ||X||:      <= 4 u sqrt(eta) y + 2 u R
    X'(s - Y)  b u ||X||_F ||s - Y||              times eta/b:              <= n r u (3 sqrt(eta) y + 2 R)
    update     8 u (||W|| + eta ||gradient||)                               <= 8 u (3 R + 3 sqrt(eta) y)

The vectorised path may carry W_k = a_k W_0 + X'V_k by V_k (n x C) and G = XX' of the whole data instead. Its
implied iterate makes the same step with ||dZ|| <= u (d ||X||_F R + (d + n + 8) ||X_B||_F ||X||_F ||V||). With
Q >= sqrt(2n/(eta c)) ||V|| (so Q >= ||X|| ||V||), that costs at most 2 r (2d + n + 8) u max(R, Q), and turning
V_K into W_K once costs (n + 6) r u Q. Either way one step, or that last conversion, costs at most

    e = 8 u (d + n + C + 16) r (max(R, Q) + sqrt(eta) y),       the sums above give 6 in place of 8.

**The path.** eta ||gradient of the data's constant part|| <= 3 sqrt(eta) y, and the rest of a step does not
lengthen W, so R = R_0 + 3 K sqrt(eta) y. V grows in a step by (eta/b) ||residual||: Q = K sqrt(n/b_min)
(3 sqrt(eta) y + [2 R for least squares]). With momentum the norms obey v' = rho v + kappa R + 3 y/sqrt(eta),
R' = R + eta v', kappa = lambda for labels and beta otherwise, and Q likewise with kappa = lambda.

**Over K steps.** Without momentum T does not expand distances (eta beta <= 2, convex), so errors add:
(K + 1) e. With momentum rho an error in the velocity lives on, and only smoothness bounds what follows:
position p and velocity q obey q' = rho q + beta p + e/eta, p' = p + eta q' + e (Nesterov: p' = p +
eta (beta p + e/eta + rho q') + e), from p = q = 0.

**Clipped steps** (docs/theory.md, section 5.9) are Lipschitz with 1 + eta beta instead of 1, so errors obey
p' = (1 + eta beta) p + e; e grows by eta (dC + 10) u c for the norm of dC parameters and the scaling; and the path
is R = R_0 + reach, where lengths obey v' = rho v + c + lambda R, R' = R + eta v' (Nesterov: R' = R + eta (c +
lambda R + rho v')). Such steps are made between features, and V is not carried.

**Averaging** M models and the server's step: 4 (M + 8) u R, times max(1, g) like all before. The vectorised path
carries theta_i as a_K W_0 + u_i. Where it builds u_i, that takes two more roundings of numbers below 2R, once, and
the conversion's e, which is then not needed for anything else, covers them. Where it does not, conversion and
averaging are one product sum_i X_i'(w_i V_i) over at most m rows of several clients at a time, whose sums are
then added: each entry goes through at most m + M + 4 roundings, so the error is at most (m + M + 4) u times
sum_i w_i ||X_i||_F ||V_i|| <= r Q. Added, with room: 2 (m + M + 8) u r max(R, Q), m the rows of the round or the
most rows of a product, whichever is less.

**Both worlds.** A sensitivity compares two computed runs, so everything counts twice. The other run's model
is within Psi of this one, so its path is covered by R_0 = ||theta|| + 1000 as long as Psi <= 1000, which
code that states a level has to check (`ROUNDING_HOLDS_UP_TO`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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

    >>> from sifu.engines.sim.embedded_clients import OBJECTIVES
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


def within_reach(training: LocalTraining, smoothness: float) -> bool:
    """Whether eta beta <= 2, which the whole derivation rests on."""
    return training.rate * smoothness <= 2.0


@dataclass(frozen=True)
class ClientSizes:
    """What the allowance depends on, client by client: all that a server needs of data it does not see.

    `samples` is n, `batch_ratios` n/b_min, `smoothness` beta, `energy` as in `LinearCurvature`, `target_norms` the
    largest ||y_row|| (least squares only).
    """

    samples: Integers
    batch_ratios: Floats
    smoothness: Floats
    energy: Floats
    target_norms: Floats

    @staticmethod
    def of(
        clients: Sequence[CheckedClient], objective: Objective, training: LocalTraining, curvature: LinearCurvature
    ) -> ClientSizes:
        """Of clients whose data are available."""
        samples = np.array([client.samples for client in clients])
        ratios = np.array([client.samples / training.smallest_batch(client.samples) for client in clients])
        target_norms = np.zeros(len(clients))
        if not objective.labels:
            firsts = np.concatenate([[0], np.cumsum(samples)[:-1]])
            target_norms = np.maximum.reduceat(_row_norms_up(np.concatenate([client.y for client in clients])), firsts)
        return ClientSizes(samples, ratios, curvature.smoothness, curvature.energy, target_norms)


def round_allowance(
    start_norm: float,
    participants: ClientIndices,
    *,
    model: LinearModel,
    training: LocalTraining,
    server_rate: float,
    sizes: ClientSizes,
) -> float:
    """The rounding of one float64 round of `participants` from a model of norm `start_norm`, in both worlds together.

    It depends on the largest of each of their sizes, and may be infinite where many steps with momentum amplify errors
    without limit.
    """
    samples, labels = sizes.samples[participants], model.objective.labels
    largest, width = int(samples.max()), model.features + 1
    rows = min(int(samples.sum()), max(largest, PART_ROWS))
    batch_ratio, smoothness, energy, target_norm = (
        float(values[participants].max())
        for values in (sizes.batch_ratios, sizes.smoothness, sizes.energy, sizes.target_norms)
    )
    scale = math.sqrt(training.rate) * (1.0 if labels else max(1.0, target_norm))
    start, pull = start_norm + ROUNDING_HOLDS_UP_TO, 3.0 * scale
    radius = _path_radius(start, pull, math.sqrt(batch_ratio), smoothness, training, labels)
    spread = min(largest, width, max(1.0, training.rate * energy / 2.0))
    terms = width + largest + model.outputs + 16
    step = 8.0 * UNIT_ROUNDOFF * terms * spread * (radius + scale)
    step += training.rate * (width * model.outputs + 10) * UNIT_ROUNDOFF * training.clip
    local = _after_all_steps(step, smoothness, training) + step
    averaging = 4.0 * (participants.size + 8) * UNIT_ROUNDOFF * radius
    averaging += 2.0 * (rows + participants.size + 8) * UNIT_ROUNDOFF * spread * radius
    return 2.0 * max(1.0, server_rate) * (local + averaging)


def _row_norms_up(values: NDArray[np.floating]) -> Floats:
    """An upper bound of the norm of each row, scaled first so that no square over- or underflows."""
    largest = np.abs(values).max(axis=1).astype(np.float64)
    scaled = values / np.where(largest > 0.0, largest, 1.0)[:, None]
    norms: Floats = np.sqrt(np.square(scaled).sum(axis=1)) * largest * enlargement(values.shape[1] + 4)
    return norms


def _path_radius(
    start: float, pull: float, stretch: float, smoothness: float, training: LocalTraining, labels: bool
) -> float:
    """max(R, Q): no iterate of any client is longer, in either coordinates; `stretch` is sqrt(n/b_min)."""
    if training.clip:
        radius, velocity = start, 0.0
        for _ in range(training.steps):
            gradient = training.clip + training.weight_decay * radius
            radius, velocity = _lengthen(radius, gradient, velocity, training)
        return radius
    if training.momentum == 0.0:
        radius = start + training.steps * pull
        return max(radius, training.steps * stretch * (pull if labels else 2.0 * radius + pull))
    linear = training.weight_decay if labels else smoothness
    radius, velocity, dual, dual_velocity = start, 0.0, 0.0, 0.0
    for _ in range(training.steps):
        dual_gradient = (
            training.weight_decay * dual + stretch * (pull if labels else 2.0 * radius + pull) / training.rate
        )
        dual, dual_velocity = _lengthen(dual, dual_gradient, dual_velocity, training)
        radius, velocity = _lengthen(radius, linear * radius + pull / training.rate, velocity, training)
    return max(radius, dual)


def _after_all_steps(step: float, smoothness: float, training: LocalTraining) -> float:
    """What errors of `step` in each of K steps can grow to."""
    if training.momentum == 0.0 and not training.clip:
        return training.steps * step
    position, velocity = 0.0, 0.0
    for _ in range(training.steps):
        gradient = smoothness * position + step / training.rate
        position, velocity = _lengthen(position, gradient, velocity, training)
        position += step
    return position


def _lengthen(length: float, gradient: float, velocity: float, training: LocalTraining) -> tuple[float, float]:
    """One momentum step on norms: everything points the worst way and adds."""
    velocity = training.momentum * velocity + gradient
    push = gradient + training.momentum * velocity if training.nesterov else velocity
    return length + training.rate * push, velocity
