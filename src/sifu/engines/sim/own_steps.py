"""Own safe steps: each client limits its step by the curvature of its own loss (docs/theory.md, section 5.8)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from sifu.engines.sim.embedded_clients import CheckedClient
from sifu.engines.sim.float_rounding import linear_curvature
from sifu.engines.sim.local_training import LocalTraining
from sifu.engines.sim.models import LinearModel
from sifu.errors import InputError
from sifu.theory.arrays import Floats
from sifu.theory.regularity import expansions, own_rates, safe_rates


@dataclass(frozen=True)
class OwnSteps:
    """Steps of the clients (docs/theory.md, section 5.8): rates, expansions, and what their rounding depends on.

    Clients of other models than linear ones all take the same rate, and their expansions are unknown.
    """

    rates: Floats
    expansions: Sequence[float | None]
    smoothness: Floats
    energy: Floats

    @staticmethod
    def of(linear: LinearModel | None, clients: Sequence[CheckedClient], training: LocalTraining) -> OwnSteps:
        """Return the steps of these clients.

        Raises:
            InputError: If the model is not linear and no finite rate is given.
        """
        if linear is None:
            if not math.isfinite(training.rate):
                raise InputError('local.rate = "auto" needs a linear model: give a number')
            nothing = np.zeros(len(clients))
            return OwnSteps(np.full(len(clients), training.rate), [None] * len(clients), nothing, nothing)
        smoothness, energy = linear_curvature(clients, linear.objective, training)
        settings = training.steps, training.momentum, training.weight_decay
        rates = own_rates(training.rate, safe_rates(smoothness, *settings, linear.objective.name))
        return OwnSteps(rates, expansions(rates, smoothness, *settings).tolist(), smoothness, energy)


class SafeStep(NamedTuple):
    """A client's step, and the expansion that it reports with it."""

    rate: float
    expansion: float


def safe_step(
    x: NDArray[np.floating],
    loss: Literal["softmax", "logistic", "least_squares"],
    steps: int,
    *,
    rate: float = math.inf,
    batch: int = 0,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> SafeStep:
    """Return the step of a client that trains a linear model in a loop of its own, and its expansion.

    Args:
        x: The client's samples, one row each, without the constant 1 of the bias.
        loss: Loss that the client minimises.
        steps: Number of local steps per round.
        rate: The run's limit, `local.rate`.
        batch: Size of a mini-batch, or 0 for all samples.
        momentum: Heavy-ball momentum, reset in each round.
        weight_decay: Weight decay of every parameter, including the bias.

    >>> safe_step(np.array([[1.0, 0.0]]), "softmax", 5, rate=0.1)
    SafeStep(rate=0.1, expansion=1.0)
    """
    client = CheckedClient("own", np.asarray(x, dtype=np.float64), np.zeros(len(x)))
    training = LocalTraining(rate, steps, batch or None, momentum, weight_decay)
    own = OwnSteps.of(LinearModel(loss, client.x.shape[1], 1), [client], training)
    return SafeStep(float(own.rates[0]), cast("float", own.expansions[0]))
