"""Forward forgetting, weighed: rounds without the client before the noise, where L < 1 (docs/theory.md, section 9.4).

With weight decay a round without W shrinks Psi by L. So instead of going back, one can train on without W, keep those
rounds to oneself, and add the noise when less of it is needed: after r rounds sigma L^r, sigma what the current model
needs. Those forgotten earlier are absent too, so the same factor holds for all that must be hidden. The forecast
says what r rounds and the rest of the way would take. This is advice: requests are carried out by going back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sifu.planning.forecast import Forecast
from sifu.record.run_view import RunView
from sifu.theory.regularity import RoundRegularity

SLOWEST = 1.0 - 1e-6
"""L above this shrinks nothing within any number of rounds worth waiting for."""
TRIED = 32
"""So many numbers of rounds are tried, up to those of the first training."""


@dataclass(frozen=True)
class ForwardForgetting:
    """`rounds` without those who leave, each shrinking Psi by `contraction`, then noise; `predicted_rounds` in all."""

    contraction: float
    rounds: int
    noise_std: float
    predicted_rounds: int


def contraction_without(view: RunView, leaving: tuple[int, ...]) -> float:
    """L of a round of everyone who stays."""
    stays = np.setdiff1d(view.active, leaving)
    samples = np.array([view.clients[client].samples for client in stays.tolist()], dtype=np.int64)
    regularities = view.regularities
    everyone = RoundRegularity.of(samples, regularities.factors[stays], regularities.averagedness[stays])
    return everyone.absent(view.facts.server_rate)


def weigh_forward(
    view: RunView, forecast: Forecast, leaving: tuple[int, ...], noise_now: float
) -> ForwardForgetting | None:
    """The best of training on first; None where L is not below 1, or nothing can be predicted or hidden."""
    first = forecast.training
    # If nobody's P_i is below 1, no round shrinks anything; known without going over everyone for every plan.
    if first is None or not 0.0 < noise_now < math.inf or view.regularities.factors.min(initial=np.inf) >= 1.0:
        return None
    factor = contraction_without(view, leaving)
    if not factor < SLOWEST:
        return None
    tip = view.path.tip
    done, edges = view.path.rounds_until(tip), forecast.edges(tip)

    def total(rounds: int) -> float:
        before = [(noise, age + rounds) for noise, age in edges]
        return rounds + forecast.expected_after(done + rounds, [*before, (noise_now * factor**rounds, 0)])

    tried = np.unique(np.geomspace(1, max(first, 2), TRIED).round()).astype(int).tolist()
    best = min(tried, key=total)
    return ForwardForgetting(factor, best, noise_now * factor**best, max(1, round(total(best))))
