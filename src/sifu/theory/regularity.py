r"""Contraction factor L of a round: a bound on the growth of the distance of two models (docs/theory.md, section 5).

One local gradient step of rate eta on a loss whose curvature lies between mu and beta multiplies the distance between
two models by at most

    B = max(|1 - eta mu|, |1 - eta beta|),

where mu > 0 means strongly convex, mu = 0 convex (B = 1 while eta <= 2/beta), and mu = -beta smooth (B = 1 + eta beta).
B is never looser than equations 26-28 of the paper's appendix B (docs/theory.md, section 5.1). P_i is the product over
the K steps of client i. A round with server rate g, participants S and weights w_i has

    L_n(W) = |1 - g| + g sum_{i in S\W} q_i P_i,       q_i = w_i / (1 - w_W).

The paper's theorem does not cover momentum, though its authors' code uses 0.9; see `momentum_growth` and
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
from sifu.theory.facts import ClientProfile, TrainingFacts
from sifu.theory.rounding import ROUNDED_UP, slack

RegularityClass = Literal["strongly convex", "convex", "smooth", "assumed"]


def step_factor(local_rate: float, smoothness: float, curvature: float) -> float:
    """Return B of one gradient step (docs/theory.md, section 5.1), rounded up; exactly 1 if 1 is proven.

    >>> step_factor(0.1, 4.0, 0.0), step_factor(0.1, 4.0, -4.0) >= 1.4
    (1.0, True)
    """
    if curvature == 0.0 and local_rate * smoothness <= 2.0:
        return 1.0
    # Each product and difference may be off by half an ulp of 1 or of itself.
    return max(
        (abs(1.0 - local_rate * bound) + 2.0**-52 * (1.0 + local_rate * abs(bound))) * ROUNDED_UP
        for bound in (curvature, smoothness)
    )


def momentum_growth(local_rate: float, smoothness: float, momentum: float, steps: int) -> float:
    """Return a_K, a bound on the growth of the distance between two models in K momentum steps on a beta-smooth loss.

    Starting from the distance a_0 = 1 and the velocity b_0 = 0, each step gives b' = rho b + beta a and
    a' = a + eta b' (docs/theory.md, section 5.5).

    >>> round(momentum_growth(0.1, 1.0, 0.0, 2), 12)
    1.21
    """
    distance, velocity = 1.0, 0.0
    for _ in range(steps):
        velocity = (momentum * velocity + smoothness * distance) * ROUNDED_UP
        distance = (distance + local_rate * velocity) * ROUNDED_UP
        if math.isinf(distance):
            break
    return distance


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


@dataclass(frozen=True)
class LocalRegularity:
    """Bounds on how K local steps of one client change the distance between two models.

    `factor` is P_i. `averagedness` is alpha_i: for a convex loss without momentum, the local map is alpha_i-averaged.
    L = 1 then holds even for server rates g > 1, as long as g sum q_i alpha_i <= 1. An unknown `averagedness` is 1.
    """

    factor: float
    averagedness: float


def local_regularity(client: ClientProfile, facts: TrainingFacts, assumed: float | None) -> LocalRegularity:
    """Return P_i and alpha_i of one client.

    alpha_i = K a / (1 + (K-1) a) with a = eta beta_i / 2 (a composition of averaged maps, Combettes & Yamada;
    docs/theory.md, section 5.3).

    Args:
        client: Profile of the client.
        facts: Facts of the training, which give eta and the momentum.
        assumed: Factor B per step that the user assumes without proof, or None to derive it from the profile.

    Raises:
        InputError: If nothing is assumed and the client has no smoothness bound.
    """
    if assumed is not None:
        return LocalRegularity(_power(assumed, client.local_steps), 1.0)
    beta, mu = client.smoothness, client.curvature
    if beta is None or mu is None:
        raise InputError(
            f"client {client.name!r} reports no smoothness bound, so no L can be proven: "
            'set regularity.kind = "assumed" (the certificate will say so) or train a linear model'
        )
    eta, rho, steps = facts.local_rate, facts.momentum, client.local_steps
    if rho > 0.0:
        if mu >= 0.0 and eta * beta <= largest_momentum_step(steps, rho):
            return LocalRegularity(1.0, 1.0)
        return LocalRegularity(momentum_growth(eta, beta, rho, steps), 1.0)
    factor = step_factor(eta, beta, mu)
    power = 1.0 if factor == 1.0 else _power(factor, steps) * slack(4 * steps)
    if mu >= 0.0 and eta * beta <= 2.0:
        single = eta * beta / 2.0
        averagedness = min(1.0, steps * single / (1.0 + (steps - 1) * single) * ROUNDED_UP)
        return LocalRegularity(min(power, 1.0), averagedness)
    return LocalRegularity(power, 1.0)


def local_regularities(
    clients: Sequence[ClientProfile], facts: TrainingFacts, assumed: float | None
) -> tuple[Floats, Floats]:
    """Return P_i and alpha_i of every client.

    The values equal those of `local_regularity`; convex clients whose P_i is 1 are computed together.
    """
    factors, averagedness = np.ones(len(clients)), np.ones(len(clients))
    plain = np.zeros(len(clients), dtype=bool)
    if assumed is None and facts.momentum == 0.0:
        beta = np.array([np.nan if client.smoothness is None else client.smoothness for client in clients])
        mu = np.array([np.nan if client.curvature is None else client.curvature for client in clients])
        steps = np.array([client.local_steps for client in clients], dtype=np.float64)
        product = facts.local_rate * beta
        plain = (mu == 0.0) & (product <= 2.0)
        single = product / 2.0
        with np.errstate(invalid="ignore"):
            alpha = np.minimum(1.0, steps * single / (1.0 + (steps - 1.0) * single) * ROUNDED_UP)
        averagedness[plain] = alpha[plain]
    for index in np.flatnonzero(~plain).tolist():
        regularity = local_regularity(clients[index], facts, assumed)
        factors[index], averagedness[index] = regularity.factor, regularity.averagedness
    return factors, averagedness


def _power(base: float, exponent: int) -> float:
    """Return base ** exponent, or infinity on overflow."""
    try:
        return base**exponent
    except OverflowError:
        return math.inf


def contraction(
    factor_sum: Floats, remaining: Floats, factor_max: float, averagedness_sum: Floats, server_rate: float
) -> Floats:
    r"""Return L of a round, for one or many sets W at once, rounded up.

    If no participant remains, the counterfactual round does nothing and L = 1. If every P_i is 1, the result is exactly
    1 for g <= 1. For g > 1 it is 1 if g sum q_i alpha_i <= 1, since a relaxed averaged map does not expand distances.

    Args:
        factor_sum: Sum of n_i P_i over the remaining participants i in S\W.
        remaining: Sum of n_i over the remaining participants.
        factor_max: Largest expansion factor P_i of the round.
        averagedness_sum: Sum of n_i alpha_i over the remaining participants.
        server_rate: Learning rate g of the server.
    """
    anyone = remaining > 0
    mean = factor_sum / np.where(anyone, remaining, 1.0)
    # The remainder of an infinite sum is unknown: treat NaN as infinity, never as a bound.
    mean = np.where(np.isnan(mean), np.inf, np.minimum(mean, factor_max))
    result = (abs(1.0 - server_rate) + server_rate * mean) * ROUNDED_UP
    if server_rate <= 1.0:
        result = np.where(mean == 1.0, 1.0, result)
    elif factor_max <= 1.0:
        averaged = server_rate * averagedness_sum / np.where(anyone, remaining, 1.0) * ROUNDED_UP <= 1.0
        result = np.where(averaged, np.minimum(result, 1.0), result)
    return np.where(anyone, result, 1.0)


@dataclass(frozen=True)
class RoundRegularity:
    """Sums over all participants of a round; L of any W follows by subtraction."""

    total_samples: int
    factor_sum: float
    factor_max: float
    averagedness_sum: float
    averagedness_max: float

    @staticmethod
    def of(samples: Integers, factors: Floats, averagedness: Floats) -> RoundRegularity:
        """Return the sums over a round's participants; for an empty round, return `NO_PARTICIPANTS`."""
        if samples.size == 0:
            return NO_PARTICIPANTS
        largest = float(factors.max())
        return RoundRegularity(
            int(samples.sum()),
            _sum(samples * factors) if largest < 1e290 else math.inf,
            largest,
            _sum(samples * averagedness),
            float(averagedness.max()),
        )

    @property
    def all_one(self) -> bool:
        """True if every P_i is 1: then L = 1 for every W and every server rate up to 1."""
        return self.factor_max == 1.0 and self.factor_sum == self.total_samples

    def absent(self, server_rate: float) -> float:
        """Return L for a client that did not take part."""
        if server_rate <= 1.0 and self.all_one:
            return 1.0
        zero = np.zeros(1)
        return float(self.without(zero, zero, zero, server_rate)[0])

    def without(self, samples: Floats, factors: Floats, averagedness: Floats, server_rate: float) -> Floats:
        """Return L_n(W) for each W.

        Sums over the remaining clients are computed by subtraction and enlarged by a bound on the rounding errors.

        Args:
            samples: Sum of n_c over each W.
            factors: Sum of n_c P_c over each W, divided by `samples`.
            averagedness: Sum of n_c alpha_c over each W, divided by `samples`.
            server_rate: Learning rate g of the server.
        """
        if server_rate <= 1.0 and self.all_one:
            return np.ones(np.shape(samples))  # every P_i is 1: the code below would give the same result more slowly
        lost = 2.0**-49
        if math.isinf(self.factor_sum):
            rest = np.full(np.shape(samples), np.inf)
        else:
            rest = self.factor_sum - samples * factors + self.factor_sum * lost
        return contraction(
            rest,
            self.total_samples - samples,
            self.factor_max,
            self.averagedness_sum - samples * averagedness + self.averagedness_sum * lost,
            server_rate,
        )


def _sum(terms: Floats) -> float:
    """Return the correctly rounded sum, or infinity on overflow."""
    try:
        return math.fsum(terms.tolist())
    except OverflowError:
        return math.inf


NO_PARTICIPANTS = RoundRegularity(0, 0.0, 1.0, 0.0, 0.0)
"""Sums of a round without participants, which leaves the model unchanged: L = 1."""


def classify(clients: Sequence[ClientProfile], factors: Floats, assumed: bool) -> RegularityClass:
    """Return the regularity class that a certificate states: the class of the least regular client."""
    if assumed:
        return "assumed"
    if np.any(factors > 1.0):
        return "smooth"
    if np.all(factors < 1.0) and all((client.curvature or 0.0) > 0.0 for client in clients):
        return "strongly convex"
    return "convex"


def certified_rates(clients: Sequence[ClientProfile], momentum: float) -> Floats | None:
    """Return x_max(K_i, rho) / beta_i of each client: up to this local rate its steps provably do not expand distances.

    With rho = 0 this is 2 / beta_i. The rate is infinite if beta_i is 0. The result is None if a beta_i is unknown or a
    loss is not convex.
    """
    rates = np.full(len(clients), np.inf)
    for index, client in enumerate(clients):
        if client.smoothness is None or client.curvature is None or client.curvature < 0.0:
            return None
        if client.smoothness > 0.0:
            rates[index] = largest_momentum_step(client.local_steps, momentum) / client.smoothness
    return rates


def largest_rate_within(rates: Floats | None) -> float | None:
    """Return the largest local rate at which no client's steps expand distances, rounded down, or None.

    It is the smallest of the clients' `certified_rates`, or None if these are unknown or all infinite.
    """
    if rates is None or not np.isfinite(smallest := rates.min(initial=np.inf)):
        return None
    return math.nextafter(float(smallest), 0.0)


def automatic_rate(rates: Floats | None, model: str) -> float | None:
    """Return the local rate that `auto` chooses for clients with these `certified_rates`, or None if there is none.

    At a rate of 2/beta a squared loss oscillates forever in its steepest direction, so least squares uses half of the
    largest certified rate.
    """
    largest = largest_rate_within(rates)
    return largest / 2.0 if largest is not None and model == "least_squares" else largest


COPIED_WITHIN = 0.01
"""Relative tolerance of `is_copied_rate`: a rate written with three digits is off by at most half of this."""


def is_copied_rate(rate: float, largest: float, model: str) -> bool:
    """Return whether a given rate equals, up to rounding, the rate that `local.rate = "auto"` would have chosen.

    `auto` chooses the largest certified rate, or half of it for least squares. The loss of a custom Python model is
    unknown, so either rate counts.

    >>> is_copied_rate(0.333, 1 / 3, "softmax"), is_copied_rate(0.167, 1 / 3, "least_squares")
    (True, True)
    """
    multiples = (1.0, 0.5) if model in ("least_squares", "python") else (1.0,)
    return any(abs(rate / (multiple * largest) - 1.0) <= COPIED_WITHIN for multiple in multiples)
