"""How noise heals, from what the rehearsal measured: wrong predictions k rounds after noise of size sigma.

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
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sifu.planning.learning_curve import LearningCurve
from sifu.run.rehearsal import HealedNoise
from sifu.theory.arrays import Floats

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
