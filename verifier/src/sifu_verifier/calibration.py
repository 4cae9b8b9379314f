"""Calibration of Gaussian noise: from a budget to a multiplier and back (docs/store.md, sections 4 and 7)."""

from __future__ import annotations

import functools
import math
from statistics import NormalDist

from sifu_verifier.canonical import Row
from sifu_verifier.normal import cdf, log_cdf, root


def delta_of(s: float, epsilon: float) -> float:
    """Return the delta that noise of `s` times the sensitivity reaches at `epsilon` (Balle & Wang 2018)."""
    near, far = 1 / (2 * s) - epsilon * s, -1 / (2 * s) - epsilon * s
    return cdf(near) - math.exp(epsilon + log_cdf(far))


@functools.cache
def exact_multiplier(epsilon: float, delta: float) -> float:
    """Return the smallest noise, in multiples of the sensitivity, that reaches (`epsilon`, `delta`)."""
    return root(lambda s: delta_of(s, epsilon) - delta, 1e-4, 1e6)


def multiplier(request: Row) -> float:
    """Return the noise multiplier of a request's budget."""
    return exact_multiplier(request["epsilon"], request["delta"])


def attacker_rate(level: str, s: float) -> float | None:
    """Return the largest true positive rate of an attacker with a false positive rate of 1 %, rounded up (section 7).

    Args:
        level: Level of the certificate; no rate is claimed at the level `none`.
        s: Noise multiplier of the budget.
    """
    rate = math.ceil(1e4 * cdf(NormalDist().inv_cdf(0.01) + 1 / s) - 1e-6) / 1e4
    return {"none": None, "exact": 0.01}.get(level, rate)


def epsilon_of(mu: float, delta: float) -> float:
    """Return the epsilon at which a Gaussian mechanism of ratio `mu` reaches `delta`."""
    if mu == 0 or delta_of(1 / mu, 0.0) <= delta:
        return 0.0
    high = 1.0
    while delta_of(1 / mu, high) > delta:
        high *= 2
    return root(lambda epsilon: delta_of(1 / mu, epsilon) - delta, 0.0, high)


def charge_of(psi: float, sigma: float) -> float:
    """Return the charge to a budget for noise of `sigma` over a distance of `psi`: (psi / sigma) squared."""
    ratio = 0.0 if psi == 0 else psi / sigma if sigma else math.inf
    return ratio * ratio  # `**` raises an error if the product overflows
