"""How many rounds a request would take: predicted from recorded scalars alone (docs/noise.md has the measurements).

A rollback to a model that c rounds made, with noise sigma, leaves that model and a disturbance. k rounds later the
model would have come to f(c + k) on the recorded learning curve f, and of the disturbance is left what k
rounds of training leave of any (`LearningCurve.left`, F). The target is reached when both together are no worse than
the loss at which it was reached the first time, f(T):

    f(c + k) + kappa * sum_j rise(sigma_j) F(k + a_j)  <=  f(T).

The sum goes over the new noise (a = 0) and the noise edges on the way, a_j rounds old; c counts all rounds on the path.
kappa = 1.8 is the one fitted constant: noise heals at another pace than theta_0's distance did, and
harms the accuracy more than its loss tells. Once a request was retrained to the target, the run has a kappa of its own,
the one with which the equation holds at the current model. rise(sigma) comes from the rehearsal at the end of training,
or from earlier noise edges, where the loss is recorded before and after. Without either (runs of older versions)

    rise = 0.15 (650 / d)^0.65 (f(0) - floor) sigma^2 d / ||theta_T - theta_0||^2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sifu.core.terms import RequestTerms
from sifu.methods.learning_curve import Floats, LearningCurve
from sifu.methods.rehearsal import rehearsed_noises
from sifu.methods.view import ACTIVE, RunView

HARM = 1.8
"""kappa, before any request was carried out."""
HARM_RANGE = 3.0
"""A run's own kappa is believed up to this factor away from the common one: few rounds tell it only roughly."""
RISE_UNMEASURED, RISE_EXPONENT, RISE_PARAMETERS = 0.15, 0.65, 650.0
SPREAD = 2.0
"""Half-width of the interval, as a factor, where noise rules (docs/noise.md says how often it held)."""
SPREAD_KNOWN = 1.2
"""The same where no noise is added: other clients, and perhaps another initial model."""
WORTH_IT = 0.9
"""Predicted rounds must be below this share of Scratch's, or training starts again: exact, and no slower."""
LONGEST = 8.0
"""Rounds are looked for up to this many times those of the first training."""


@dataclass(frozen=True)
class Prediction:
    """Rounds to the target, and a rough interval around them."""

    rounds: int
    low: int
    high: int

    @staticmethod
    def of(rounds: float, spread: float = SPREAD) -> Prediction:
        """Around an expectation; a round more or less is always possible."""
        return Prediction(
            max(1, round(rounds)), max(1, math.floor(rounds / spread - 0.5)), math.ceil(rounds * spread + 0.5)
        )

    @property
    def interval(self) -> tuple[int, int]:
        """From the lowest to the highest."""
        return self.low, self.high


class Forecast:
    """What a run's records say about restarting from its models with noise."""

    def __init__(self, view: RunView, terms: RequestTerms | None = None) -> None:
        self.view = view
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
    def _evaluated(self) -> dict[int, tuple[float, float]]:
        """(accuracy, loss) on the active clients, by node."""
        rows = self.view.reader.evaluations()
        return {row.node: (row.accuracy, row.loss) for row in rows if row.subset == ACTIVE}

    @cached_property
    def training(self) -> int | None:
        """Rounds of the first training to the target; None if it was not reached, or there is none."""
        if self._target <= 0.0:
            return None
        known = ((at, self._evaluated[node][0]) for at, node, _ in self._first if node in self._evaluated)
        return next((at for at, accuracy in known if accuracy >= self._target), None)

    @cached_property
    def _scale(self) -> int:
        """T where it is known, else all rounds of the first training: good enough to compare noises."""
        return max(1, self.training if self.training is not None else self._first[-1][0])

    @cached_property
    def curve(self) -> LearningCurve | None:
        """The learning curve of the first training until its target; None where it does not fall."""
        points = [(at, self._evaluated[node][1]) for at, node, _ in self._first if node in self._evaluated]
        points = [point for point in points if point[0] <= self._scale]
        return LearningCurve.fit([at for at, _ in points], [loss for _, loss in points]) if points else None

    @cached_property
    def _rises(self) -> tuple[Floats, Floats]:
        """log sigma and log(rise / sigma^2) where it was measured, by sigma."""
        found: dict[float, float] = {}
        for node, noises in rehearsed_noises(self.view.reader.evaluations()).items():
            if node in self._evaluated:
                found |= {sigma: loss - self._evaluated[node][1] for sigma, loss in noises}
        measured = found or self._rises_of_edges()
        pairs = sorted((math.log(sigma), math.log(rise / sigma**2)) for sigma, rise in measured.items() if rise > 0.0)
        return np.array([one for one, _ in pairs]), np.array([one for _, one in pairs])

    def _rises_of_edges(self) -> dict[float, float]:
        """Rise of the loss at the noise edges so far, by sigma."""
        return {
            one.noise_std: self._evaluated[one.node][1] - self._evaluated[one.parent][1]
            for one in (row.node for row in self.view.reader.node_rows())
            if one.kind == "noise" and one.noise_std > 0.0 and one.node in self._evaluated
            if one.parent in self._evaluated
        }

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
        done = path.rounds_until(depth)
        return [
            (path.nodes[edge].noise_std, done - path.rounds_until(edge))
            for edge, _ in path.noise_depths
            if edge <= depth and path.nodes[edge].noise_std > 0.0
        ]

    def _excess(self, curve: LearningCurve, disturbed: Sequence[tuple[float, float]], k: Floats) -> Floats:
        """What noise of some ages adds to the loss k rounds later, without kappa."""
        return np.sum([self.rise(noise) * curve.left(k + age) for noise, age in disturbed], axis=0)

    @cached_property
    def harm(self) -> float:
        """kappa: of this run where a request was retrained to the target, else the common one."""
        tip, edges, curve = self.view.path.tip, self.edges(self.view.path.tip), self.curve
        accuracy = self._evaluated.get(self.view.path.nodes[tip].node, (-1.0, 0.0))[0]
        if curve is None or not edges or edges[-1][1] == 0 or not accuracy >= self._target > 0.0:
            return HARM
        gained = float(curve.loss(self._scale) - curve.loss(self.view.path.rounds_until(tip)))
        own = gained / max(float(self._excess(curve, edges, np.zeros(1))[0]), 1e-300)
        return float(np.clip(own, HARM / HARM_RANGE, HARM * HARM_RANGE))

    def expected(self, depth: int, noise_std: float) -> float:
        """The expectation behind `predict`, also where no target was reached: for comparing noises."""
        new = [(noise_std, 0)] if noise_std > 0.0 else []
        return self.expected_after(self.view.path.rounds_until(depth), [*self.edges(depth), *new])

    def expected_after(self, done: float, disturbed: Sequence[tuple[float, float]]) -> float:
        """Rounds to the target from a model of `done` rounds with noise of some (sigma, age) in it."""
        if not disturbed:
            return float(max(self._scale - done, 0))
        if self.curve is None:
            return math.inf
        k = self._ahead
        over = self.curve.loss(done + k) + self.harm * self._excess(self.curve, disturbed, k)
        over -= self.curve.loss(self._scale)
        reached = int(np.argmax(over <= 0.0))
        if over[reached] > 0.0:
            return float(k[-1])
        if reached == 0:
            return float(k[0])
        # Between two of the numbers looked at: where the straight line between them crosses.
        before, after = over[reached - 1], over[reached]
        return float(k[reached] - (k[reached] - k[reached - 1]) * after / (after - before))

    def predict(self, depth: int, noise_std: float) -> Prediction | None:
        """Rounds to the target after noise at `depth`; None where the first training never reached it."""
        if self.training is None:
            return None
        rounds = min(self.expected(depth, noise_std), 1e9)
        # Rounds that were run before are known well; those that noise adds are not.
        known = max(self._scale - self.view.path.rounds_until(depth), 0) / max(rounds, 1.0)
        return Prediction.of(rounds, SPREAD_KNOWN + (SPREAD - SPREAD_KNOWN) * (1.0 - min(known, 1.0)))

    def scratch(self) -> Prediction | None:
        """Rounds of Scratch: what the first training took."""
        return None if self.training is None else Prediction.of(float(self.training), SPREAD_KNOWN)


def predicted_rounds(prediction: Prediction | None) -> int | None:
    """The rounds of a prediction, if there is one."""
    return None if prediction is None else prediction.rounds
