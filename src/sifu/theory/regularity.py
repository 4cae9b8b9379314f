r"""Contraction factor L of a round: a bound on the growth of the distance of two models (docs/theory.md, section 5).

One local gradient step of rate eta on a loss whose curvature lies between mu and beta multiplies the distance between
two models by at most

    B = max(|1 - eta mu|, |1 - eta beta|),

where mu > 0 means strongly convex and mu = 0 convex (B = 1 while eta <= 2/beta). B is never looser than equations 26-28
of the paper's appendix B (docs/theory.md, section 5.1). P_i, the expansion of client i, is the product over its K
steps. A round with participants S and weights w_i has

    L_n(W) = sum_{i in S\W} q_i P_i,       q_i = w_i / (1 - w_W).

**Own safe steps.** Every client limits its own step by its own beta, so its P_i is at most 1, and no other client's
step depends on it (section 5.8). The paper's theorem does not cover momentum, though its authors' code uses 0.9; see
`largest_momentum_step`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sifu.errors import InputError
from sifu.theory.arrays import Floats, Integers
from sifu.theory.facts import ClientProfile
from sifu.theory.rounding import ROUNDED_UP, slack

RegularityClass = Literal["strongly convex", "convex", "assumed"]


def step_factor(local_rate: float, smoothness: float, curvature: float) -> float:
    """Return B of one gradient step (docs/theory.md, section 5.1), rounded up; exactly 1 if 1 is proven.

    >>> step_factor(0.1, 4.0, 0.0), step_factor(0.1, 4.0, 1.0) < 0.91
    (1.0, True)
    """
    if curvature == 0.0 and local_rate * smoothness <= 2.0:
        return 1.0
    # Each product and difference may be off by half an ulp of 1 or of itself.
    return max(
        (abs(1.0 - local_rate * bound) + 2.0**-52 * (1.0 + local_rate * abs(bound))) * ROUNDED_UP
        for bound in (curvature, smoothness)
    )


@functools.lru_cache(maxsize=256)
def largest_momentum_step(steps: int, momentum: float) -> float:
    """Return x_max(K, rho): K heavy-ball steps on a convex loss do not expand distances while eta beta <= x_max.

    With c^(j)_i = (1 - rho^(j-i))/(1 - rho), c = c^(K), D = diag(c), P_jj = c_j^2 and P_ij = c_j (c_i - c^(j)_i)
    for i < j (P symmetric, steps count from 0),

        x_max = 2 / lambda_max(D^-1/2 P D^-1/2).

    The result is rounded down. The proof is in docs/theory.md, section 5.6.

    >>> [round(largest_momentum_step(k, 0.9), 3) for k in (1, 2, 3, 5)]
    [2.0, 0.892, 0.5, 0.229]
    """
    if steps < 1 or not 0.0 <= momentum < 1.0:
        raise InputError(f"momentum must lie in [0, 1) and steps be at least 1, found {momentum}, {steps}")
    if momentum == 0.0 or steps == 1:
        return 2.0
    index = np.arange(steps)
    # (1 - rho^k) / (1 - rho) without cancellation when rho is close to 1.
    geometric = -np.expm1(np.arange(steps + 1) * math.log1p(momentum - 1.0)) / (1.0 - momentum)
    reach = geometric[steps - index]  # c_i
    gap = index[None, :] - index[:, None]  # j - i
    partial = geometric[np.maximum(gap, 0)]  # c^(j)_i for i < j
    upper = np.triu(reach[None, :] * (reach[:, None] - partial), k=1)
    products = upper + upper.T + np.diag(reach**2)
    scaled = products / np.sqrt(np.outer(reach, reach))
    return float(2.0 / (np.linalg.eigvalsh(scaled)[-1] * (1.0 + 1e-9)))


def safe_rates(smoothness: Floats, steps: int, momentum: float, weight_decay: float, model: str) -> Floats:
    """Return the largest step of each client that is safe, rounded down; infinite where beta is 0.

    It is 2 / (beta + lambda), with momentum x_max(K, rho) / beta (docs/theory.md, sections 5.6 and 5.8). At 2 / beta a
    squared loss oscillates forever in its steepest direction, so least squares uses half of it.

    Args:
        smoothness: Upper bound beta of each client's curvature, including weight decay.
        steps: Number K of local steps.
        momentum: Momentum rho.
        weight_decay: Weight decay lambda, which is also the lower bound on the curvature.
        model: Kind of the model.

    >>> safe_rates(np.array([4.0, 0.0]), 1, 0.0, 0.0, "softmax").round(9)
    array([0.5, inf])
    """
    limit, curvature = (largest_momentum_step(steps, momentum), 0.0) if momentum else (2.0, weight_decay)
    with np.errstate(divide="ignore"):
        rates = np.nextafter(np.asarray(limit / (smoothness + curvature)), 0.0)
    rates = np.where(smoothness > 0.0, rates * (1.0 - 2.0**-50), np.inf)
    return np.asarray(rates / 2.0 if model == "least_squares" else rates)


def own_rates(limit: float, safe: Floats) -> Floats:
    """Return the step of each client: the smaller of `limit` and its safe step, or 1 if neither is finite."""
    rates = np.minimum(limit, safe)
    return np.where(np.isfinite(rates), rates, 1.0)


def expansions(rates: Floats, smoothness: Floats, steps: int, momentum: float, weight_decay: float) -> Floats:
    """Return P_i of clients that take safe steps: at most 1, and exactly 1 without weight decay or with momentum."""
    if momentum or not weight_decay:
        return np.ones(rates.size)
    factors = [
        min(1.0, step_factor(rate, beta, weight_decay)) ** steps * slack(4 * steps)
        for rate, beta in zip(rates.tolist(), smoothness.tolist(), strict=True)
    ]
    return np.minimum(1.0, factors)


def client_factors(clients: Sequence[ClientProfile], weight_decay: float, assumed: float | None) -> Floats:
    """Return P_i of every client: what it reported, or the product of an assumed factor B per step.

    Raises:
        InputError: If nothing is assumed and a client reports no expansion, or one that its steps cannot have: outside
            (0, 1], or below 1 without weight decay, where no loss contracts distances provably.
    """
    if assumed is not None:
        return np.array([_power(assumed, client.local_steps) for client in clients])
    for client in clients:
        if client.expansion is None:
            raise InputError(
                f"client {client.name!r} reports no expansion of its steps, so no L can be proven: "
                'set regularity.kind = "assumed" (the certificate will say so) or train a linear model'
            )
        if not 0.0 < client.expansion <= 1.0 or (not weight_decay and client.expansion != 1.0):
            raise InputError(
                f"client {client.name!r} reports the expansion {client.expansion}, which safe steps cannot have: it "
                "lies in (0, 1], and is 1 without weight decay"
            )
    return np.array([client.expansion for client in clients], dtype=np.float64)


def _power(base: float, exponent: int) -> float:
    """Return base ** exponent, or infinity on overflow."""
    try:
        return base**exponent
    except OverflowError:
        return math.inf


def contraction(factor_sum: Floats, remaining: Floats, factor_max: float) -> Floats:
    r"""Return L of a round, for one or many sets W at once, rounded up.

    If no participant remains, the counterfactual round does nothing and L = 1. If every P_i is 1, the result is exactly
    1.

    Args:
        factor_sum: Sum of n_i P_i over the remaining participants i in S\W.
        remaining: Sum of n_i over the remaining participants.
        factor_max: Largest expansion P_i of the round.
    """
    anyone = remaining > 0
    mean = factor_sum / np.where(anyone, remaining, 1.0)
    # The remainder of an infinite sum is unknown: treat NaN as infinity, never as a bound.
    mean = np.where(np.isnan(mean), np.inf, np.minimum(mean, factor_max))
    result = np.where(mean == 1.0, 1.0, mean * ROUNDED_UP)
    return np.where(anyone, result, 1.0)


@dataclass(frozen=True)
class RoundRegularity:
    """Sums over all participants of a round; L of any W follows by subtraction."""

    total_samples: int
    factor_sum: float
    factor_max: float

    @staticmethod
    def of(samples: Integers, factors: Floats) -> RoundRegularity:
        """Return the sums over a round's participants; for an empty round, return `NO_PARTICIPANTS`."""
        if samples.size == 0:
            return NO_PARTICIPANTS
        largest = float(factors.max())
        return RoundRegularity(int(samples.sum()), _sum(samples * factors) if largest < 1e290 else math.inf, largest)

    @property
    def all_one(self) -> bool:
        """True if every P_i is 1: then L = 1 for every W."""
        return self.factor_max == 1.0 and self.factor_sum == self.total_samples

    @property
    def absent(self) -> float:
        """L for a client that did not take part."""
        return 1.0 if self.all_one else float(self.without(np.zeros(1), np.zeros(1))[0])

    def without(self, samples: Floats, factors: Floats) -> Floats:
        """Return L_n(W) for each W.

        Sums over the remaining clients are computed by subtraction and enlarged by a bound on the rounding errors.

        Args:
            samples: Sum of n_c over each W.
            factors: Sum of n_c P_c over each W, divided by `samples`.
        """
        if self.all_one:
            return np.ones(np.shape(samples))  # every P_i is 1: the code below would give the same result more slowly
        if math.isinf(self.factor_sum):
            rest = np.full(np.shape(samples), np.inf)
        else:
            rest = self.factor_sum - samples * factors + self.factor_sum * 2.0**-49
        return contraction(rest, self.total_samples - samples, self.factor_max)


def _sum(terms: Floats) -> float:
    """Return the correctly rounded sum, or infinity on overflow."""
    try:
        return math.fsum(terms.tolist())
    except OverflowError:
        return math.inf


NO_PARTICIPANTS = RoundRegularity(0, 0.0, 1.0)
"""Sums of a round without participants, which leaves the model unchanged: L = 1."""


def classify(factors: Floats, assumed: bool) -> RegularityClass:
    """Return the regularity class that a certificate states: the class of the least regular client."""
    if assumed:
        return "assumed"
    return "strongly convex" if np.all(factors < 1.0) else "convex"
