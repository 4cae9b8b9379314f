"""Forecasts of the rounds a request would take, from recorded scalars alone (docs/noise.md has the measurements).

**Rollback with noise.** Training from a model of c rounds, with noise sigma added, reaches the target after the first k
rounds for which

    e(c + k) + sum_j f_j harm(sigma_j, k + a_j)  <=  e(T) + gain.

The sum runs over the new noise (age a = 0) and the earlier noise on the path, a_j rounds old. docs/noise.md explains
every symbol; `planning.measure` defines e and harm. f is the luck of a noise: its actual harm relative to the mean. For
new noise the equation is solved over quantiles of f and of the scatter of accuracy. For earlier noise f is known once
retraining has reached the target: it is the value that makes the equation hold at the current model. `gain` follows
from the accuracy of each client at the current model (`sifu.store.client_accuracy`).

**Merging groups** (docs/theory.md, section 15). The first merge of all S groups gives the reference: after R separate
rounds, the common phase took r rounds to the target. A request merges only the share q of the groups that remains, and
the common phase must relearn what the other groups had learned:

    rounds = r + c (1 - q) R,    c = 0.1,

and never more than R + r, the cost of a fresh model. Earlier group requests correct this prediction by the median ratio
of their actual to their predicted rounds.

**Budgets over a sequence of requests.** A later request that starts after an earlier noise edge charges nothing to the
subjects which that edge covers (docs/theory.md, section 8.2). If a request must roll back to before the edge, these
subjects have little or no budget left, so the rollback often ends at the initial model, which is as slow as Scratch.
The outlook therefore counts the active clients that the noise of the last edge would hide at its source:

    s Psi(n, f) <= sigma sqrt(1 - reserve)       for client f at the edge's source n.

If clients ask in random order, N are active and B of them do not satisfy this condition, then on average
(N - B) / (B + 1) clients ask before the first of the B. This holds for a *fixed* sigma. With `auto`, every request uses
the noise it needs at the current model, so none has to roll back further. But noise accumulates and Psi grows, so
requests become slower. The number of worthwhile requests is found by running the forecast ahead, one request of the
usual size after another.
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
"""Share of the quantiles that a prediction interval leaves out on either side."""
LEAST_WIDTH = 1.2
"""Smallest factor by which the interval extends either way: the clients and perhaps the initial model differ."""
LARGEST = 1e9


@dataclass(frozen=True)
class Prediction:
    """Rounds to the target, with an interval around them."""

    rounds: int
    interval: tuple[int, int]

    @staticmethod
    def of(times: Floats) -> Prediction:
        """Return the prediction from equally likely times; the interval extends by at least half a round either way."""
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
"""Equally likely quantiles of the deviation of accuracy from its curve, in standard deviations."""
MOST_LUCK = 3.0
"""Upper bound on the estimated f of earlier noise: a few rounds determine it only roughly."""
WORTH_IT = 0.9
"""Largest worthwhile share of Scratch's rounds; above it, training restarts, which is exact and hardly slower."""
LARGEST_CHANGE = math.log(2.0)
"""Largest change of the logarithm of Scratch's rounds due to leaving clients; a flat curve could give any value."""
LONGEST = 8.0
"""Search range for rounds, as a multiple of the rounds of the first training."""


class Forecast:
    """Forecast of training that restarts from one of the run's models with noise."""

    def __init__(self, view: RunView, terms: RequestTerms | None = None) -> None:
        self.view = view
        self._leaving = terms.clients if terms else ()
        target = view.spec.stop.target if terms is None or terms.target is None else terms.target
        self._target = float(target)
        self.first = FirstTraining(view, self._target)

    @property
    def training(self) -> int | None:
        """Rounds of the first training to the target; None if the target was not reached, or there is none."""
        return self.first.rounds_to_target

    @cached_property
    def measure(self) -> Measure | None:
        """Quantity that training must bring down to a goal; None if no recorded quantity falls."""
        model, regularity = self.view.spec.model.kind, self.view.spec.regularity.kind
        linear = model in LINEAR_KINDS or (model == "python" and regularity == "measured")
        return measure_of(self.first, self._target, linear)

    @cached_property
    def _ahead(self) -> Floats:
        """Candidate numbers of rounds: every integer at first, then with growing gaps."""
        last = max(80.0, LONGEST * self.first.length)
        return np.unique(np.round(np.concatenate([np.arange(1.0, 65.0), np.geomspace(64.0, last, 160)])))

    def edges(self, depth: int) -> list[tuple[float, int]]:
        """Return (sigma, age in rounds at `depth`) of each noise on the path to `depth`."""
        path = self.view.path
        depths, rounds, sigmas = path.added_noise
        count = int(np.searchsorted(depths, depth, side="right"))
        ages = path.rounds_until(depth) - rounds[:count]
        return list(zip(sigmas[:count].tolist(), ages.tolist(), strict=True))

    @cached_property
    def luck(self) -> float:
        """Luck f of the noise on the path to the current model; 1 if retraining has not reached the target."""
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
        """Increase of the current model's accuracy when the leaving clients are no longer counted."""
        leaving = {self.view.index_of[name] for name in self._leaving}
        standing = read_standing(self.view.reader.folder) if leaving else None
        if standing is None or standing.node != self.view.rows[-1].node.node:
            return 0.0
        return standing.gain_without(leaving | self.view.left_out | self.view.forgotten)

    @cached_property
    def _from_the_beginning(self) -> float:
        """Rounds from a fresh model to the target: the first training's, adjusted for the clients that leave."""
        length, errors, goal = float(self.first.length), self.first.errors, 1.0 - self._target
        if self.training is None or errors is None or goal + self.gain <= 0.0:
            return length
        # Solve e(n) = e(T) (n / T)^-p for the adjusted share of errors.
        change = math.log(max(goal, 1e-9) / (goal + self.gain)) / errors.exponent
        return length * math.exp(float(np.clip(change, -LARGEST_CHANGE, LARGEST_CHANGE)))

    def times(self, depth: int, noise_std: float) -> Floats:
        """Return the rounds to the target for each quantile of scatter and, within it, of luck."""
        new = [(noise_std, 0)] if noise_std > 0.0 else []
        return self.times_after(self._rounds_done(depth), [*self.edges(depth), *new], self._unluckier(depth))

    def _unluckier(self, depth: int) -> float:
        """Return the excess of the error curve at T over the recorded error at T, for models before round T.

        The evaluation that first reached the target was better than the curve. Training that continues from that model
        keeps this advantage; training from an earlier model is expected to follow the curve.
        """
        measure, errors = self.measure, self.first.errors
        if measure is None or errors is None or not measure.of_errors or self.training is None:
            return 0.0
        return max(0.0, errors.at_end - errors.last) if self._rounds_done(depth) < self.first.length else 0.0

    def _rounds_done(self, depth: int) -> int:
        """Return the number of rounds up to the model at `depth`, including groups' separate rounds before a merge."""
        path, groups = self.view.path, self.view.spec.groups
        merged = groups.count > 0 and any(node.kind == "merge" for node in path.nodes[: depth + 1])
        return path.rounds_until(depth) + (groups.rounds if merged else 0)

    def expected(self, depth: int, noise_std: float) -> float:
        """Return the expected rounds, even if no target was reached; used to compare noise sizes."""
        return float(self.times(depth, noise_std).mean())

    def times_after(self, done: float, disturbed: Sequence[tuple[float, float]], unluckier: float = 0.0) -> Floats:
        """Return the rounds to the target from a model with noise, one value for each quantile of scatter and luck.

        Args:
            done: Number of rounds that led to the model.
            disturbed: (sigma, age in rounds) of each noise in the model; new noise has age 0.
            unluckier: Amount by which the goal is lowered (see `_unluckier`).
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
        # The same noise does more harm to an early model. The random part of the harm is limited to its size on the
        # trained model: otherwise a favourable draw could compensate for an early model.
        usual = np.minimum(new, _harm_left(measure, fresh, rounds, self.first.length))
        luck = measure.spread(math.hypot(*(noise for noise, _ in fresh))) * LUCK
        goals = measure.goal - unluckier + (self.gain if measure.of_errors else 0.0) + measure.scatter * SCATTER
        reached = without_new + new + luck[:, None] * usual <= goals[:, None, None]
        times: Floats = np.where(reached.any(axis=2), rounds[np.argmax(reached, axis=2)], rounds[-1])
        return times.ravel()

    def predict(self, depth: int, noise_std: float) -> Prediction | None:
        """Return the predicted rounds to the target after noise at `depth`; None if they cannot be predicted."""
        times = self.times(depth, noise_std)
        if self.training is None or not np.isfinite(times).all():
            return None
        return Prediction.of(self._as_evaluated(times))

    def _as_evaluated(self, times: Floats) -> Floats:
        """Return, for each time, the first round at or after it that the stop rule evaluates."""
        stop = self.view.spec.stop
        every = evaluation_interval(stop, stop.target)  # near the target, the interval of the target applies
        return np.ceil(np.maximum(times, stop.min_rounds) / every) * every

    def scratch(self) -> Prediction | None:
        """Return the predicted rounds of Scratch: the first training's, adjusted for the clients that leave."""
        if self.training is None:
            return None
        return Prediction.of(self._as_evaluated(np.array([self._from_the_beginning])))


def _harm_left(measure: Measure, disturbed: Sequence[tuple[float, float]], rounds: Floats, done: float) -> Floats:
    """Return the summed harm of noise after each number of further rounds.

    Args:
        measure: Quantity that the harm adds to.
        disturbed: (sigma, age in rounds) of each noise.
        rounds: Numbers of further rounds.
        done: Number of rounds that led to the model.
    """
    total = np.zeros_like(rounds)
    position = done + rounds
    # Noise sizes are powers of `SIGMA_LADDER`, so after a thousand requests there are few sizes, each with many ages.
    for noise in dict.fromkeys(noise for noise, _ in disturbed):
        ages = np.array([age for size, age in disturbed if size == noise], dtype=np.float64)
        after = measure.harm(noise, (ages[:, None] + rounds).reshape(-1), np.tile(position, ages.size))
        total += after.reshape(ages.size, rounds.size).sum(axis=0)
    return total


LEARNED_AGAIN = 0.1
"""Constant c of the formula for merges: one common round replaces about ten separate rounds of excluded groups."""
WIDTH = 2.0
"""Factor by which the interval extends either way, plus one round: merges vary (22 and 46 rounds for two seeds)."""


def recovery_rounds(common: float, separate: float, share_left: float) -> float:
    """Return the rounds after a merge of a share of the groups.

    >>> recovery_rounds(10.0, 100.0, 0.9), recovery_rounds(10.0, 100.0, 0.5)
    (11.0, 15.0)
    """
    return min(common + LEARNED_AGAIN * (1.0 - share_left) * separate, common + separate)


def predict_recovery(view: RunView, forecast: Forecast, merged: int) -> tuple[float, Prediction | None]:
    """Return the common rounds after a merge of `merged` groups.

    Returns:
        The expected rounds, and a prediction with an interval, or None if no target was reached.
    """
    separate, count = view.spec.groups.rounds, view.spec.groups.count
    common = max(0.0, float(forecast.first.length - separate))
    expected = recovery_rounds(common, separate, merged / count) * _correction(view.reader, common, separate, count)
    if forecast.training is None:
        return expected, None
    interval = max(0, math.floor(expected / WIDTH - 1.0)), math.ceil(expected * WIDTH + 1.0)
    return expected, Prediction(round(expected), interval)


def _correction(reader: RunReader, common: float, separate: float, count: int) -> float:
    """Return the median ratio of actual to predicted rounds over earlier group requests; 1 if there are none."""
    nodes = reader.nodes_by_number()
    parts: dict[int, int] = {}
    for row in reader.merges():
        parts[row.node] = parts.get(row.node, 0) + 1
    ratios: Sequence[float] = [
        (nodes[request.final_node].node.position + 1.0)
        / (recovery_rounds(common, separate, parts[request.noise_node] / count) + 1.0)
        for request in reader.requests()
        if request.noise_node in parts and request.final_node is not None
    ]
    return statistics.median(ratios) if ratios else 1.0


def rebuild_client_rounds(view: RunView, hit: Sequence[int], leaving: set[int]) -> int:
    """Return the client-rounds of rebuilding the groups `hit` without `leaving`; 0 if the spec rebuilds none."""
    if not hit or view.spec.groups.rebuild == "never":
        return 0
    members = members_now(view)
    return sum(len(set(members[group]) - leaving) for group in hit) * view.spec.groups.rounds


LOOK_AHEAD = 50


@dataclass(frozen=True)
class BudgetLine:
    """Budget of a subject forgotten earlier: used so far, the cost of a plan, and the remainder.

    Budgets are counted in (Psi/sigma)^2; `budget` is 1/s^2. `covered` means that earlier noise already hides the
    subject at the plan's source, so that the plan costs it nothing.
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
    """Number of later requests that can start after the last noise edge, where all forgotten clients are covered.

    Attributes:
        noise_std: Noise of the edge.
        active: Number of active clients.
        fitting: Number of active clients that the noise of the edge would hide.
        usual_size: Number of clients in a request of the usual size.
        expected_requests: Mean number of such requests, in random order and with the same sigma, before one must roll
            back to before the edge.
        auto_requests: Predicted number of further requests that are faster than Scratch if each adds the noise it
            needs, at most `LOOK_AHEAD`; None if nothing can be predicted.
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
    """Return the outlook after an edge of this noise at `depth`; None if there is no noise.

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

    The largest of `size` randomly chosen values of `needed` lies at about the quantile size / (size + 1). Along the
    path it grows like a power of the rounds, with the exponent that the kept models show.

    Args:
        view: View of the run.
        depth: Depth of the model that the noise is added to.
        noise_std: Noise of the current request.
        needed: Noise that each active client needs at `depth`, in increasing order.
        size: Number of clients in a request.
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
    """Return the exponent a of Psi(n) ~ n^a, from the largest Psi at the kept models of the second half of the path."""
    here, rounds = view.kept.get(depth), view.path.rounds_until(depth)
    for earlier in sorted(view.kept):
        before = view.path.rounds_until(earlier)
        if here is not None and before >= rounds / 2.0 and before < rounds and view.kept[earlier].psi_max > 0.0:
            ratio = here.psi_max / view.kept[earlier].psi_max
            return max(0.0, math.log(ratio) / math.log(rounds / before)) if ratio > 0.0 else 0.5
    return 0.5


def outlook_now(view: RunView, terms: RequestTerms) -> Outlook | None:
    """Return the outlook for the last noise edge of the current history; None if there is none."""
    edges = view.path.added_noise[0].tolist()
    return outlook(view, edges[-1], view.path.nodes[edges[-1]].noise_std, terms) if edges else None


def influence(view: RunView, depth: int) -> Floats:
    """Return Psi(depth, c) of every client c, for forecasts; the database sums it if L = 1 everywhere."""
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
