"""Contraction and averagedness of a client's local steps (docs/store.md, section 3)."""

from __future__ import annotations

import math

import numpy as np

from sifu_verifier.canonical import Row
from sifu_verifier.tolerances import RELATIVE


def momentum_limit(steps: int, rho: float) -> float:
    """Return x_max(K, rho), the largest eta beta for which heavy ball with K steps from rest does not expand."""
    i = np.arange(steps)
    c = (1 - rho ** (steps - i)) / (1 - rho)  # the entries decrease
    gap = (1 - rho ** abs(i[:, None] - i)) / (1 - rho)
    matrix = np.minimum.outer(c, c) * (np.maximum.outer(c, c) - gap)
    return 2 / float(np.linalg.eigvalsh(matrix / np.sqrt(np.outer(c, c)))[-1])


def regularity(client: Row, facts: Row, spec: Row) -> tuple[float, float]:
    """Return a client's P_i and alpha_i; limits have a tolerance, because automatic rates meet them with equality."""
    steps, eta, rho = client["local_steps"], facts["local_rate"], facts["momentum"]
    if spec["regularity"]["kind"] == "assumed":
        return _power(spec["regularity"]["factor"], steps), 1.0
    beta, mu = client["smoothness"], client["curvature"]
    if beta is None:  # the document defines P_i neither for an unknown beta nor for an unknown mu
        return math.inf, 1.0
    mu, x = -beta if mu is None else mu, eta * beta
    if rho == 0:
        within = x <= 2 * (1 + RELATIVE)
        bound = 1.0 if mu == 0 and within else max(abs(1 - eta * mu), abs(1 - x))
        return _power(bound, steps), steps * (x / 2) / (1 + (steps - 1) * (x / 2)) if mu >= 0 and within else 1.0
    if mu >= 0 and x <= momentum_limit(steps, rho) * (1 + RELATIVE):
        return 1.0, 1.0
    a, b = 1.0, 0.0
    for _ in range(steps):
        b = rho * b + beta * a
        a += eta * b
    return a, 1.0


def _power(base: float, exponent: int) -> float:
    """Return base ** exponent, or infinity where float64 overflows."""
    try:
        return base**exponent
    except OverflowError:
        return math.inf
