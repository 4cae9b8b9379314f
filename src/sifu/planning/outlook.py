"""Outlook for later requests: the budgets left after a plan, and how many requests stay faster than Scratch.

A later request that starts after an earlier noise edge charges nothing to the subjects that the edge covers
(docs/theory.md, section 8.2). If a request must roll back past the edge, these subjects have little or no budget
left, so the rollback often ends at the initial model, which is as slow as Scratch. A client's request need not roll
back past the last noise edge if the edge's noise suffices to hide the client. The outlook counts these active clients:

    s Psi(n, f) <= sigma sqrt(1 - reserve)       for client f at the edge's source n.

Let N clients be active, and let B of them violate this condition. If clients ask in random order, (N - B) / (B + 1)
clients ask on average before the first of the B. This holds for a *fixed* sigma. With `auto`, every request adds the
noise that it needs at the current model, so none has to roll back further. But noise accumulates and Psi grows, so
requests become slower. The forecast is therefore repeated for one request of the usual size after another, until
Scratch is about as fast.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sifu.core.request_terms import RequestTerms
from sifu.planning.forecast import WORTH_IT, Forecast
from sifu.run.psi_of_everyone import is_followed, track_everyone, with_earlier_names
from sifu.run.run_view import RunView
from sifu.store.reader import plain_name, plain_names
from sifu.theory.arrays import Floats
from sifu.theory.rollback import Exposure, Subject, charge, is_covered

LOOK_AHEAD = 50
"""Largest number of later requests that an outlook predicts."""


@dataclass(frozen=True)
class BudgetLine:
    """Budget of a subject forgotten earlier: the amount used so far, the cost of a plan, and the remainder.

    Budgets are counted in (Psi/sigma)^2; `budget` is 1/s^2. `covered` is true if earlier noise already hides the
    subject at the plan's source, so that the plan costs the subject nothing.
    """

    subject: Subject
    names: tuple[str, ...]
    budget: float
    used: float
    cost: float
    covered: bool

    @property
    def left(self) -> float:
        """Budget that later requests may still charge."""
        return max(0.0, self.budget - self.used - self.cost)

    @property
    def left_share(self) -> float:
        """Remaining budget as a fraction of the whole."""
        return self.left / self.budget if self.budget > 0.0 else 0.0


@dataclass(frozen=True)
class Outlook:
    """Prediction of how many later requests can start after the last noise edge, which covers all forgotten clients.

    Attributes:
        noise_std: Standard deviation of the edge's noise.
        active: Number of active clients.
        fitting: Number of active clients that the noise of the edge would hide.
        usual_size: Number of clients in a request of the usual size.
        expected_requests: Mean number of such requests, in random order and with the same sigma, before one of them
            must roll back past the edge.
        auto_requests: Predicted number of further requests that are faster than Scratch if each adds the noise it
            needs, at most `LOOK_AHEAD`, or None if nothing can be predicted.
    """

    noise_std: float
    active: int
    fitting: int
    usual_size: float
    expected_requests: float
    auto_requests: int | None = None


def budget_lines(view: RunView, exposures: Sequence[Exposure], depth: int, noise_std: float) -> tuple[BudgetLine, ...]:
    """Return the budgets of the subjects forgotten earlier, with the cost of noise at `depth`."""
    return tuple(
        BudgetLine(
            exposure.subject,
            plain_names(view.reader, (view.clients[index].name for index in exposure.subject.clients)),
            exposure.subject.budget,
            exposure.subject.used if exposure.subject.scope == "all" else 0.0,
            charge(exposure.psi_to_hide(depth), noise_std),
            is_covered(exposure.path, depth, exposure.subject),
        )
        for exposure in exposures
    )


def outlook(
    view: RunView, depth: int, noise_std: float, terms: RequestTerms, gone: tuple[int, ...] = ()
) -> Outlook | None:
    """Return the outlook after noise is added at `depth`, or None if there is no noise.

    Psi is the recorded value without the latest rounding terms, which is enough for a forecast.

    Args:
        view: View of the run.
        depth: Depth of the model that the noise is added to.
        noise_std: Standard deviation of the noise.
        terms: Terms that later requests are assumed to have.
        gone: Clients that the plan itself forgets.
    """
    if noise_std <= 0.0:
        return None
    stays = np.zeros(len(view.clients), dtype=bool)
    stays[view.active] = True
    stays[list(gone)] = False
    active = np.flatnonzero(stays)
    psi = influence(view, depth)[active]
    needed = psi * terms.multiplier / math.sqrt(1.0 - terms.reserve)
    fitting = int(np.sum(needed <= noise_std))
    sizes = [len(request.clients) for request in view.requests] or [len(terms.clients)]
    usual = float(statistics.median(sizes))
    bad = active.size - fitting
    served = active.size if bad == 0 else fitting / (bad + 1)
    later = _requests_ahead(view, depth, noise_std, np.sort(needed), usual)
    return Outlook(noise_std, int(active.size), fitting, usual, served / usual, later)


def _requests_ahead(view: RunView, depth: int, noise_std: float, needed: Floats, size: float) -> int | None:
    """Return the number of later requests of the usual size that are predicted to be faster than Scratch.

    `needed` is the noise that each active client needs at `depth`, in increasing order. The largest of `size` values
    drawn from `needed` lies at about the quantile size / (size + 1). This noise grows along the path like a power of
    the rounds, with the exponent observed at the kept models.
    """
    forecast = Forecast(view)
    done = float(view.path.rounds_until(depth))
    if forecast.training is None or done < 1.0 or not needed.size:
        return None
    usual = float(needed[min(needed.size - 1, int(needed.size * size / (size + 1.0)))])
    power = _growth_of_psi(view, depth)
    disturbed: list[tuple[float, float]] = [*forecast.edges(depth), (noise_std, 0.0)]
    now = done
    for served in range(min(LOOK_AHEAD, int(needed.size / size)) + 1):
        rounds = float(forecast.times_after(now, disturbed).mean())
        if served and rounds > WORTH_IT * forecast.training:
            return served - 1
        now += rounds
        disturbed = [(noise, age + rounds) for noise, age in disturbed]
        disturbed.append((usual * (now / done) ** power, 0.0))
    return served


def _growth_of_psi(view: RunView, depth: int) -> float:
    """Return the exponent a of Psi(n) ~ n^a, from kept models in the second half of the path, or 0.5 if unknown."""
    here, rounds = view.kept.get(depth), view.path.rounds_until(depth)
    for earlier in sorted(view.kept):
        before = view.path.rounds_until(earlier)
        if here is not None and before >= rounds / 2.0 and before < rounds and view.kept[earlier].psi_max > 0.0:
            ratio = here.psi_max / view.kept[earlier].psi_max
            return max(0.0, math.log(ratio) / math.log(rounds / before)) if ratio > 0.0 else 0.5
    return 0.5


def outlook_now(view: RunView, terms: RequestTerms) -> Outlook | None:
    """Return the outlook for the last noise edge of the current history, or None if there is none."""
    edges = view.path.added_noise[0].tolist()
    return outlook(view, edges[-1], view.path.nodes[edges[-1]].noise_std, terms) if edges else None


def influence(view: RunView, depth: int) -> Floats:
    """Return Psi(depth, c) of every client c, for forecasts only. It is infinite if Psi is unbounded at `depth`."""
    if view.path.unbounded_from <= depth:
        return np.full(len(view.clients), np.inf)
    node = view.path.nodes[depth].node
    by_node: dict[int, Floats] = view.reader.remembered("influence", dict)
    if node not in by_node:
        by_node[node] = with_earlier_names(view, _influence(view, depth), depth)
    return by_node[node]


def _influence(view: RunView, depth: int) -> Floats:
    simple = view.path.constant_when_absent and view.spec.privacy.accounting == "round"
    if not simple or is_followed(view, depth):
        return track_everyone(RunView(view.reader, tip=view.path.nodes[depth].node)).total(np.arange(len(view.clients)))
    rounds = [node.node for node in view.path.nodes[: depth + 1] if node.kind == "round"]
    drifts: Floats = np.zeros(len(view.clients))
    for client, total in view.reader.weighted_drifts(rounds):
        drifts[client] = total
    psi: Floats = drifts * view.facts.server_rate + view.path.rounding[depth] * (drifts > 0.0)
    return psi


def most_expensive(view: RunView) -> str:
    """Return the name of the active client with the largest Psi at the current model, the most expensive to forget."""
    active = view.active
    return plain_name(view.reader, int(active[np.argmax(influence(view, view.path.tip)[active])]))
