"""How noise heals, from what the rehearsal measured: wrong predictions k rounds after noise of size sigma.

Noise of the rehearsed size s adds l_k to the loss after k rounds, k up to K = 2 or 1 (`HealedNoise`). Then

    l_k = l_K (k / K)^-1/3,

times (sigma / s)^2: a power law, as of a sum over directions of very unequal curvature. Its exponent is the one
constant here. What two rehearsed rounds say of it is mostly the last of the few steepest directions, by which one noise
differs from another; with an exponent of each run's own predictions were no better (docs/noise.md). Loss becomes errors
by the ratio of the two, pooled over all measurements up to s, since one alone may be a few predictions; for as large a
rise as the largest noise makes, by the ratio there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sifu.record.rehearsal import HealedNoise
from sifu.theory.arrays import Floats

EXPONENT = 1.0 / 3.0


@dataclass(frozen=True)
class Healing:
    """`losses` are what noise of `noise_std` adds after 0, 1, ... rounds; see above for the rest."""

    noise_std: float
    losses: tuple[float, ...]
    errors_per_loss: float
    large_rise: float
    errors_per_large_loss: float

    @staticmethod
    def of(healed: HealedNoise | None, rises: Mapping[float, tuple[float, float]], samples: int) -> Healing | None:
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
            errors_per_loss,
            large_rise,
            max(large_wrong, 0.5 / samples) / large_rise,
        )

    def rise(self, noise_std: float, rounds: Floats) -> Floats:
        """How much the loss is still raised some rounds after noise of a size."""
        last = float(len(self.losses) - 1)
        rehearsed = np.interp(rounds, np.arange(last + 1.0), np.log(self.losses))
        later = np.maximum(rounds, last)
        size = (noise_std / self.noise_std) ** 2
        return size * np.exp(rehearsed) * (later / last) ** -EXPONENT

    def errors(self, noise_std: float, rounds: Floats) -> Floats:
        """The share of predictions that are still wrong by it."""
        if noise_std == 0.0:
            return np.zeros_like(rounds)
        loss = self.rise(noise_std, rounds)
        near, far = math.log(self.losses[0]), math.log(self.large_rise)
        if far > near:
            ratio = np.interp(np.log(loss), [near, far], np.log([self.errors_per_loss, self.errors_per_large_loss]))
        else:
            ratio = np.full_like(loss, math.log(self.errors_per_loss))
        return np.minimum(1.0, np.exp(ratio) * loss)
