"""How many rounds a request would take: predicted from recorded scalars alone (docs/noise.md has the measurements).

A rollback to a model that c rounds made, with noise sigma, comes to the target after the k rounds at which

    e(c + k) + sum_j f_j harm(sigma_j, k + a_j)  <=  e(T) + gain,

the sum over the new noise (a = 0) and the noise edges on the way, a_j rounds old (the page explains every symbol, and
`planning.measure` defines e and harm). For new noise the equation is solved over quantiles of its luck f and of the
scatter of accuracy; for earlier noise f is known once a retraining came to its target: it is what makes the equation
hold at the current model. `gain` comes from the accuracy of each client there (`sifu.store.client_accuracy`).

How many common rounds a merge of groups needs to come back to the target (docs/theory.md, section 15).

The run has done it once: after the first merge of all S groups, moved on by the same factor as every later one, the
common phase took r rounds to the target, after R rounds apart. A request merges the share q of the groups that is left.
What those left out had learned must be learned again, by everyone together:

    rounds = r + c (1 - q) R,    c = 0.1,

never more than the R + r that a fresh model is given. A request that was carried out by groups before corrects it: the
median of what such requests took over what the formula says of them.

Budgets over a sequence of requests: what everyone forgotten has left, and how far the history still goes.

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
from functools import cached_property

import numpy as np

from sifu.core.request_terms import RequestTerms
from sifu.core.round_stream import evaluation_interval
from sifu.core.spec import LINEAR_KINDS
from sifu.planning.measure import FirstTraining, Measure, measure_of
from sifu.run.group_state import members_now
from sifu.run.run_view import RunView
from sifu.run.training import is_followed, track_everyone, with_earlier_names
from sifu.store.client_accuracy import read_standing
from sifu.store.reader import RunReader, plain_name, plain_names
from sifu.theory.arrays import Floats
from sifu.theory.rollback import Exposure, Subject, charge, is_covered

TAIL = 0.1
"""The interval of a prediction leaves out this share of its quantiles on either side."""
LEAST_WIDTH = 1.2
"""The interval reaches at least this factor either way: other clients, perhaps another initial model."""
LARGEST = 1e9


@dataclass(frozen=True)
class Prediction:
    """Rounds to the target, and an interval around them."""

    rounds: int
    interval: tuple[int, int]

    @staticmethod
    def of(times: Floats) -> Prediction:
        """From equally likely times; one round more or less is always possible."""
        mean, low, high = (
            min(float(value), LARGEST)
            for value in (times.mean(), np.quantile(times, TAIL), np.quantile(times, 1.0 - TAIL))
        )
        return Prediction(
            max(1, round(mean)),
            (
                max(1, math.floor(min(low, mean / LEAST_WIDTH) - 0.5)),
                math.ceil(max(high, mean * LEAST_WIDTH) + 0.5),
            ),
        )


LUCK = np.array([statistics.NormalDist().inv_cdf((n + 0.5) / 15.0) for n in range(15)])
"""Equally likely quantiles of f - 1, in standard deviations."""
SCATTER = np.array([statistics.NormalDist().inv_cdf((n + 0.5) / 5.0) for n in range(5)])
"""The same of where accuracy lies around its curve."""
MOST_LUCK = 3.0
"""f of earlier noise is believed up to this: few rounds tell it only roughly."""
WORTH_IT = 0.9
"""Predicted rounds must be below this share of Scratch's, or training starts again: exact, and no slower."""
LARGEST_CHANGE = math.log(2.0)
"""Rounds from the beginning at most double or halve by who leaves: a flat curve would say anything."""
LONGEST = 8.0
"""Rounds are looked for up to this many times those of the first training."""


class Forecast:
    """What a run's records say about restarting from its models with noise."""

    def __init__(self, view: RunView, terms: RequestTerms | None = None) -> None:
        self.view = view
        self._leaving = terms.clients if terms else ()
        target = view.spec.stop.target if terms is None or terms.target is None else terms.target
        self._target = float(target)
        self.first = FirstTraining(view, self._target)

    @property
    def training(self) -> int | None:
        """Rounds of the first training to the target; None if it was not reached, or there is none."""
        return self.first.rounds_to_target

    @cached_property
    def measure(self) -> Measure | None:
        """What is followed until it falls to its target; None where nothing falls."""
        model, regularity = self.view.spec.model.kind, self.view.spec.regularity.kind
        linear = model in LINEAR_KINDS or (model == "python" and regularity == "measured")
        return measure_of(self.first, self._target, linear)

    @cached_property
    def _ahead(self) -> Floats:
        """Numbers of rounds that are looked at: every one at first, then ever wider apart."""
        last = max(80.0, LONGEST * self.first.length)
        return np.unique(np.round(np.concatenate([np.arange(1.0, 65.0), np.geomspace(64.0, last, 160)])))

    def edges(self, depth: int) -> list[tuple[float, int]]:
        """(sigma, age in rounds at `depth`) of the noise on the way to `depth`."""
        path = self.view.path
        depths, rounds, sigmas = path.added_noise
        count = int(np.searchsorted(depths, depth, side="right"))
        ages = path.rounds_until(depth) - rounds[:count]
        return list(zip(sigmas[:count].tolist(), ages.tolist(), strict=True))

    @cached_property
    def luck(self) -> float:
        """f of the noise on the way to the current model: known where it was retrained to the target, else 1."""
        tip, measure = self.view.path.tip, self.measure
        edges = self.edges(tip)
        now = self.first.evaluated.get(self.view.path.nodes[tip].node)
        if measure is None or now is None or not edges or edges[-1][1] == 0 or not now.accuracy >= self._target > 0.0:
            return 1.0
        done = self.view.path.rounds_until(tip)
        gained = measure.goal - float(measure.curve(float(done)))
        own = gained / max(float(_harm_left(measure, edges, np.zeros(1), done)[0]), 1e-300)
        return float(np.clip(own, 0.0, MOST_LUCK))

    @cached_property
    def gain(self) -> float:
        """How much larger the accuracy of the current model is when those who leave are no longer counted."""
        leaving = {self.view.index_of[name] for name in self._leaving}
        standing = read_standing(self.view.reader.folder) if leaving else None
        if standing is None or standing.node != self.view.rows[-1].node.node:
            return 0.0
        return standing.gain_without(leaving | self.view.left_out | self.view.forgotten)

    @cached_property
    def _from_the_beginning(self) -> float:
        """Rounds from a fresh model to the target: T, and what the accuracy of those who leave changes about it."""
        length, errors, goal = float(self.first.length), self.first.errors, 1.0 - self._target
        if self.training is None or errors is None or goal + self.gain <= 0.0:
            return length
        # e(n) = e(T) (n / T)^-p has to come to another share of errors.
        change = math.log(max(goal, 1e-9) / (goal + self.gain)) / errors.exponent
        return length * math.exp(float(np.clip(change, -LARGEST_CHANGE, LARGEST_CHANGE)))

    def times(self, depth: int, noise_std: float) -> Floats:
        """Rounds to the target, for each quantile of what is left to chance: scatter first, then luck."""
        new = [(noise_std, 0)] if noise_std > 0.0 else []
        return self.times_after(self._rounds_done(depth), [*self.edges(depth), *new], self._unluckier(depth))

    def _unluckier(self, depth: int) -> float:
        """How much less lucky an earlier model is than the one whose evaluation was the first to reach the target.

        Training that continues from that model keeps its luck; from an earlier one it has no more than the curve.
        """
        measure, errors = self.measure, self.first.errors
        if measure is None or errors is None or not measure.of_errors or self.training is None:
            return 0.0
        return max(0.0, errors.at_end - errors.last) if self._rounds_done(depth) < self.first.length else 0.0

    def _rounds_done(self, depth: int) -> int:
        """Rounds behind the model at `depth`; those apart count where groups were merged on the way."""
        path, groups = self.view.path, self.view.spec.groups
        merged = groups.count > 0 and any(node.kind == "merge" for node in path.nodes[: depth + 1])
        return path.rounds_until(depth) + (groups.rounds if merged else 0)

    def expected(self, depth: int, noise_std: float) -> float:
        """The expectation behind `predict`, also where no target was reached: for comparing noises."""
        return float(self.times(depth, noise_std).mean())

    def times_after(self, done: float, disturbed: Sequence[tuple[float, float]], unluckier: float = 0.0) -> Floats:
        """Rounds to the target, for each quantile, from a model of `done` rounds with noise of some (sigma, age) in it.

        New noise has age 0.
        """
        if not disturbed:
            return np.array([max(self._from_the_beginning - done, 0.0)])
        measure = self.measure
        if measure is None:
            return np.array([math.inf])
        rounds = self._ahead
        earlier = [(noise, age) for noise, age in disturbed if age > 0]
        fresh = [(noise, age) for noise, age in disturbed if age == 0]
        without_new = measure.curve(done + rounds) + self.luck * _harm_left(measure, earlier, rounds, done)
        new = _harm_left(measure, fresh, rounds, done)
        # On an early model the same noise does more harm, but its luck is no larger: it may not make up for the model.
        usual = np.minimum(new, _harm_left(measure, fresh, rounds, self.first.length))
        luck = measure.spread(math.hypot(*(noise for noise, _ in fresh))) * LUCK
        goals = measure.goal - unluckier + (self.gain if measure.of_errors else 0.0) + measure.scatter * SCATTER
        reached = without_new + new + luck[:, None] * usual <= goals[:, None, None]
        times: Floats = np.where(reached.any(axis=2), rounds[np.argmax(reached, axis=2)], rounds[-1])
        return times.ravel()

    def predict(self, depth: int, noise_std: float) -> Prediction | None:
        """Rounds to the target after noise at `depth`; None where the first training says nothing of it."""
        times = self.times(depth, noise_std)
        if self.training is None or not np.isfinite(times).all():
            return None
        return Prediction.of(self._as_evaluated(times))

    def _as_evaluated(self, times: Floats) -> Floats:
        """The first round at or after each time at which the stop rule looks."""
        stop = self.view.spec.stop
        every = evaluation_interval(stop, stop.target)  # by then the accuracy is close to the target
        return np.ceil(np.maximum(times, stop.min_rounds) / every) * every

    def scratch(self) -> Prediction | None:
        """Rounds of Scratch: what the first training took, or more or fewer if those who leave did better or worse."""
        if self.training is None:
            return None
        return Prediction.of(self._as_evaluated(np.array([self._from_the_beginning])))


def _harm_left(measure: Measure, disturbed: Sequence[tuple[float, float]], rounds: Floats, done: float) -> Floats:
    """The harm of noise of some (sigma, age), summed, after a number of further rounds from a model of `done`."""
    total = np.zeros_like(rounds)
    position = done + rounds
    # Sizes are on a ladder, so after a thousand requests there are a few of them, and many ages of each.
    for noise in dict.fromkeys(noise for noise, _ in disturbed):
        ages = np.array([age for size, age in disturbed if size == noise], dtype=np.float64)
        after = measure.harm(noise, (ages[:, None] + rounds).reshape(-1), np.tile(position, ages.size))
        total += after.reshape(ages.size, rounds.size).sum(axis=0)
    return total


LEARNED_AGAIN = 0.1
"""c: a common round is worth about ten of those apart that the left-out groups had done."""
WIDTH = 2.0
"""The interval reaches this factor either way, and a round: merges scatter (22 and 46 rounds for two seeds)."""


def healing_rounds(common: float, apart: float, share_left: float) -> float:
    """Rounds after a merge of a share of the groups.

    >>> healing_rounds(10.0, 100.0, 0.9), healing_rounds(10.0, 100.0, 0.5)
    (11.0, 15.0)
    """
    return min(common + LEARNED_AGAIN * (1.0 - share_left) * apart, common + apart)


def predict_healing(view: RunView, forecast: Forecast, merged: int) -> tuple[float, Prediction | None]:
    """Common rounds after a merge of this many groups: what is expected, and a prediction where there was a target."""
    apart, count = view.spec.groups.rounds, view.spec.groups.count
    common = max(0.0, float(forecast.first.length - apart))
    expected = healing_rounds(common, apart, merged / count) * _correction(view.reader, common, apart, count)
    if forecast.training is None:
        return expected, None
    interval = max(0, math.floor(expected / WIDTH - 1.0)), math.ceil(expected * WIDTH + 1.0)
    return expected, Prediction(round(expected), interval)


def _correction(reader: RunReader, common: float, apart: float, count: int) -> float:
    """What earlier requests by groups took over what was to be expected; 1 where there were none."""
    nodes = reader.nodes_by_number()
    parts: dict[int, int] = {}
    for row in reader.merges():
        parts[row.node] = parts.get(row.node, 0) + 1
    ratios: Sequence[float] = [
        (nodes[request.final_node].node.position + 1.0)
        / (healing_rounds(common, apart, parts[request.noise_node] / count) + 1.0)
        for request in reader.requests()
        if request.noise_node in parts and request.final_node is not None
    ]
    return statistics.median(ratios) if ratios else 1.0


def rebuild_client_rounds(view: RunView, hit: Sequence[int], leaving: set[int]) -> int:
    """Client-rounds of building the hit groups again without those who leave; none where the spec wants none back."""
    if not hit or view.spec.groups.rebuild == "never":
        return 0
    members = members_now(view)
    return sum(len(set(members[group]) - leaving) for group in hit) * view.spec.groups.rounds


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
