r"""Conversion between a budget (epsilon, delta) and a noise multiplier (docs/theory.md, section 7).

The Gaussian mechanism with sensitivity Psi and noise N(0, sigma^2 I) is (epsilon, delta)-DP exactly when
sigma / Psi >= s, where s = s(epsilon, delta) is the solution of

    Phi(1/(2s) - epsilon s) - e^epsilon Phi(-1/(2s) - epsilon s) = delta        (Balle & Wang 2018, theorem 8)

The left side is strictly decreasing in s.

Section 10 derives the guarantee of noise added to every update during training, over all rounds together. A round with
M participants of weights w_i and noise of z times the clip norm is a Gaussian mechanism. Its ratio of sensitivity to
noise is mu_n = (2 w_W + (M + 8) 2^-51) / (z sqrt(sum_i w_i^2)) for the clients W. The rounds that W took part in
compose to a Gaussian mechanism with the ratio sqrt(sum_n mu_n^2).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from sifu.errors import InputError

LARGEST_EPSILON = 1e4
"""Largest accepted epsilon: a larger one protects nothing, and float64 is not precise enough for it."""
SMALLEST_EPSILON = 1e-4
"""Smallest accepted epsilon of a request: below it the equation of calibration loses too many digits in float64."""
LARGEST_NOISE = 1e30
"""Largest accepted sigma: larger noise would destroy the model and overflow float32."""
SMALLEST_DELTA = 1e-10
"""Smallest accepted or stated delta, far above the error in the sampler's far tail (about 1e-14)."""


def check_budget(epsilon: float, delta: float) -> None:
    """Refuse a meaningless budget: epsilon must be positive and at most `LARGEST_EPSILON`, delta inside (0, 1)."""
    if not 0.0 < epsilon <= LARGEST_EPSILON:
        raise InputError(
            f"epsilon must be a positive number of at most {LARGEST_EPSILON:g}, found {epsilon}; "
            "1 is strong, 10 is weak"
        )
    if not 0.0 < delta < 1.0:
        raise InputError(f"delta must lie strictly between 0 and 1, found {delta}; 0.01 or smaller is usual")


def check_deliverable(epsilon: float, delta: float) -> None:
    """Refuse an invalid budget, an epsilon below `SMALLEST_EPSILON`, and a delta below `SMALLEST_DELTA`.

    Noise drawn from 53-bit uniforms never exceeds 8.6 sigma, so it cannot achieve a smaller delta.
    """
    check_budget(epsilon, delta)
    if epsilon < SMALLEST_EPSILON:
        raise InputError(
            f"epsilon must be at least {SMALLEST_EPSILON:g}, found {epsilon}: float64 is too coarse for it"
        )
    if delta < SMALLEST_DELTA:
        raise InputError(f"delta must be at least {SMALLEST_DELTA:g}, found {delta}: float64 noise cannot deliver less")


def delta_reached(epsilon: float, multiplier: float) -> float:
    """Return the smallest delta for which noise of `multiplier` times the sensitivity is (epsilon, delta)-DP.

    Balle & Wang 2018, theorem 8: `multiplier` is s = sigma / Psi.

    >>> round(delta_reached(10, 0.31075), 5)
    0.04058
    """
    return _delta_and_error(epsilon, multiplier)[0]


def delta_reached_up(epsilon: float, multiplier: float) -> float:
    """Return an upper bound on `delta_reached` that includes its float64 error."""
    return sum(_delta_and_error(epsilon, multiplier))


def stated_delta(epsilon: float, multiplier: float) -> float:
    """Return the delta that a certificate states: `delta_reached`, rounded up, and at least `SMALLEST_DELTA`.

    At a large epsilon the formula underflows to 0, which no noise of finite size achieves.

    >>> stated_delta(1e4, 5.0), delta_reached(1e4, 5.0), round(stated_delta(10, 0.31075), 5)
    (1e-10, 0.0, 0.04058)
    """
    return max(delta_reached_up(epsilon, multiplier), SMALLEST_DELTA)


def _delta_and_error(epsilon: float, multiplier: float) -> tuple[float, float]:
    """Return delta(epsilon, s) and an upper bound on its float64 error.

    With h = 1/(2s) and x = epsilon s the densities at h - x and -h - x differ by exactly the factor e^epsilon, so

        delta = 1/2 e^(-(x-h)^2 / 2) (erfcx((x-h)/sqrt 2) - erfcx((x+h)/sqrt 2)),

    which loses far less to cancellation than the difference of the two tails when epsilon and delta are small.
    """
    from scipy.special import erfcx, ndtr

    if not multiplier > 0.0:
        return 1.0, 0.0
    if math.isinf(multiplier):
        return 0.0, 0.0
    half_signal, shift = 0.5 / multiplier, epsilon * multiplier
    density = 0.5 * math.exp(-0.5 * (shift - half_signal) ** 2)
    loss = float(erfcx((shift + half_signal) / math.sqrt(2.0)))
    if shift < half_signal:  # delta is large and erfcx of the first term may overflow: no cancellation here
        gain, loss = float(ndtr(half_signal - shift)), density * loss
        return max(gain - loss, 0.0), 2.0**-50 * (gain + loss * (1.0 + half_signal**2))
    gain = float(erfcx((shift - half_signal) / math.sqrt(2.0)))
    difference = max(gain - loss, 0.0)
    error = 2.0**-50 * (gain + loss)
    return density * difference, density * (error + 2.0**-49 * (1.0 + shift**2) * (difference + error))


@functools.lru_cache(maxsize=4096)
def exact_multiplier(epsilon: float, delta: float) -> float:
    """Return the smallest s = sigma / Psi for which the Gaussian mechanism is (epsilon, delta)-DP, rounded up.

    Valid for every epsilon >= 0 and 0 < delta < 1. The root is bracketed, then bisected to neighbouring floats on an
    upper bound on delta, so that s is never too small.

    >>> round(exact_multiplier(10, 0.01), 5), round(exact_multiplier(1, 0.01), 5)
    (0.3501, 1.87788)
    """
    if not (epsilon == 0.0 and 0.0 < delta < 1.0):
        check_budget(epsilon, delta)

    def enough(multiplier: float) -> bool:
        return delta_reached_up(epsilon, multiplier) <= delta

    low = high = 1.0
    while not enough(high):
        high *= 2.0
        if high > 1e150:
            raise InputError(
                f"the budget ({epsilon}, {delta}) is too small to be calibrated in float64: "
                "use a larger epsilon or delta"
            )
    while enough(low):
        low /= 2.0
    return smallest_enough(enough, low, high)


def smallest_enough(enough: Callable[[float], bool], low: float, high: float) -> float:
    """Return the smallest float that passes the test `enough`, by bisection to neighbouring floats.

    Args:
        enough: Test that every number above some threshold passes.
        low: Argument for which the test fails.
        high: Argument for which the test passes.

    >>> smallest_enough(lambda x: x >= 0.75, 0.0, 1.0)
    0.75
    """
    for _ in range(200):
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def check_noise(noise_std: float) -> None:
    """Refuse a sigma that is not a positive number, or so large that models with it overflow."""
    if not 0.0 < noise_std <= LARGEST_NOISE:
        raise InputError(f"sigma must be a positive number of at most {LARGEST_NOISE:g} (or auto), found {noise_std}")


def hidden_sensitivity(noise_std: float, multiplier: float) -> float:
    """Return Psi* = sigma / s (eq. 11), the largest sensitivity that noise of size sigma hides, rounded down.

    >>> round(hidden_sensitivity(0.1, 0.3501), 4)
    0.2856
    """
    return math.nextafter(noise_std / multiplier, 0.0)


def true_positive_rate(gaussian_mu: float, false_positive_rate: float = 0.01) -> float:
    """Return the true-positive rate of the best test against a Gaussian mechanism of ratio mu = Psi / sigma.

    This is the trade-off function of Gaussian DP (Dong, Roth & Su 2022; docs/theory.md, section 7.4):
    TPR = Phi(Phi^-1(FPR) + mu). It illustrates a budget: at (10, 0.01), fully used, an attacker reaches 0.70 at a
    false-positive rate of 1 %.

    >>> round(true_positive_rate(1 / exact_multiplier(10, 0.01)), 2)
    0.7
    """
    from scipy.special import ndtr, ndtri

    return float(ndtr(ndtri(false_positive_rate) + gaussian_mu))


def gaussian_epsilon(ratio: float, delta: float) -> float:
    """Return the smallest epsilon for which a Gaussian mechanism of ratio mu is (epsilon, delta)-DP, rounded up.

    >>> round(gaussian_epsilon(1 / 0.35010, 0.01), 3), gaussian_epsilon(0.0, 0.01)
    (10.0, 0.0)
    """
    if ratio == 0.0:
        return 0.0

    def enough(epsilon: float) -> bool:
        return delta_reached_up(epsilon, 1.0 / ratio) <= delta

    if enough(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while not enough(high):
        low, high = high, 2.0 * high
    return smallest_enough(enough, low, high)
