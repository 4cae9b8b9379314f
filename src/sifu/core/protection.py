"""What a promise rests on, and what it reaches: delta at epsilon, and what an attacker can spot."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from sifu.choices import Level
from sifu.theory.calibration import SMALLEST_DELTA, delta_reached, stated_delta, true_positive_rate
from sifu.theory.composition import TrainingNoise

Protection = Literal["noise", "training noise", "nothing"]
"""What a method's promise rests on: noise of the request, charged to budgets; noise of training; or nothing.

Only the first is charged, covers whoever asked before, and binds later requests to the budgets of its clients."""


def delta_of_budget(
    epsilon: float, multiplier: float, untouched: bool, protection: Protection, training_noise: TrainingNoise | None
) -> float:
    """The delta at epsilon once the budget is used up whole: 0 where nothing needs hiding, 1 where nothing is hidden.

    Never between 0 and 1e-10: noise in floating point delivers no less.

    >>> delta_of_budget(10.0, 0.31075, False, "nothing", None)
    1.0
    >>> round(delta_of_budget(10.0, 0.31075, False, "noise", None), 5)
    0.04058
    """
    if protection == "nothing":
        return 1.0
    if untouched:
        return 0.0
    if training_noise is not None:
        return training_noise.delta_composed
    return max(delta_reached(epsilon, multiplier), SMALLEST_DELTA)


def delta_of_charges(
    epsilon: float, charges: Iterable[float], protection: Protection, training_noise: TrainingNoise | None
) -> float:
    """The delta at epsilon that the release of this request reached: what was spent, not what may be.

    `charges` are those of the request's own subjects. Rounded up to four digits, and never between 0 and 1e-10. It
    tells Psi, so it stands in the auditor's copy alone.

    >>> delta_of_charges(10.0, [1 / 0.31075**2], "noise", None), delta_of_charges(10.0, [0.0], "noise", None)
    (0.04058, 0.0)
    """
    if protection == "nothing":
        return 1.0
    if training_noise is not None:
        return training_noise.delta_composed
    largest = max(charges, default=0.0)
    if largest == 0.0:
        return 0.0
    delta = stated_delta(epsilon, 1.0 / math.sqrt(largest))
    scale = 10.0 ** (3 - math.floor(math.log10(delta)))
    return min(1.0, math.ceil(delta * scale - 1e-6) / scale)


def attacker_rate(level: Level, multiplier: float) -> float | None:
    """What an attacker allowed 1 % false alarms can spot at most, rounded up to four digits.

    0.01 is a blind guess: all there is at level `exact`. At level `none` nothing bounds it.

    >>> attacker_rate("proven", 0.3501), attacker_rate("exact", 0.3501), attacker_rate("none", 0.3501)
    (0.702, 0.01, None)
    """
    if level == "none":
        return None
    if level == "exact":
        return 0.01
    return math.ceil(true_positive_rate(1.0 / multiplier) * 1e4 - 1e-6) / 1e4
