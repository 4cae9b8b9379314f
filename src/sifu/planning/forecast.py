"""Forecasts of the rounds a request would take, from recorded scalars alone (docs/noise.md has the measurements).

**Rollback with noise.** Training from a model of c rounds, with noise sigma added, reaches the target after the first k
rounds for which

    e(c + k) + sum_j f_j harm(sigma_j, k + a_j)  <=  e(T) + gain.

The sum runs over the new noise (age a = 0) and the earlier noise on the path, a_j rounds old. docs/noise.md explains
every symbol; `planning.measure` defines e and harm. f is the harm of one draw of noise, relative to the mean harm. For
new noise, the equation is solved for quantiles of f and of the scatter of accuracy. For earlier noise, f is known once
retraining has reached the target: it is the value that makes the equation hold at the current model. `gain` follows
from the accuracy of each client at the current model (`sifu.store.client_accuracy`).

**Merging groups** (docs/theory.md, section 15). The first merge of all S groups gives the reference: after R separate
rounds, the common phase took r rounds to the target. A request merges only the share q of the groups that remains, and
the common phase must relearn what the other groups had learned:

    rounds = r + c (1 - q) R,    c = 0.1,

and never more than R + r, the cost of a fresh model. Earlier group requests correct this prediction by the median ratio
of their actual to their predicted rounds.
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
from sifu.store.client_accuracy import read_standing
from sifu.store.reader import RunReader
from sifu.theory.arrays import Floats

TAIL = 0.1
"""Share of the quantiles that a prediction interval leaves out on either side."""
LEAST_WIDTH = 1.2
"""Smallest factor by which an interval extends either way. Retraining has other participants, so it exceeds 1."""
LARGEST = 1e9


@dataclass(frozen=True)
class Prediction:
    """Rounds to the target, with an interval around them."""

    rounds: int
    interval: tuple[int, int]

    @staticmethod
    def of(times: Floats) -> Prediction:
        """Return the prediction from equally likely times. Its interval extends at least half a round either way."""
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
"""Equally likely quantiles of f - 1 (see the module's docstring), in standard deviations."""
SCATTER = np.array([statistics.NormalDist().inv_cdf((n + 0.5) / 5.0) for n in range(5)])
"""Equally likely quantiles of the deviation of accuracy from its curve, in standard deviations."""
MOST_LUCK = 3.0
"""Upper bound on the estimated f of earlier noise: a few rounds determine it only roughly."""
WORTH_IT = 0.9
"""Largest share of Scratch's rounds for which noise is worthwhile; beyond it, Scratch is exact and hardly slower."""
LARGEST_CHANGE = math.log(2.0)
"""Bound on the change of log(Scratch's rounds) due to leaving clients; a flat curve would allow any value."""
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
        """Rounds of the first training to the target, or None if the target was not reached, or no target is set."""
        return self.first.rounds_to_target

    @cached_property
    def measure(self) -> Measure | None:
        """Quantity that training must bring down to a goal, or None if no recorded quantity falls."""
        model, regularity = self.view.spec.model.kind, self.view.spec.regularity.kind
        linear = model in LINEAR_KINDS or (model == "python" and regularity == "measured")
        return measure_of(self.first, self._target, linear)

    @cached_property
    def _ahead(self) -> Floats:
        """Candidate numbers of rounds: every integer up to 64, then integers with growing gaps."""
        last = max(80.0, LONGEST * self.first.length)
        return np.unique(np.round(np.concatenate([np.arange(1.0, 65.0), np.geomspace(64.0, last, 160)])))

    def edges(self, depth: int) -> list[tuple[float, int]]:
        """Return (sigma, age in rounds at `depth`) of each addition of noise on the path to `depth`."""
        path = self.view.path
        depths, rounds, sigmas = path.added_noise
        count = int(np.searchsorted(depths, depth, side="right"))
        ages = path.rounds_until(depth) - rounds[:count]
        return list(zip(sigmas[:count].tolist(), ages.tolist(), strict=True))

    @cached_property
    def luck(self) -> float:
        """Relative harm f of the noise on the path to the current model, or 1 if the target was not reached again."""
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
        """Increase in the current model's accuracy when the leaving clients are no longer counted."""
        leaving = {self.view.index_of[name] for name in self._leaving}
        standing = read_standing(self.view.reader.folder) if leaving else None
        if standing is None or standing.node != self.view.nodes[-1].node:
            return 0.0
        return standing.gain_without(leaving | self.view.left_out | self.view.forgotten)

    @cached_property
    def _from_the_beginning(self) -> float:
        """Rounds from a fresh model to the target: the first training's rounds, adjusted for leaving clients."""
        length, errors, goal = float(self.first.length), self.first.errors, 1.0 - self._target
        if self.training is None or errors is None or goal + self.gain <= 0.0:
            return length
        # Solve e(n) = e(T) (n / T)^-p for the adjusted share of errors.
        change = math.log(max(goal, 1e-9) / (goal + self.gain)) / errors.exponent
        return length * math.exp(float(np.clip(change, -LARGEST_CHANGE, LARGEST_CHANGE)))

    def times(self, depth: int, noise_std: float) -> Floats:
        """Return the rounds to the target for each pair of quantiles, by the quantile of scatter and then of f."""
        new = [(noise_std, 0)] if noise_std > 0.0 else []
        return self.times_after(self._rounds_done(depth), [*self.edges(depth), *new], self._unluckier(depth))

    def _unluckier(self, depth: int) -> float:
        """Return the excess of the error curve at T over the recorded error at T, or 0 for a model of round T or later.

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
        """Return the mean of `times`, even if no target was reached, to compare noise sizes."""
        return float(self.times(depth, noise_std).mean())

    def times_after(self, done: float, disturbed: Sequence[tuple[float, float]], unluckier: float = 0.0) -> Floats:
        """Return the rounds to the target from a model with noise, one value for each pair of quantiles (see `times`).

        Args:
            done: Number of rounds that led to the model.
            disturbed: (sigma, age in rounds) of each addition of noise; new noise has age 0.
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
        # The same noise does more harm to an early model. The random part of the harm is capped at its size on the
        # trained model; otherwise a lucky draw could make an early start look good.
        usual = np.minimum(new, _harm_left(measure, fresh, rounds, self.first.length))
        luck = measure.spread(math.hypot(*(noise for noise, _ in fresh))) * LUCK
        goals = measure.goal - unluckier + (self.gain if measure.of_errors else 0.0) + measure.scatter * SCATTER
        reached = without_new + new + luck[:, None] * usual <= goals[:, None, None]
        times: Floats = np.where(reached.any(axis=2), rounds[np.argmax(reached, axis=2)], rounds[-1])
        return times.ravel()

    def predict(self, depth: int, noise_std: float) -> Prediction | None:
        """Return the predicted rounds to the target after noise at `depth`, or None if they cannot be predicted."""
        times = self.times(depth, noise_std)
        if self.training is None or not np.isfinite(times).all():
            return None
        return Prediction.of(self._as_evaluated(times))

    def _as_evaluated(self, times: Floats) -> Floats:
        """Return the times, each rounded up to the next round that the stop rule evaluates."""
        stop = self.view.spec.stop
        every = evaluation_interval(stop, stop.target)  # interval used near the target
        return np.ceil(np.maximum(times, stop.min_rounds) / every) * every

    def scratch(self) -> Prediction | None:
        """Return the predicted rounds of Scratch, or None if the first training did not reach the target."""
        if self.training is None:
            return None
        return Prediction.of(self._as_evaluated(np.array([self._from_the_beginning])))


def _harm_left(measure: Measure, disturbed: Sequence[tuple[float, float]], rounds: Floats, done: float) -> Floats:
    """Return the total harm of the noise in `disturbed` after each number of further `rounds` (see `times_after`)."""
    total = np.zeros_like(rounds)
    position = done + rounds
    # Noise sizes are powers of `SIGMA_LADDER`, so after a thousand requests there are few sizes, each with many ages.
    for noise in dict.fromkeys(noise for noise, _ in disturbed):
        ages = np.array([age for size, age in disturbed if size == noise], dtype=np.float64)
        after = measure.harm(noise, (ages[:, None] + rounds).reshape(-1), np.tile(position, ages.size))
        total += after.reshape(ages.size, rounds.size).sum(axis=0)
    return total


LEARNED_AGAIN = 0.1
"""Constant c of the formula for merges: one common round relearns about ten separate rounds of the dropped groups."""
WIDTH = 2.0
"""Factor by which the interval extends either way, plus one round; two seeds of one merge took 22 and 46 rounds."""


def recovery_rounds(common: float, separate: float, share_left: float) -> float:
    """Return the expected common rounds after a merge of the share `share_left` of the groups.

    >>> recovery_rounds(10.0, 100.0, 0.9), recovery_rounds(10.0, 100.0, 0.5)
    (11.0, 15.0)
    """
    return min(common + LEARNED_AGAIN * (1.0 - share_left) * separate, common + separate)


def predict_recovery(view: RunView, forecast: Forecast, merged: int) -> tuple[float, Prediction | None]:
    """Predict the common rounds after a merge of `merged` groups.

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
    """Return the median ratio of actual to predicted rounds over earlier group requests, or 1 if there are none."""
    nodes = reader.nodes_by_number()
    parts: dict[int, int] = {}
    for row in reader.merges():
        parts[row.node] = parts.get(row.node, 0) + 1
    ratios: Sequence[float] = [
        (nodes[request.final_node].position + 1.0)
        / (recovery_rounds(common, separate, parts[request.noise_node] / count) + 1.0)
        for request in reader.requests()
        if request.noise_node in parts and request.final_node is not None
    ]
    return statistics.median(ratios) if ratios else 1.0


def rebuild_client_rounds(view: RunView, hit: Sequence[int], leaving: set[int]) -> int:
    """Return the number of participants, summed over rounds, for rebuilding the groups `hit` without `leaving`.

    The result is 0 if the spec never rebuilds groups.
    """
    if not hit or view.spec.groups.rebuild == "never":
        return 0
    members = members_now(view)
    return sum(len(set(members[group]) - leaving) for group in hit) * view.spec.groups.rounds
