"""What a forecast follows until it falls to its goal, what noise adds to it, and how that heals.

Recorded curves of a training, drawn on past their end, and how fast a disturbance fades.

The loss of the first training is known round by round. Past its end it is continued by a power law with a floor,

    f(n) = floor + (f(T) - floor) (n / T)^-p,

fitted to its last three quarters. The same curve says how fast training heals a disturbance: the share of the gain that
is still to come after k rounds, F(k) = (f(k) - floor) / (f(0) - floor), is how much of theta_0's distance to the
optimum is left after k rounds, seen through the loss. Noise is another such distance.

What a target asks for is accuracy, and near it the loss says little of it. The share of wrong predictions is a straight
line in log rounds and log errors, e(n) = e_T (n / T)^-p: fitted to the last two thirds, it smooths the curve (the round
that reaches a target first is a lucky one) and continues it.

How noise heals, from what the rehearsal measured: wrong predictions k rounds after noise of size sigma.

Noise of the rehearsed size s on the last model of the training, of T rounds, adds l_k to the loss after k rounds, k up
to K = 2 or 1 (`HealedNoise`). Noise of size sigma on the model of round c adds, k rounds later,

    (sigma / s)^2 l_k (f(c + k) / f(T + k))^q                       for k <= K,
    (sigma / s)^2 l_K (k / K)^-1/3 (f(c + k) / f(T + K))^q          after that,

with q = 2 for linear models, 6 for networks, and f the loss of the training itself, continued past its end
(`LearningCurve`). The power of k is that of a sum over directions of very unequal curvature: the steep ones heal first.
What is left matters less the farther training has come, as margins grow: f says how far that is. The exponents are the
only constants here (docs/noise.md says what they were chosen on). What two rehearsed rounds say of the first is mostly
the last of the few steepest directions, by which one noise differs from another. Loss becomes errors by the ratio of
the two, pooled over all measurements up to s, since one alone may be a few predictions; for as large a rise as the
largest noise makes, by the ratio there. The loss of a network is not quadratic far out, where noise can undo it for
good: beyond three times the largest noise that was rehearsed every prediction is taken to be wrong.

Where the end of training rehearsed rounds with noise, wrong predictions are followed and their harm is what was
measured (`Healing`). A run without such rounds (a training below 12 rounds, noise in training, clients
that did not answer alike, regression) is followed by its loss, more roughly:

    harm(sigma, k) = 1.8 rise(sigma) F(k),

with F(k) the share of a disturbance that k rounds of the first training leave (`LearningCurve.left`), and rise the
rehearsed rise of the loss; past T, on a model of c rounds, T / c times that, as margins grow. Where nothing was
rehearsed there is no prediction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sifu.run.rehearsal import HealedNoise, healed_noise, rehearsed_noises
from sifu.run.run_view import ACTIVE, RunView
from sifu.store.projection import EvaluationRow
from sifu.theory.arrays import Floats
from sifu.theory.history import PathNode

_FLOORS = 1.0 - np.geomspace(1.0, 0.005, 40)
"""Floors that are tried, as shares of the smallest loss of the fitted part."""
_USUAL_EXPONENT, _LEAST_EXPONENT = 0.3, 0.05
"""Of the errors, where there are too few points to tell, and where they hardly fall."""


@dataclass(frozen=True)
class LearningCurve:
    """Losses at rounds (both increasing in time, the first at round 0), with the fitted tail."""

    rounds: Floats
    losses: Floats
    floor: float
    exponent: float

    @staticmethod
    def fit(rounds: Sequence[int], losses: Sequence[float]) -> LearningCurve | None:
        """The curve through these points; None where there are too few, or nothing was learned."""
        n, y = np.asarray(rounds, dtype=np.float64), np.asarray(losses, dtype=np.float64)
        if n.size < 2 or n[-1] < 1.0 or not np.isfinite(y).all() or y.min() <= 0.0 or y[-1] >= y[0]:
            return None
        late = n >= max(1.0, n[-1] / 4.0)
        floor, exponent = _power_law(n[late], y[late])
        return LearningCurve(n, y, floor, exponent)

    @property
    def end(self) -> float:
        """T, the last round that was recorded."""
        return float(self.rounds[-1])

    @property
    def gain(self) -> float:
        """f(0) - floor: what there was to gain."""
        return float(self.losses[0]) - self.floor

    def loss(self, rounds: Floats | float) -> Floats:
        """f(n), recorded or continued."""
        n = np.asarray(rounds, dtype=np.float64)
        inside = np.interp(n, self.rounds, self.losses)
        tail = self.floor + (self.losses[-1] - self.floor) * (np.maximum(n, 1.0) / self.end) ** -self.exponent
        return np.where(n <= self.end, inside, tail)

    def left(self, rounds: Floats | float) -> Floats:
        """F(k): the share of a disturbance that k rounds leave, at most 1."""
        return np.clip((self.loss(rounds) - self.floor) / self.gain, 0.0, 1.0)


@dataclass(frozen=True)
class ErrorCurve:
    """The share of wrong predictions after n rounds, smoothed: `at_end` (n / end)^-`exponent`.

    `last` is the recorded one at the end, `scatter` the standard deviation of those recorded around the curve.
    """

    end: float
    at_end: float
    exponent: float
    last: float
    scatter: float

    @staticmethod
    def fit(rounds: Sequence[int], accuracies: Sequence[float], samples: int) -> ErrorCurve | None:
        """The curve nearest to these points; None where there are none, or nothing is ever right or wrong."""
        n, wrong = np.asarray(rounds, dtype=np.float64), 1.0 - np.asarray(accuracies, dtype=np.float64)
        if n.size < 2 or n[-1] < 1.0 or not np.isfinite(wrong).all() or wrong.min() >= 1.0 or samples < 1:
            return None
        late = n >= max(1.0, n[-1] / 3.0)
        x, y = np.log(n[late] / n[-1]), np.log(np.maximum(wrong[late], 0.5 / samples))
        slope = float(np.polyfit(x, y, 1)[0]) if x.size >= 3 else -_USUAL_EXPONENT
        exponent = max(-slope, _LEAST_EXPONENT)
        at_end = float(np.exp(np.mean(y + exponent * x)))
        scatter = float(np.std(wrong[late] - at_end * np.exp(-exponent * x)))
        return ErrorCurve(float(n[-1]), at_end, exponent, float(wrong[-1]), max(scatter, 1.0 / samples))

    def errors(self, rounds: Floats | float) -> Floats:
        """e(n)."""
        return self.at_end * (np.maximum(np.asarray(rounds, dtype=np.float64), 1.0) / self.end) ** -self.exponent


def _power_law(n: Floats, y: Floats) -> tuple[float, float]:
    """Floor and exponent of the power law nearest to the points; exponent 1/2 where they are too few to tell."""
    if n.size < 4:
        return 0.0, 0.5
    log_n, floors, losses = np.log(n), _FLOORS * y.min(), y[:, None]
    slopes, starts = np.polyfit(log_n, np.log(losses - floors), 1)
    errors = np.mean((np.exp(starts + slopes * log_n[:, None]) + floors - losses) ** 2, axis=0)
    best = int(np.argmin(errors))
    return float(floors[best]), max(-float(slopes[best]), 0.05)


class FirstTraining:
    """Rounds and evaluations of the first training, up to the round that reached `target`."""

    def __init__(self, view: RunView, target: float) -> None:
        self._reader, self._target = view.reader, target

    @cached_property
    def nodes(self) -> list[PathNode]:
        """Its nodes, in order."""
        nodes: list[PathNode] = self._reader.remembered(
            "first training",
            lambda: [
                row.node
                for row in self._reader.nodes_by_number().values()
                if row.node.branch == 0 and row.node.kind in ("initial", "merge", "round")
            ],
        )
        return nodes

    @cached_property
    def evaluations(self) -> list[EvaluationRow]:
        """Every evaluation of the run, rehearsals and later branches included."""
        rows: list[EvaluationRow] = self._reader.remembered("evaluations", self._reader.evaluations)
        return rows

    @cached_property
    def evaluated(self) -> dict[int, EvaluationRow]:
        """Evaluations on the active clients, by node."""
        return {row.node: row for row in self.evaluations if row.subset == ACTIVE}

    @cached_property
    def rehearsed(self) -> dict[float, tuple[EvaluationRow, EvaluationRow]]:
        """Evaluations of the same model with noise and without it, by sigma."""
        return {
            noise_std: (noised, self.evaluated[node])
            for node, noises in rehearsed_noises(self.evaluations).items()
            if node in self.evaluated
            for noise_std, noised in noises
        }

    @cached_property
    def _all_points(self) -> list[tuple[int, EvaluationRow]]:
        return [(row.position, self.evaluated[row.node]) for row in self.nodes if row.node in self.evaluated]

    @cached_property
    def rounds_to_target(self) -> int | None:
        """T: rounds until the target was reached; None if it never was, or there is none."""
        if self._target <= 0.0:
            return None
        return next((position for position, row in self._all_points if row.accuracy >= self._target), None)

    @cached_property
    def length(self) -> int:
        """T where the target was reached, else all its rounds: good enough to compare noises."""
        return max(1, self.nodes[-1].position if self.rounds_to_target is None else self.rounds_to_target)

    @cached_property
    def points(self) -> list[tuple[int, EvaluationRow]]:
        """(round, evaluation) until the target was reached."""
        return [(position, row) for position, row in self._all_points if position <= self.length]

    @cached_property
    def losses(self) -> LearningCurve | None:
        """The curve of the loss; None where it does not fall."""
        return LearningCurve.fit([at for at, _ in self.points], [row.loss for _, row in self.points])

    @cached_property
    def errors(self) -> ErrorCurve | None:
        """The curve of wrong predictions; None where accuracy tells nothing."""
        samples = self.points[-1][1].samples if self.points else 0
        return ErrorCurve.fit([at for at, _ in self.points], [row.accuracy for _, row in self.points], samples)


OF_ROUNDS = 1.0 / 3.0
OF_LOSS = {"linear": 2.0, "network": 6.0}
"""q: in a network most of what noise does is undone by what training continues to learn."""

FARTHEST = 3.0
"""Noise on a network is predicted up to this many times the largest that was rehearsed."""


@dataclass(frozen=True)
class Healing:
    """`losses` are what noise of `noise_std` adds after 0, 1, ... rounds, `training` is f; see above for the rest."""

    noise_std: float
    losses: tuple[float, ...]
    training: LearningCurve
    of_loss: float
    largest_noise: float
    errors_per_loss: float
    large_rise: float
    errors_per_large_loss: float

    @staticmethod
    def of(
        healed: HealedNoise | None,
        rises: Mapping[float, tuple[float, float]],
        samples: int,
        training: LearningCurve,
        linear: bool = True,
    ) -> Healing | None:
        """From the rehearsed rounds, and by sigma the rise of loss and errors before any; None if they do not tell."""
        if healed is None or healed.noise_std not in rises or min(loss for loss, _ in rises.values()) <= 0.0:
            return None
        at_once, _ = rises[healed.noise_std]
        small = [rise for noise_std, rise in rises.items() if noise_std <= healed.noise_std]
        small += zip(healed.losses, healed.errors, strict=True)
        loss, wrong = (sum(values) for values in zip(*small, strict=True))
        errors_per_loss = max(wrong, 0.5 / samples) / loss
        large_rise, large_wrong = rises[max(rises)]
        return Healing(
            healed.noise_std,
            (at_once, *healed.losses),
            training,
            OF_LOSS["linear" if linear else "network"],
            math.inf if linear else FARTHEST * max(rises),
            errors_per_loss,
            large_rise,
            max(large_wrong, 0.5 / samples) / large_rise,
        )

    def rise(self, noise_std: float, rounds: Floats, position: Floats) -> Floats:
        """How much the loss is still raised some rounds after noise of a size, now at `position`, c + k."""
        last = float(len(self.losses) - 1)
        rehearsed = np.interp(rounds, np.arange(last + 1.0), np.log(self.losses))
        slower = (np.maximum(rounds, last) / last) ** -OF_ROUNDS
        fallen = self.training.loss(position) / self.training.loss(self.training.end + np.minimum(rounds, last))
        return (noise_std / self.noise_std) ** 2 * np.exp(rehearsed) * slower * fallen**self.of_loss

    def errors(self, noise_std: float, rounds: Floats, position: Floats) -> Floats:
        """The share of predictions that are still wrong by it."""
        if noise_std == 0.0:
            return np.zeros_like(rounds)
        if noise_std > self.largest_noise:
            return np.ones_like(rounds)
        loss = self.rise(noise_std, rounds, position)
        near, far = math.log(self.losses[0]), math.log(self.large_rise)
        if far > near:
            ratio = np.interp(np.log(loss), [near, far], np.log([self.errors_per_loss, self.errors_per_large_loss]))
        else:
            ratio = np.full_like(loss, math.log(self.errors_per_loss))
        return np.minimum(1.0, np.exp(ratio) * loss)


HARM_OF_LOSS = 1.8
"""Noise heals more slowly than the distance of theta_0, by this factor."""
SPREAD_OF_LUCK, LARGEST_SPREAD = 0.53, 1.5
"""The standard deviation of luck for noise of the rehearsed size; it falls like 1 / sigma, up from the largest."""
SPREAD_OF_LAW = 0.3
"""How far the harm of a run's own noise lies off the law, whatever the size: added to that of luck in squares."""
SPREAD_UNREHEARSED = 0.7
"""The same, whatever the size, where no rounds were rehearsed."""


@dataclass(frozen=True)
class Measure:
    """What must fall to `goal`: the share of wrong predictions (`of_errors`), or the loss.

    `harm` is what noise of a size still adds to it after some rounds, at a position on the path; `spread` is the
    standard deviation of its luck, and `scatter` how far single evaluations lie around the curve.
    """

    of_errors: bool
    scatter: float
    curve: Callable[[Floats | float], Floats]
    goal: float
    harm: Callable[[float, Floats, Floats], Floats]
    spread: Callable[[float], float]


def measure_of(first: FirstTraining, target: float, linear: bool) -> Measure | None:
    """Wrong predictions where rounds were rehearsed, else the loss; None where neither tells anything."""
    return _measure_of_errors(first, target, linear) or _measure_of_loss(first)


def _measure_of_errors(first: FirstTraining, target: float, linear: bool) -> Measure | None:
    errors = first.errors
    if errors is None or first.losses is None:
        return None
    rises = {
        noise_std: (noised.loss - plain.loss, plain.accuracy - noised.accuracy)
        for noise_std, (noised, plain) in first.rehearsed.items()
    }
    samples = max((plain.samples for _, plain in first.rehearsed.values()), default=1)
    healing = Healing.of(healed_noise(first.evaluations), rises, samples, first.losses, linear)
    if healing is None:
        return None
    goal = errors.at_end
    if first.rounds_to_target is not None:
        # The round that came first to the target was lucky, and so will be the one that comes to it again.
        goal += (1.0 - target) - errors.last

    def spread(noise_std: float) -> float:
        """Luck along the slope grows like sigma, the mean harm like sigma^2."""
        if noise_std == 0.0:
            return 0.0
        return min(LARGEST_SPREAD, math.hypot(SPREAD_OF_LUCK * healing.noise_std / noise_std, SPREAD_OF_LAW))

    return Measure(True, errors.scatter, errors.errors, goal, healing.errors, spread)


def _measure_of_loss(first: FirstTraining) -> Measure | None:
    curve, rises = first.losses, rises_of_loss(first)
    if curve is None or not rises:
        return None

    def harm(noise_std: float, rounds: Floats, position: Floats) -> Floats:
        past_end = np.minimum(1.0, first.length / np.maximum(position - rounds, 1.0))
        return rise_of_loss(rises, noise_std) * HARM_OF_LOSS * curve.left(rounds) * past_end

    return Measure(False, 0.0, curve.loss, float(curve.loss(first.length)), harm, lambda _: SPREAD_UNREHEARSED)


def rises_of_loss(first: FirstTraining) -> dict[float, float]:
    """How much noise of each rehearsed size raised the loss before anything healed, where it did."""
    rises = {size: noised.loss - plain.loss for size, (noised, plain) in first.rehearsed.items()}
    return {size: rise for size, rise in sorted(rises.items()) if rise > 0.0}


def rise_of_loss(rises: dict[float, float], noise_std: float) -> float:
    """The rise of the loss at any size: between the rehearsed ones by its ratio to sigma^2, in logarithms."""
    if noise_std == 0.0:
        return 0.0
    sizes = [math.log(size) for size in rises]
    ratios = [math.log(rise / size**2) for size, rise in rises.items()]
    return float(np.exp(np.interp(math.log(noise_std), sizes, ratios))) * noise_std**2
