"""Quantities that training must bring down to a goal, the harm that noise does to them, and their recovery.

**Learning curves.** The loss of the first training is known round by round. Beyond its end, the curve is extrapolated
by a power law with a floor,

    f(n) = floor + (f(T) - floor) (n / T)^-p,

fitted to the last three quarters of the rounds. The same curve shows how fast training undoes a disturbance. The share
of the gain still to come after k rounds, F(k) = (f(k) - floor) / (f(0) - floor), measures how much of theta_0's
distance to the optimum is left after k rounds. The distance that noise adds is assumed to shrink in the same way.

A target is an accuracy, and close to the target the loss is a poor predictor of accuracy. The share of wrong
predictions follows a power law, e(n) = e_T (n / T)^-p. It is fitted to the last two thirds of the rounds, and both
extrapolates and smooths the curve, since the first round that reaches a target does so partly by chance.

**Harm of noise, from the rehearsal.** Noise of the rehearsed size s, added to the last model of the training (round T),
raises the loss by l_k after k rounds, for k up to K = 2 or 1 (`RecoveredNoise`). Noise of size sigma, added to the
model of round c, raises the loss k rounds later by

    (sigma / s)^2 l_k (f(c + k) / f(T + k))^q                       for k <= K,
    (sigma / s)^2 l_K (k / K)^-1/3 (f(c + k) / f(T + K))^q          after that,

where q is 2 for linear models and 6 for networks, and f is the loss of the training, extrapolated beyond its end
(`LearningCurve`). The power of k is typical of a sum over directions of very unequal curvature: the steep directions
recover first. The remaining harm matters less as training progresses, because margins grow; f measures the progress.
The exponents are its only constants (docs/noise.md lists the data they were chosen on). Most of the difference between
two draws of noise lies in the few steepest directions, and these recover within the rehearsed rounds.

Loss is converted to errors by the ratio of the two. Up to the rise that noise s causes, this ratio is pooled over all
measurements with noise of at most s, since a single measurement may depend on a few predictions. From the rise that
the largest rehearsed noise causes, it is the ratio measured for that noise. Between the two rises, it is interpolated
on logarithmic scales. Far from the trained model, the loss of a network is not quadratic, and noise can destroy the
model. Beyond three times the largest rehearsed noise, every prediction of a network counts as wrong.

**Choice of the quantity.** If rounds with noise were rehearsed at the end of training, the forecast follows the share
of wrong predictions, with the measured harm (`Recovery`). Without such rounds (fewer than 12 rounds of training, noise
in training, different participants in the rehearsed rounds, regression), the forecast follows the loss, which is less
accurate:

    harm(sigma, k) = 1.8 rise(sigma) F(k),

where F(k) is the share of a disturbance that is left after k rounds of the first training (`LearningCurve.left`), and
rise is the rehearsed rise of the loss. For a model of c > T rounds, the harm is multiplied by T / c, because margins
grow. If nothing was rehearsed, there is no prediction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sifu.run.rehearsal import RecoveredNoise, recovered_noise, rehearsed_noises
from sifu.run.run_view import ACTIVE, RunView
from sifu.store.projection import EvaluationRow
from sifu.theory.arrays import Floats
from sifu.theory.history import PathNode

_FLOORS = 1.0 - np.geomspace(1.0, 0.005, 40)
"""Candidate floors, as shares of the smallest loss of the fitted part."""
_USUAL_EXPONENT, _LEAST_EXPONENT = 0.3, 0.05
"""Exponent of the error curve if there are too few points to fit it, and its lower bound."""


@dataclass(frozen=True)
class LearningCurve:
    """Losses by round (rounds increase from 0), with the fitted tail."""

    rounds: Floats
    losses: Floats
    floor: float
    exponent: float

    @staticmethod
    def fit(rounds: Sequence[int], losses: Sequence[float]) -> LearningCurve | None:
        """Return the curve through these points, or None if there are too few, or the loss did not fall."""
        n, y = np.asarray(rounds, dtype=np.float64), np.asarray(losses, dtype=np.float64)
        if n.size < 2 or n[-1] < 1.0 or not np.isfinite(y).all() or y.min() <= 0.0 or y[-1] >= y[0]:
            return None
        late = n >= max(1.0, n[-1] / 4.0)
        floor, exponent = _power_law(n[late], y[late])
        return LearningCurve(n, y, floor, exponent)

    @property
    def end(self) -> float:
        """T, the last recorded round."""
        return float(self.rounds[-1])

    @property
    def gain(self) -> float:
        """f(0) - floor, the largest possible decrease of the loss."""
        return float(self.losses[0]) - self.floor

    def loss(self, rounds: Floats | float) -> Floats:
        """Return the loss f(n) after n rounds: interpolated within the recorded rounds, extrapolated beyond."""
        n = np.asarray(rounds, dtype=np.float64)
        inside = np.interp(n, self.rounds, self.losses)
        tail = self.floor + (self.losses[-1] - self.floor) * (np.maximum(n, 1.0) / self.end) ** -self.exponent
        return np.where(n <= self.end, inside, tail)

    def left(self, rounds: Floats | float) -> Floats:
        """Return F(k), the share (at most 1) of a disturbance that is left after k rounds."""
        return np.clip((self.loss(rounds) - self.floor) / self.gain, 0.0, 1.0)


@dataclass(frozen=True)
class ErrorCurve:
    """Smoothed share of wrong predictions after n rounds: `at_end` (n / end)^-`exponent`.

    `last` is the recorded share at the end, `scatter` the standard deviation of the recorded shares around the curve.
    """

    end: float
    at_end: float
    exponent: float
    last: float
    scatter: float

    @staticmethod
    def fit(rounds: Sequence[int], accuracies: Sequence[float], samples: int) -> ErrorCurve | None:
        """Return the curve nearest to these points, or None if there are too few, or no prediction was ever right."""
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
        """Return the fitted share of wrong predictions, e(n), after n rounds."""
        return self.at_end * (np.maximum(np.asarray(rounds, dtype=np.float64), 1.0) / self.end) ** -self.exponent


def _power_law(n: Floats, y: Floats) -> tuple[float, float]:
    """Return the floor and the exponent of the best-fitting power law, or 0 and 1/2 for fewer than four points."""
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
        """Nodes of the first training, in order."""
        nodes: list[PathNode] = self._reader.remembered(
            "first training",
            lambda: [
                node for node in self._reader.nodes() if node.branch == 0 and node.kind in ("initial", "merge", "round")
            ],
        )
        return nodes

    @cached_property
    def evaluations(self) -> list[EvaluationRow]:
        """All evaluations of the run, including rehearsals and later branches."""
        rows: list[EvaluationRow] = self._reader.remembered("evaluations", self._reader.evaluations)
        return rows

    @cached_property
    def evaluated(self) -> dict[int, EvaluationRow]:
        """Evaluations on the active clients, by node."""
        return {row.node: row for row in self.evaluations if row.subset == ACTIVE}

    @cached_property
    def rehearsed(self) -> dict[float, tuple[EvaluationRow, EvaluationRow]]:
        """Evaluations of the same model with noise and without noise, by sigma."""
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
        """Number T of rounds until the target was reached, or None if it was not reached or no target is set."""
        if self._target <= 0.0:
            return None
        return next((position for position, row in self._all_points if row.accuracy >= self._target), None)

    @cached_property
    def length(self) -> int:
        """T if the target was reached, otherwise the total number of rounds, which suffices to compare noise sizes."""
        return max(1, self.nodes[-1].position if self.rounds_to_target is None else self.rounds_to_target)

    @cached_property
    def points(self) -> list[tuple[int, EvaluationRow]]:
        """Pairs (round, evaluation) up to round `length`."""
        return [(position, row) for position, row in self._all_points if position <= self.length]

    @cached_property
    def losses(self) -> LearningCurve | None:
        """Curve of the loss, or None if the loss does not fall."""
        return LearningCurve.fit([at for at, _ in self.points], [row.loss for _, row in self.points])

    @cached_property
    def errors(self) -> ErrorCurve | None:
        """Curve of wrong predictions, or None if the recorded accuracy does not determine one."""
        samples = self.points[-1][1].samples if self.points else 0
        return ErrorCurve.fit([at for at, _ in self.points], [row.accuracy for _, row in self.points], samples)


OF_ROUNDS = 1.0 / 3.0
OF_LOSS = {"linear": 2.0, "network": 6.0}
"""Exponent q by kind of model; it is larger for networks, where further training undoes most of the harm of noise."""

FARTHEST = 3.0
"""Largest noise whose harm to a network is predicted, as a multiple of the largest rehearsed noise."""


@dataclass(frozen=True)
class Recovery:
    """Harm of noise and its decay, from the rehearsal (see the module's docstring).

    `losses` are the amounts that noise of `noise_std` adds to the loss after 0, 1, ... rounds; `training` is f.
    """

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
        recovered: RecoveredNoise | None,
        rises: Mapping[float, tuple[float, float]],
        samples: int,
        training: LearningCurve,
        linear: bool = True,
    ) -> Recovery | None:
        """Return the measured effect of noise and its decay, or None if the rehearsal does not determine them.

        Args:
            recovered: Increase in loss and errors that noise leaves after each rehearsed round.
            rises: Rise of loss and errors directly after noise, by sigma.
            samples: Number of samples the evaluations were made on.
            training: Learning curve of the first training.
            linear: True if the model is linear in its parameters.
        """
        if recovered is None or recovered.noise_std not in rises or min(loss for loss, _ in rises.values()) <= 0.0:
            return None
        at_once, _ = rises[recovered.noise_std]
        small = [rise for noise_std, rise in rises.items() if noise_std <= recovered.noise_std]
        small += zip(recovered.losses, recovered.errors, strict=True)
        loss, wrong = (sum(values) for values in zip(*small, strict=True))
        errors_per_loss = max(wrong, 0.5 / samples) / loss
        large_rise, large_wrong = rises[max(rises)]
        return Recovery(
            recovered.noise_std,
            (at_once, *recovered.losses),
            training,
            OF_LOSS["linear" if linear else "network"],
            math.inf if linear else FARTHEST * max(rises),
            errors_per_loss,
            large_rise,
            max(large_wrong, 0.5 / samples) / large_rise,
        )

    def rise(self, noise_std: float, rounds: Floats, position: Floats) -> Floats:
        """Return the rise of the loss that is left some rounds after noise was added.

        Args:
            noise_std: Standard deviation of the noise.
            rounds: Rounds since the noise was added, k.
            position: Number of rounds of the current model, c + k.
        """
        last = float(len(self.losses) - 1)
        rehearsed = np.interp(rounds, np.arange(last + 1.0), np.log(self.losses))
        slower = (np.maximum(rounds, last) / last) ** -OF_ROUNDS
        fallen = self.training.loss(position) / self.training.loss(self.training.end + np.minimum(rounds, last))
        return (noise_std / self.noise_std) ** 2 * np.exp(rehearsed) * slower * fallen**self.of_loss

    def errors(self, noise_std: float, rounds: Floats, position: Floats) -> Floats:
        """Return the share of predictions that are wrong because of the noise; the arguments are those of `rise`."""
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
"""Factor of the rise in the formula for harm without rehearsed rounds (see the module's docstring)."""
SPREAD_OF_LUCK, LARGEST_SPREAD = 0.53, 1.5
"""Standard deviation of relative harm at the rehearsed noise size (falls as 1 / sigma), and the largest total spread.

Relative harm is the harm of one draw of noise divided by the mean harm; `planning.forecast` calls it f.
"""
SPREAD_OF_LAW = 0.3
"""Standard deviation of a run's harm around `Recovery`, at any noise size; its variance adds to relative harm's."""
SPREAD_UNREHEARSED = 0.7
"""Standard deviation of relative harm, at any noise size, if no rounds were rehearsed."""


@dataclass(frozen=True)
class Measure:
    """Quantity that must fall to `goal`: the share of wrong predictions (`of_errors`), or the loss.

    Attributes:
        of_errors: True if the quantity is the share of wrong predictions.
        scatter: Standard deviation of single evaluations around the curve.
        curve: The quantity after a given number of rounds, without noise.
        goal: Value that the quantity must fall to.
        harm: Amount that noise still adds to the quantity, by its size, its age and the position on the path.
        spread: Standard deviation of the relative harm f of noise (`planning.forecast`), by the size of the noise.
    """

    of_errors: bool
    scatter: float
    curve: Callable[[Floats | float], Floats]
    goal: float
    harm: Callable[[float, Floats, Floats], Floats]
    spread: Callable[[float], float]


def measure_of(first: FirstTraining, target: float, linear: bool) -> Measure | None:
    """Return the measure of errors if rounds were rehearsed, or else of the loss, or None if neither exists."""
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
    recovery = Recovery.of(recovered_noise(first.evaluations), rises, samples, first.losses, linear)
    if recovery is None:
        return None
    goal = errors.at_end
    if first.rounds_to_target is not None:
        # The first round that reaches the target does so partly by chance. Assume the same deviation for retraining.
        goal += (1.0 - target) - errors.last

    def spread(noise_std: float) -> float:
        """Return the relative spread of the harm: its random part grows like sigma, its mean like sigma^2."""
        if noise_std == 0.0:
            return 0.0
        return min(LARGEST_SPREAD, math.hypot(SPREAD_OF_LUCK * recovery.noise_std / noise_std, SPREAD_OF_LAW))

    return Measure(True, errors.scatter, errors.errors, goal, recovery.errors, spread)


def _measure_of_loss(first: FirstTraining) -> Measure | None:
    curve, rises = first.losses, rises_of_loss(first)
    if curve is None or not rises:
        return None

    def harm(noise_std: float, rounds: Floats, position: Floats) -> Floats:
        past_end = np.minimum(1.0, first.length / np.maximum(position - rounds, 1.0))
        return rise_of_loss(rises, noise_std) * HARM_OF_LOSS * curve.left(rounds) * past_end

    return Measure(False, 0.0, curve.loss, float(curve.loss(first.length)), harm, lambda _: SPREAD_UNREHEARSED)


def rises_of_loss(first: FirstTraining) -> dict[float, float]:
    """Return the rise of the loss directly after noise, by rehearsed noise size; only positive rises are included."""
    rises = {size: noised.loss - plain.loss for size, (noised, plain) in first.rehearsed.items()}
    return {size: rise for size, rise in sorted(rises.items()) if rise > 0.0}


def rise_of_loss(rises: dict[float, float], noise_std: float) -> float:
    """Return the rise of the loss for any noise size: its ratio to sigma^2 is interpolated on logarithmic scales."""
    if noise_std == 0.0:
        return 0.0
    sizes = [math.log(size) for size in rises]
    ratios = [math.log(rise / size**2) for size, rise in rises.items()]
    return float(np.exp(np.interp(math.log(noise_std), sizes, ratios))) * noise_std**2
