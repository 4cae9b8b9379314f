"""How noise heals, from what the rehearsal measured: wrong predictions k rounds after noise of size sigma.

Noise of the rehearsed size s adds l_k to the loss after k rounds, k up to K = 2 or 1 (`HealedNoise`). Then

    l_k = l_K (k / K)^-q ((1 + k/T) / (1 + K/T))^-0.7,   q = 0.07 + 0.7 log2(l_1 / l_2)  (1/3 where K = 1),

times (sigma / s)^2: a power law, as of a sum over directions of very unequal curvature, which bends down when k comes
to the T rounds of the training and the flattest that matter heal too. q is never above 0.5: more than that is the last
of the few steepest directions, by which one noise differs from another. Loss becomes errors by the ratio of the two,
pooled over all measurements up to s, since one alone may be a few predictions; for as large a rise as the largest noise
makes, by the ratio there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sifu.record.rehearsal import HealedNoise
from sifu.theory.arrays import Floats

_EXPONENT, _EXPONENT_SHARE, _USUAL_EXPONENT = 0.07, 0.7, 1.0 / 3.0
_LEAST_EXPONENT, _LARGEST_EXPONENT = 0.1, 0.5
_BEND = 0.7


@dataclass(frozen=True)
class Healing:
    """`losses` are what noise of `noise_std` adds after 0, 1, ... rounds; see above for the rest."""

    noise_std: float
    losses: tuple[float, ...]
    exponent: float
    errors_per_loss: float
    large_rise: float
    errors_per_large_loss: float
    training: float

    @staticmethod
    def of(
        healed: HealedNoise | None, rises: Mapping[float, tuple[float, float]], samples: int, training: float
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
        exponent = _USUAL_EXPONENT
        if len(healed.losses) > 1:
            exponent = _EXPONENT + _EXPONENT_SHARE * math.log2(healed.losses[0] / healed.losses[1])
        return Healing(
            healed.noise_std,
            (at_once, *healed.losses),
            float(np.clip(exponent, _LEAST_EXPONENT, _LARGEST_EXPONENT)),
            errors_per_loss,
            large_rise,
            max(large_wrong, 0.5 / samples) / large_rise,
            training,
        )

    def rise(self, noise_std: float, rounds: Floats) -> Floats:
        """How much the loss is still raised some rounds after noise of a size."""
        last = float(len(self.losses) - 1)
        rehearsed = np.interp(rounds, np.arange(last + 1.0), np.log(self.losses))
        later = np.maximum(rounds, last)
        bend = (self.training + later) / (self.training + last)
        size = (noise_std / self.noise_std) ** 2
        return size * np.exp(rehearsed) * (later / last) ** -self.exponent * bend**-_BEND

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
