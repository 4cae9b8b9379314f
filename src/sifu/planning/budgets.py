"""Budgets over a sequence of requests: what everyone forgotten has left, and how far the history still goes.

A request that stays past an earlier noise edge costs those whom that edge covers nothing (docs/theory.md, section 8.2).
One that must go back before it finds them with little or no budget left, and soon falls to the initial model: as slow
as Scratch. So what matters for later requests is how many of the active clients the noise of the last edge would hide
there:

    s Psi(n, f) <= sigma sqrt(1 - reserve)       for client f at the edge's source n.

If clients ask in random order, N of them are active and B would not fit, (N - B) / (B + 1) ask, on average, before the
first that does not. That is what a *fixed* sigma serves. With `auto` every request takes the noise it needs at the
current model, so none has to go back; but noise adds up and Psi grows, and requests become slower. How many are worth
it is found by running the forecast ahead, request after request of the usual size.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sifu.core.request_terms import RequestTerms
from sifu.planning.forecast import WORTH_IT, Forecast
from sifu.run.run_view import RunView
from sifu.run.training import is_followed, track_everyone, with_earlier_names
from sifu.store.reader import plain_name, plain_names
from sifu.theory.arrays import Floats
from sifu.theory.rollback import Exposure, Subject, charge, is_covered

LOOK_AHEAD = 50


@dataclass(frozen=True)
class BudgetLine:
    """The budget of someone forgotten earlier: used so far, what a plan would add, and what would be left.

    Budgets are counted in (Psi/sigma)^2 and `budget` is 1/s^2; `covered` says that noise already hides them
    at the plan's source, so that it costs them nothing.
    """

    subject: Subject
    names: tuple[str, ...]
    budget: float
    used: float
    cost: float
    covered: bool

    @property
    def left(self) -> float:
        """What later requests may still charge."""
        return max(0.0, self.budget - self.used - self.cost)

    @property
    def left_share(self) -> float:
        """The same as a fraction of the budget."""
        return self.left / self.budget if self.budget > 0.0 else 0.0


@dataclass(frozen=True)
class Outlook:
    """How many later requests stay past the last noise edge, where everyone forgotten is covered.

    `fitting` of the `active` clients would; a request of the usual size has `usual_size` clients. `expected_requests`
    is the mean number of such requests before one with the same sigma has to go back before the edge, if clients ask in
    random order. `auto_requests` is how many more are predicted to be faster than Scratch when each takes
    the noise it needs (at most `LOOK_AHEAD`), None where nothing can be predicted.
    """

    noise_std: float
    active: int
    fitting: int
    usual_size: float
    expected_requests: float
    auto_requests: int | None = None


def budget_lines(view: RunView, exposures: Sequence[Exposure], depth: int, noise_std: float) -> tuple[BudgetLine, ...]:
    """What noise at `depth` costs everyone forgotten earlier, and what they have left."""
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
    """What to expect after an edge of this noise at `depth`; None where there is no noise to stay past.

    `gone` are clients that the plan itself forgets. Psi is the recorded one without its last roundings: a forecast.
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
    """Requests of the usual size after this one that the forecast finds faster than Scratch.

    `needed` is the noise that each active client needs at `depth`, in increasing order; the largest of `size` random
    ones lies about the share size / (size + 1) up. It grows along the path like a power of the rounds,
    the one that the kept models show.
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
    """a in Psi(n) ~ n^a, from the largest Psi at the kept models of the second half of the way."""
    here, rounds = view.kept.get(depth), view.path.rounds_until(depth)
    for earlier in sorted(view.kept):
        before = view.path.rounds_until(earlier)
        if here is not None and before >= rounds / 2.0 and before < rounds and view.kept[earlier].psi_max > 0.0:
            ratio = here.psi_max / view.kept[earlier].psi_max
            return max(0.0, math.log(ratio) / math.log(rounds / before)) if ratio > 0.0 else 0.5
    return 0.5


def outlook_now(view: RunView, terms: RequestTerms) -> Outlook | None:
    """The same for the last noise edge of the history as it is."""
    edges = view.path.added_noise[0].tolist()
    return outlook(view, edges[-1], view.path.nodes[edges[-1]].noise_std, terms) if edges else None


def influence(view: RunView, depth: int) -> Floats:
    """Psi(depth, c) of every client by its number, for forecasts: summed by the database where L = 1 everywhere."""
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
    """The name of the active client with the largest Psi at the current model: the most expensive one to forget now."""
    active = view.active
    return plain_name(view.reader, int(active[np.argmax(influence(view, view.path.tip)[active])]))
