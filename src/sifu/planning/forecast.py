"""How many rounds a request would take: predicted from recorded scalars alone (docs/noise.md has the measurements).

A rollback to a model that c rounds made, with noise sigma, leaves that model and a disturbance. k rounds later the
model would have come to e(c + k), the share of wrong predictions on the recorded curve (`ErrorCurve`), and the
disturbance still makes harm(sigma, k) of the predictions wrong. The target is reached when both together are no worse
than where the curve was when it was reached the first time:

    e(c + k) + sum_j f_j harm(sigma_j, k + a_j)  <=  e(T).

The sum goes over the new noise (a = 0) and the noise edges on the way, a_j rounds old; c counts all rounds on the path.
New noise does harm times T / c past T, as margins grow. What harm is was measured by the rehearsal at the end of
training, before and after two rounds (`planning.noise_healing`). Runs of versions that rehearsed no rounds, and others
that could not, have harm = rise(sigma) H(k), rise from the rehearsal and H the geometric mean of two guesses. One is
what training leaves of any disturbance (`LearningCurve.left`, F): kappa F, kappa = 0.7, since the first round heals a
larger share of noise than of theta_0's distance. But where training is slow to begin (one class a client, a network), F
tells nothing of noise. The other is (1 + p k)^-0.55, p = 2.3 * 2 eta K tr(Hessian) / sqrt(d): how fast K steps of rate
eta heal noise by the curvature, which the rehearsal knows. All these constants are fitted (docs/noise.md).

f is the luck of the draw: noise of one size does more or less harm, with a standard deviation that falls like 1 / sigma
(0.7 where no rounds were rehearsed). And accuracy scatters around its curve. For new noise the equation is solved over
quantiles of both; their mean is the prediction, their tails its interval. For the noise of earlier requests f is known
once a retraining came to its target: what makes the equation hold at the current model. e(T) is that of everyone; the
change without those who leave is known from how each client stands at the current model (`sifu.store.client_accuracy`).

Where accuracy tells nothing (regression) or no rehearsal was recorded (older versions), the same is done with the
loss, kappa = 1.8; without a rehearsal rise is that of earlier noise edges, or

    rise = 0.15 (650 / d)^0.65 (f(0) - floor) sigma^2 d / ||theta_T - theta_0||^2.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sifu.core.request_terms import RequestTerms
from sifu.planning.learning_curve import ErrorCurve, LearningCurve
from sifu.planning.noise_healing import Healing
from sifu.record.rehearsal import healed_noise, rehearsed_noises
from sifu.record.run_view import ACTIVE, RunView
from sifu.store.client_accuracy import read_standing
from sifu.store.table_rows import EvaluationRow
from sifu.theory.arrays import Floats

HARM_OF_ERRORS, HARM_OF_LOSS = 0.7, 1.8
"""kappa."""
PACE, HEALING = 2.3, 0.55
"""By the curvature noise heals like (1 + p k)^-`HEALING`, with `PACE` in p."""
LUCK = np.array([statistics.NormalDist().inv_cdf((n + 0.5) / 15.0) for n in range(15)])
"""Quantiles of f - 1 in standard deviations, as likely one as the other."""
SPREAD_OF_LUCK, LARGEST_SPREAD = 0.53, 1.5
"""The standard deviation of f for noise of the rehearsed size; it falls like 1 / sigma, up from the largest."""
SPREAD_UNREHEARSED = 0.7
"""The same, whatever the size, where no rounds were rehearsed."""
SCATTER = np.array([statistics.NormalDist().inv_cdf((n + 0.5) / 5.0) for n in range(5)])
"""The same of where accuracy lies around its curve."""
MOST_LUCK = 3.0
"""f of earlier noise is believed up to this: few rounds tell it only roughly."""
RISE_UNMEASURED, RISE_EXPONENT, RISE_PARAMETERS = 0.15, 0.65, 650.0
TAIL = 0.1
"""The interval of a prediction leaves out this share on either side, by its own reckoning."""
SPREAD_KNOWN = 1.2
"""The interval is at least a prediction times this: other clients, and perhaps another initial model."""
WORTH_IT = 0.9
"""Predicted rounds must be below this share of Scratch's, or training starts again: exact, and no slower."""
LONGEST = 8.0
"""Rounds are looked for up to this many times those of the first training."""


@dataclass(frozen=True)
class Prediction:
    """Rounds to the target, and an interval around them."""

    rounds: int
    low: int
    high: int

    @staticmethod
    def of(times: Floats) -> Prediction:
        """From times that are all as likely; a round more or less is always possible."""
        mean = min(float(times.mean()), 1e9)
        low, high = min(float(np.quantile(times, TAIL)), 1e9), min(float(np.quantile(times, 1.0 - TAIL)), 1e9)
        return Prediction(
            max(1, round(mean)),
            max(1, math.floor(min(low, mean / SPREAD_KNOWN) - 0.5)),
            math.ceil(max(high, mean * SPREAD_KNOWN) + 0.5),
        )

    @property
    def interval(self) -> tuple[int, int]:
        """From the lowest to the highest."""
        return self.low, self.high


@dataclass(frozen=True)
class Measure:
    """What must fall to `level`: wrong predictions, or the loss.

    `harm` is what noise of a size still adds to it after some rounds, `spread` the standard deviation of its luck, and
    `scatter` how far what is measured lies around the curve.
    """

    of_errors: bool
    scatter: float
    curve: Callable[[Floats | float], Floats]
    level: float
    harm: Callable[[float, Floats], Floats]
    spread: Callable[[float], float]


class Forecast:
    """What a run's records say about restarting from its models with noise."""

    def __init__(self, view: RunView, terms: RequestTerms | None = None) -> None:
        self.view = view
        self._leaving = terms.clients if terms else ()
        asked = view.spec.stop.target if terms is None or terms.target is None else terms.target
        self._target = float(asked)

    @cached_property
    def _first(self) -> list[tuple[int, int, float]]:
        """(position, node, distance) along the first training."""
        found: list[tuple[int, int, float]] = self.view.reader.remembered("first training", self._find_first)
        return found

    def _find_first(self) -> list[tuple[int, int, float]]:
        return [
            (row.node.position, row.node.node, row.distance)
            for row in self.view.reader.nodes_by_number().values()
            if row.node.branch == 0 and row.node.kind in ("initial", "round")
        ]

    @cached_property
    def _rows(self) -> list[EvaluationRow]:
        found: list[EvaluationRow] = self.view.reader.remembered("evaluations", self.view.reader.evaluations)
        return found

    @cached_property
    def _evaluated(self) -> dict[int, EvaluationRow]:
        """Evaluations on the active clients, by node."""
        return {row.node: row for row in self._rows if row.subset == ACTIVE}

    @cached_property
    def _known(self) -> list[tuple[int, EvaluationRow]]:
        """(position, evaluation) along the first training until its target."""
        known = ((at, self._evaluated[node]) for at, node, _ in self._first if node in self._evaluated)
        return [(at, one) for at, one in known if at <= self._scale]

    @cached_property
    def training(self) -> int | None:
        """Rounds of the first training to the target; None if it was not reached, or there is none."""
        if self._target <= 0.0:
            return None
        known = ((at, self._evaluated[node]) for at, node, _ in self._first if node in self._evaluated)
        return next((at for at, one in known if one.accuracy >= self._target), None)

    @cached_property
    def _scale(self) -> int:
        """T where it is known, else all rounds of the first training: good enough to compare noises."""
        return max(1, self.training if self.training is not None else self._first[-1][0])

    @cached_property
    def curve(self) -> LearningCurve | None:
        """The learning curve of the first training until its target; None where it does not fall."""
        return LearningCurve.fit([at for at, _ in self._known], [one.loss for _, one in self._known])

    @cached_property
    def _errors(self) -> ErrorCurve | None:
        """Wrong predictions of the first training until its target."""
        samples = self._known[-1][1].samples if self._known else 0
        return ErrorCurve.fit([at for at, _ in self._known], [one.accuracy for _, one in self._known], samples)

    @cached_property
    def measure(self) -> Measure | None:
        """What is followed: wrong predictions where they can be, else the loss; None where it does not fall."""
        curve, errors = self.curve, self._errors
        if curve is None:
            return None
        if errors is None or not self._errors_a_loss[0].size:
            level = float(curve.loss(self._scale))
            return Measure(
                False,
                0.0,
                curve.loss,
                level,
                lambda noise, k: self.rise(noise) * HARM_OF_LOSS * curve.left(k),
                lambda _: SPREAD_UNREHEARSED,
            )
        level, target = errors.at_end, 1.0 - self._target
        if self.training is not None:
            # The round that came first to the target was lucky, and so will be the one that comes to it again.
            level += target - errors.last
        healing = self._healing
        if healing is not None:
            return Measure(True, errors.scatter, errors.errors, level, healing.errors, self._spread_of_luck)
        if self.training is not None:
            level = max(target, level)
        return Measure(
            True,
            errors.scatter,
            errors.errors,
            level,
            lambda noise, k: self.rise_of_errors(noise) * self._left_of_errors(k),
            lambda _: SPREAD_UNREHEARSED,
        )

    @cached_property
    def _healing(self) -> Healing | None:
        """How noise heals, where rounds were rehearsed."""
        rises = {
            sigma: (noised.loss - plain.loss, plain.accuracy - noised.accuracy)
            for sigma, (noised, plain) in self._rehearsed.items()
        }
        samples = max((plain.samples for _, plain in self._rehearsed.values()), default=1)
        return Healing.of(healed_noise(self._rows), rises, samples, float(self._scale))

    def _spread_of_luck(self, noise_std: float) -> float:
        """The standard deviation of f: its part along the slope grows like sigma, the mean harm like sigma^2."""
        assert self._healing is not None
        return min(LARGEST_SPREAD, SPREAD_OF_LUCK * self._healing.sigma / noise_std) if noise_std > 0.0 else 0.0

    def _left_of_errors(self, k: Floats) -> Floats:
        """The share of wrong predictions made by noise that k rounds leave."""
        assert self.curve is not None
        return np.sqrt(HARM_OF_ERRORS * self.curve.left(k) * (1.0 + self._pace * k) ** -HEALING)

    @cached_property
    def _pace(self) -> float:
        """p: how fast noise heals by the curvature. Small noise raises the loss by sigma^2 tr(H) / 2."""
        facts = self.view.facts
        steps = statistics.median(one.local_steps for one in self.view.clients)
        trace = 2.0 * float(np.exp(self._rises[1][0]))
        rate = facts.local_rate / (1.0 - facts.momentum)
        return PACE * 2.0 * rate * steps * trace / math.sqrt(self.view.parameters)

    @cached_property
    def _rehearsed(self) -> dict[float, tuple[EvaluationRow, EvaluationRow]]:
        """Evaluations with noise and without it, by sigma."""
        plain, found = self._evaluated, rehearsed_noises(self._rows).items()
        return {sigma: (row, plain[node]) for node, noises in found if node in plain for sigma, row in noises}

    @cached_property
    def _rises(self) -> tuple[Floats, Floats]:
        """log sigma and log(rise of the loss / sigma^2) where it was measured, by sigma."""
        found = {sigma: noised.loss - plain.loss for sigma, (noised, plain) in self._rehearsed.items()}
        measured = found or self._rises_of_edges()
        pairs = sorted((math.log(sigma), math.log(rise / sigma**2)) for sigma, rise in measured.items() if rise > 0.0)
        return np.array([one for one, _ in pairs]), np.array([one for _, one in pairs])

    @cached_property
    def _errors_a_loss(self) -> tuple[Floats, Floats]:
        """log sigma and log(rise of the errors / rise of the loss) of the rehearsal, by sigma."""
        pairs = sorted(
            (
                math.log(sigma),
                math.log(max(plain.accuracy - noised.accuracy, 0.5 / plain.samples) / (noised.loss - plain.loss)),
            )
            for sigma, (noised, plain) in self._rehearsed.items()
            if noised.loss > plain.loss
        )
        return np.array([one for one, _ in pairs]), np.array([one for _, one in pairs])

    def _rises_of_edges(self) -> dict[float, float]:
        """Rise of the loss at the noise edges so far, by sigma."""
        return {
            one.noise_std: self._evaluated[one.node].loss - self._evaluated[one.parent].loss
            for one in (row.node for row in self.view.reader.node_rows())
            if one.kind == "noise" and one.noise_std > 0.0 and one.node in self._evaluated
            if one.parent in self._evaluated
        }

    def rise_of_errors(self, noise_std: float) -> float:
        """How many more predictions noise of this size makes wrong, as a share, before anything heals."""
        if noise_std == 0.0:
            return 0.0
        return min(1.0, float(np.exp(np.interp(math.log(noise_std), *self._errors_a_loss))) * self.rise(noise_std))

    def rise(self, noise_std: float) -> float:
        """How much noise of this size raises the loss, before anything heals."""
        if noise_std == 0.0:
            return 0.0
        at, values = self._rises
        if at.size:
            return float(np.exp(np.interp(math.log(noise_std), at, values))) * noise_std**2
        size, way = self.view.parameters, self._first[-1][2]
        gain = self.curve.gain if self.curve else 1.0
        share = RISE_UNMEASURED * (RISE_PARAMETERS / size) ** RISE_EXPONENT
        return share * gain * noise_std**2 * size / way**2 if way > 0.0 else math.inf

    @cached_property
    def _ahead(self) -> Floats:
        """Numbers of rounds that are looked at: every one at first, then ever wider apart."""
        last = max(80.0, LONGEST * self._scale)
        return np.unique(np.round(np.concatenate([np.arange(1.0, 65.0), np.geomspace(64.0, last, 160)])))

    def edges(self, depth: int) -> list[tuple[float, int]]:
        """(sigma, age in rounds at `depth`) of the noise on the way to `depth`."""
        path = self.view.path
        depths, rounds, sigmas = path.added_noise
        count = int(np.searchsorted(depths, depth, side="right"))
        ages = path.rounds_until(depth) - rounds[:count]
        return list(zip(sigmas[:count].tolist(), ages.tolist(), strict=True))

    def _left(self, disturbed: Sequence[tuple[float, float]], k: Floats) -> Floats:
        """The harm of noise of some (sigma, age) k rounds later, summed."""
        measure = self.measure
        assert measure is not None
        total = np.zeros_like(k)
        # Sizes are on a ladder, so after a thousand requests there are a few of them, and many ages of each.
        for noise in dict.fromkeys(noise for noise, _ in disturbed):
            ages = np.array([age for one, age in disturbed if one == noise], dtype=np.float64)
            after = measure.harm(noise, (ages[:, None] + k).reshape(-1))
            total += after.reshape(ages.size, k.size).sum(axis=0)
        return total

    @cached_property
    def luck(self) -> float:
        """f of the noise on the way to the current model: known where it was retrained to the target, else 1."""
        tip, measure = self.view.path.tip, self.measure
        edges = self.edges(tip)
        now = self._evaluated.get(self.view.path.nodes[tip].node)
        if measure is None or now is None or not edges or edges[-1][1] == 0 or not now.accuracy >= self._target > 0.0:
            return 1.0
        gained = measure.level - float(measure.curve(float(self.view.path.rounds_until(tip))))
        own = gained / max(float(self._left(edges, np.zeros(1))[0]), 1e-300)
        return float(np.clip(own, 0.0, MOST_LUCK))

    def expected(self, depth: int, noise_std: float) -> float:
        """The expectation behind `predict`, also where no target was reached: for comparing noises."""
        return float(self.times(depth, noise_std).mean())

    @cached_property
    def gain(self) -> float:
        """How much larger the accuracy of the current model is when those who leave are no longer counted."""
        leaving = {self.view.index_of[name] for name in self._leaving}
        standing = read_standing(self.view.reader.folder) if leaving else None
        if standing is None or standing.node != self.view.rows[-1].node.node:
            return 0.0
        return standing.gain_without(leaving | self.view.waiting | self.view.forgotten)

    def times(self, depth: int, noise_std: float) -> Floats:
        """Rounds to the target, for each quantile of what is left to chance: scatter first, then luck."""
        new = [(noise_std, 0)] if noise_std > 0.0 else []
        if new and self.measure is None:
            return np.array([math.inf])
        return self._times_after(self.view.path.rounds_until(depth), [*self.edges(depth), *new])

    def expected_after(self, done: float, disturbed: Sequence[tuple[float, float]]) -> float:
        """Rounds to the target from a model of `done` rounds with noise of some (sigma, age) in it."""
        return float(self._times_after(done, disturbed).mean())

    def _times_after(self, done: float, disturbed: Sequence[tuple[float, float]]) -> Floats:
        """The same from a model of `done` rounds; new noise has age 0."""
        if not disturbed:
            return np.array([float(max(self._scale - done, 0))])
        measure = self.measure
        if measure is None:
            return np.array([math.inf])
        k = self._ahead
        known = measure.curve(done + k) + self.luck * self._left([one for one in disturbed if one[1] > 0], k)
        fresh = [one for one in disturbed if one[1] == 0]
        new = self._left(fresh, k) * min(1.0, self._scale / max(done, 1.0))
        luck = 1.0 + measure.spread(math.hypot(*(noise for noise, _ in fresh))) * LUCK
        levels = measure.level + (self.gain if measure.of_errors else 0.0) + measure.scatter * SCATTER
        reached = known + luck[:, None] * new <= levels[:, None, None]
        return np.where(reached.any(axis=2), k[np.argmax(reached, axis=2)], k[-1]).ravel()

    def predict(self, depth: int, noise_std: float) -> Prediction | None:
        """Rounds to the target after noise at `depth`; None where the first training never reached it."""
        if self.training is None:
            return None
        return Prediction.of(self._as_evaluated(self.times(depth, noise_std)))

    def _as_evaluated(self, times: Floats) -> Floats:
        """The first round at or after each time at which the stop rule looks."""
        stop = self.view.spec.stop
        return np.ceil(np.maximum(times, stop.min_rounds) / stop.evaluate_every) * stop.evaluate_every

    def scratch(self) -> Prediction | None:
        """Rounds of Scratch: what the first training took."""
        return None if self.training is None else Prediction.of(np.array([float(self.training)]))


def predicted_rounds(prediction: Prediction | None) -> int | None:
    """The rounds of a prediction, if there is one."""
    return None if prediction is None else prediction.rounds
