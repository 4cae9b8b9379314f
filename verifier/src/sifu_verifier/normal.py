"""Normal distribution and root finding with the standard library alone."""

from __future__ import annotations

import math
from collections.abc import Callable

TAIL = -20.0  # below this value, log_cdf uses the asymptotic series


def cdf(x: float) -> float:
    """Return the probability that a standard normal variable is at most `x`."""
    return 0.5 * math.erfc(-x / math.sqrt(2))


def log_cdf(x: float) -> float:
    """Return the logarithm of `cdf(x)`, also where `cdf(x)` underflows.

    Below `TAIL` it sums the asymptotic series of Abramowitz & Stegun, 26.2.12; the first term left out is
    smaller than 1e-16 there.
    """
    if x > TAIL:
        return math.log(cdf(x))
    term = total = 1.0
    for k in range(1, 11):
        term *= -(2 * k - 1) / (x * x)
        total += term
    return -x * x / 2 - math.log(-x) - 0.5 * math.log(2 * math.pi) + math.log(total)


def root(falling: Callable[[float], float], low: float, high: float) -> float:
    """Return the point between `low` and `high` at which a falling function changes sign, to the last bit."""
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return high
