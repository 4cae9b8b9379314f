"""Recorded curves of a training, drawn on past their end, and how fast a disturbance fades.

The loss of the first training is known round by round. Past its end it is continued by a power law with a floor,

    f(n) = floor + (f(T) - floor) (n / T)^-p,

fitted to its last three quarters. The same curve says how fast training heals a disturbance: the share of the gain that
is still to come after k rounds, F(k) = (f(k) - floor) / (f(0) - floor), is how much of theta_0's distance to the
optimum is left after k rounds, seen through the loss. Noise is another such distance.

What a target asks for is accuracy, and near it the loss says little of it. The share of wrong predictions is a straight
line in log rounds and log errors, e(n) = e_T (n / T)^-p: fitted to the last two thirds, it smooths the curve (the round
that reaches a target first is a lucky one) and continues it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from sifu.run.rehearsal import rehearsed_noises
from sifu.run.run_view import ACTIVE, RunView
from sifu.store.projection import EvaluationRow
from sifu.theory.arrays import Floats

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


class TrainingNode(NamedTuple):
    """A node of the first training: its round, and its number."""

    position: int
    node: int


class FirstTraining:
    """Rounds and evaluations of the first training, up to the round that reached `target`."""

    def __init__(self, view: RunView, target: float) -> None:
        self._reader, self._target = view.reader, target

    @cached_property
    def nodes(self) -> list[TrainingNode]:
        """Its nodes, in order."""
        nodes: list[TrainingNode] = self._reader.remembered("first training", self._read_nodes)
        return nodes

    def _read_nodes(self) -> list[TrainingNode]:
        return [
            TrainingNode(row.node.position, row.node.node)
            for row in self._reader.nodes_by_number().values()
            if row.node.branch == 0 and row.node.kind in ("initial", "merge", "round")
        ]

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
