"""How many rounds a request would take: predicted from recorded scalars alone (docs/noise.md has the measurements).

Two things keep a noised model from its target. What the node it starts from still had to learn: the rounds that
training, or retraining, took from there the last time. And the noise, which raises the loss by

    rise(sigma) = sigma^2 tr(H) / 2,        H the Hessian of the mean loss.

Recovering from it takes a share of the whole training that grows with the rise against what training gained,

    recovery = T * 2.44 * (rise / (loss_0 - loss_T))^0.55,

a fit by eye to runs on digits and MNIST (white noise meets few steep directions, which heal at once,
and many flat ones, which heal slowly and harm little). Both go on at the same time, so they add up in squares.

tr(H) is taken from the noise edges of earlier requests, where the loss before and after is recorded. Before there is
any: softmax curvature sum p(1-p) is about 0.83 times the loss, and a client's mean ||x||^2 about four times its
recorded beta, so

    tr(H) = 3.32 * loss_T * mean beta.

Without a recorded beta (networks) the noise is judged against the way gone, D = ||theta_T - theta_0||:

    rise = 0.07 (loss_0 - loss_T) sigma^2 d / D^2.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from functools import cached_property

from sifu.core.terms import RequestTerms
from sifu.methods.view import ACTIVE, RunView

RECOVERY_FACTOR = 2.44
RECOVERY_EXPONENT = 0.55
TRACE_OF_LOSS_AND_BETA = 3.32
RISE_WITHOUT_BETA = 0.07
SPREAD = 1.7
"""Half-width of the interval, as a factor. 32 of the benchmark's 40 predictions lay within it (docs/noise.md)."""


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
    def _losses(self) -> dict[int, float]:
        return {row.node: row.loss for row in self.view.reader.evaluations() if row.subset == ACTIVE}

    @cached_property
    def _first(self) -> list[tuple[int, int, float]]:
        """(position, node, distance) along the first training."""
        rows = self.view.reader.node_rows()
        return [
            (row.node.position, row.node.node, row.distance)
            for row in rows
            if row.node.branch == 0 and row.node.kind in ("initial", "round")
        ]

    @cached_property
    def training(self) -> int | None:
        """Rounds of the first training to the target; None if it was not reached, or there is none."""
        if self._target <= 0.0:
            return None
        accuracy = {row.node: row.accuracy for row in self.view.reader.evaluations() if row.subset == ACTIVE}
        reached = (position for position, node, _ in self._first if accuracy.get(node, -1.0) >= self._target)
        return next(reached, None)

    @cached_property
    def _scale(self) -> int:
        """T where it is known, else all rounds of the first training: good enough to compare noises."""
        return max(1, self.training if self.training is not None else self._first[-1][0])

    @cached_property
    def _gain(self) -> tuple[float, float]:
        """(what training gained in loss, the loss it ended at); ones where nothing was recorded."""
        known = [self._losses[node] for position, node, _ in self._first if node in self._losses]
        if len(known) < 2 or known[0] - min(known) <= 0.0:
            return 1.0, known[-1] if known else 1.0
        return known[0] - min(known), max(min(known), 1e-12)

    @cached_property
    def _branch_rounds(self) -> dict[int, int]:
        """Rounds that each branch ran."""
        found: dict[int, int] = {}
        for row in self.view.reader.node_rows():
            found[row.node.branch] = max(found.get(row.node.branch, 0), row.node.position)
        return found

    @cached_property
    def _trace(self) -> float:
        """tr(H) / 2: what the loss rises by for each sigma^2."""
        measured = self._measured_rises()
        if measured:
            return statistics.median(measured[-3:])
        gain, last = self._gain
        view = self.view
        betas = [(one.samples, one.smoothness) for one in view.clients if one.smoothness is not None]
        total = sum(samples for samples, _ in betas)
        if betas and total and view.facts.smooth_model and view.regularities.measured.assumed_factor is None:
            decay = view.facts.weight_decay
            mean = sum(samples * max(beta - decay, 0.0) for samples, beta in betas) / total
            return 0.5 * TRACE_OF_LOSS_AND_BETA * last * mean
        way = self._first[-1][2]
        return RISE_WITHOUT_BETA * gain * view.parameters / way**2 if way > 0.0 else math.inf

    def _measured_rises(self) -> list[float]:
        """Rise over sigma^2 at the noise edges so far, where the loss is recorded on both sides."""
        rises = []
        for row in self.view.reader.node_rows():
            one = row.node
            if one.kind == "noise" and one.noise_std > 0.0 and one.node in self._losses and one.parent in self._losses:
                rise = self._losses[one.node] - self._losses[one.parent]
                if rise > 0.0:
                    rises.append(rise / one.noise_std**2)
        return rises

    def left_to_learn(self, depth: int) -> float:
        """Rounds it took from this node to the end of its branch the last time."""
        node = self.view.path.nodes[depth]
        whole = self._scale if node.branch == 0 else self._branch_rounds[node.branch]
        return max(0.0, float(whole - node.position))

    def expected(self, depth: int, noise_std: float) -> float:
        """The expectation behind `predict`, also where no target was reached: for comparing noises."""
        left = self.left_to_learn(depth)
        if noise_std == 0.0:
            return left
        relative = self._trace * noise_std**2 / self._gain[0]
        if not math.isfinite(relative):
            return math.inf
        return math.hypot(left, self._scale * RECOVERY_FACTOR * relative**RECOVERY_EXPONENT)

    def predict(self, depth: int, noise_std: float) -> Prediction | None:
        """Rounds to the target after noise at `depth`; None where the first training never reached it."""
        if self.training is None:
            return None
        return Prediction.of(min(self.expected(depth, noise_std), 1e9))

    def scratch(self) -> Prediction | None:
        """Rounds of Scratch: what the first training took."""
        return None if self.training is None else Prediction.of(float(self.training), 1.2)


def predicted_rounds(prediction: Prediction | None) -> int | None:
    """The rounds of a prediction, if there is one."""
    return None if prediction is None else prediction.rounds
