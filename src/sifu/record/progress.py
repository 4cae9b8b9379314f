"""What a training reports to its observer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """What a progress bar shows."""

    phase: str
    rounds: int
    accuracy: float
    target: float
    max_rounds: int


ProgressCallback = Callable[[Progress], None]
