"""A recorded learning curve, drawn on past its end, and how fast a disturbance fades on it.

The loss of the first training is known round by round. Past its end it is continued by a power law with a floor,

    f(n) = floor + (f(T) - floor) (n / T)^-p,

fitted to its last three quarters. The same curve says how fast training heals a disturbance: the share of the gain that
is still to come after k rounds, F(k) = (f(k) - floor) / (f(0) - floor), is how much of theta_0's distance to the
optimum is left after k rounds, seen through the loss. Noise is another such distance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_FLOORS = 1.0 - np.geomspace(1.0, 0.005, 40)
"""Floors that are tried, as shares of the smallest loss of the fitted part."""


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


def _power_law(n: Floats, y: Floats) -> tuple[float, float]:
    """Floor and exponent of the power law nearest to the points; exponent 1/2 where they are too few to tell."""
    if n.size < 4:
        return 0.0, 0.5
    log_n = np.log(n)
    found = []
    for floor in _FLOORS * y.min():
        slope, start = np.polyfit(log_n, np.log(y - floor), 1)
        error = float(np.mean((np.exp(start + slope * log_n) + floor - y) ** 2))
        found.append((error, float(floor), max(-float(slope), 0.05)))
    _, floor, exponent = min(found)
    return floor, exponent
