"""Budgets over a sequence of requests: what everyone forgotten has left, and how far the history still goes.

A request that stays past an earlier noise edge costs whoever that edge covers nothing (DESIGN section 6). One that must
go back before it finds them with little or no budget left, and soon falls to the initial model: as slow as Scratch. So
what matters for later requests is how many of the active clients the noise of the last edge would hide there:

    s Psi(n, f) <= sigma sqrt(1 - reserve)       for client f at the edge's source n.

If clients ask in random order, N of them are active and B would not fit, (N - B) / (B + 1) ask, on average, before the
first that does not.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sifu.core.rollback import Exposure, Subject, charge, is_covered
from sifu.core.terms import RequestTerms
from sifu.methods.view import RunView


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
    is the mean number of such requests before one has to go back before the edge, if clients ask in random order.
    """

    noise_std: float
    active: int
    fitting: int
    usual_size: float
    expected_requests: float


def budget_lines(view: RunView, exposures: Sequence[Exposure], depth: int, noise_std: float) -> tuple[BudgetLine, ...]:
    """What noise at `depth` costs everyone forgotten earlier, and what they have left."""
    return tuple(
        BudgetLine(
            one.subject,
            tuple(view.clients[index].name for index in one.subject.clients),
            one.subject.budget,
            one.subject.used if one.subject.scope == "all" else 0.0,
            charge(one.psi_to_hide(depth), noise_std),
            is_covered(one.path, depth, one.subject),
        )
        for one in exposures
    )


def outlook(
    view: RunView, depth: int, noise_std: float, terms: RequestTerms, gone: tuple[int, ...] = ()
) -> Outlook | None:
    """What is to come after an edge of this noise at `depth`; None where there is no noise to stay past.

    `gone` are clients that the plan itself forgets. Psi is the recorded one without its last roundings: a forecast.
    """
    if noise_std <= 0.0:
        return None
    active = np.setdiff1d(view.active, np.array(gone, dtype=np.int64))
    needed = influence(view, depth)[active] * terms.multiplier / math.sqrt(1.0 - terms.reserve)
    fitting = int(np.sum(needed <= noise_std))
    sizes = [len(one.clients) for one in view.requests] or [len(terms.clients)]
    usual = float(statistics.median(sizes))
    bad = active.size - fitting
    served = active.size if bad == 0 else fitting / (bad + 1)
    return Outlook(noise_std, int(active.size), fitting, usual, served / usual)


def outlook_now(view: RunView, terms: RequestTerms) -> Outlook | None:
    """The same for the last noise edge of the history as it is."""
    edges = [depth for depth, _ in view.path.noise_depths if view.path.nodes[depth].noise_std > 0.0]
    return outlook(view, edges[-1], view.path.nodes[edges[-1]].noise_std, terms) if edges else None


def influence(view: RunView, depth: int) -> NDArray[np.float64]:
    """Psi(depth, c) of every client by its number, for forecasts: summed by the database where L = 1 everywhere."""
    if view.path.unbounded_from <= depth:
        return np.full(len(view.clients), np.inf)
    if not view.path.constant_when_absent or view.spec.privacy.accounting != "round":
        return RunView(view.reader, tip=view.path.nodes[depth].node).tracker().total(np.arange(len(view.clients)))
    rounds = [node.node for node in view.path.nodes[: depth + 1] if node.kind == "round"]
    found = np.zeros(len(view.clients))
    for client, total in view.reader.weighted_drifts(rounds):
        found[client] = total
    return found * view.facts.server_rate + view.path.rounding[depth] * (found > 0.0)


def most_expensive(view: RunView) -> str:
    """The name of the active client with the largest Psi at the current model: whom it costs most to forget now."""
    active = view.active
    return view.clients[int(active[np.argmax(influence(view, view.path.tip)[active])])].name
