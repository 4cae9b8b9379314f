"""A number of rounds with an interval around it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sifu.theory.arrays import Floats

TAIL = 0.1
"""The interval of a prediction leaves out this share of its own quantiles on either side."""
LEAST_WIDTH = 1.2
"""The interval reaches at least this factor either way: other clients, perhaps another initial model."""
LARGEST = 1e9


@dataclass(frozen=True)
class Prediction:
    """Rounds to the target, and an interval around them."""

    rounds: int
    low: int
    high: int

    @staticmethod
    def of(times: Floats) -> Prediction:
        """From equally likely times; one round more or less is always possible."""
        mean, low, high = (
            min(float(value), LARGEST)
            for value in (times.mean(), np.quantile(times, TAIL), np.quantile(times, 1.0 - TAIL))
        )
        return Prediction(
            max(1, round(mean)),
            max(1, math.floor(min(low, mean / LEAST_WIDTH) - 0.5)),
            math.ceil(max(high, mean * LEAST_WIDTH) + 0.5),
        )

    @property
    def interval(self) -> tuple[int, int]:
        """From the lowest to the highest."""
        return self.low, self.high


def predicted_rounds(prediction: Prediction | None) -> int | None:
    """The rounds of a prediction, if there is one."""
    return None if prediction is None else prediction.rounds
