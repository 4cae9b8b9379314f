"""What a training reports to its observer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """What a progress bar shows."""

    phase: str
    rounds: int
    accuracy: float
    target: float
    max_rounds: int
    unit: str = "round"
    """What is counted: rounds, or clients that send their statistics."""


ProgressCallback = Callable[[Progress], None]


def expected_rounds(seen: Sequence[tuple[int, float]], rounds: int, target: float, most: int) -> int:
    """Rounds to the target if the error keeps falling as it did over the last half of (round, accuracy) that were seen.

    >>> expected_rounds([(1, 0.5), (2, 0.6), (3, 0.7), (4, 0.8), (5, 0.85)], 5, 0.95, 100)
    10
    """
    if target <= 0 or len(seen) < 4:
        return most
    then, now = seen[len(seen) // 2], seen[-1]
    error_then, error_now, goal = 1 - then[1], 1 - now[1], max(1 - target, 1e-6)
    if error_now <= goal or error_now >= error_then:
        return min(most, rounds + 1) if error_now <= goal else most
    speed = math.log(error_then / error_now) / max(now[0] - then[0], 1)
    return min(most, rounds + 1 + math.ceil(math.log(error_now / goal) / speed))
