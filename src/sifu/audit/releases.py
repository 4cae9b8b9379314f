"""Empirical bounds on what a release reveals about a client.

A lower bound on epsilon follows from replays, with confidence (Jagielski, Ullman & Oprea 2020; Nasr et al. 2023). Let P
and Q be the distributions of the release with and without the client. If they are (epsilon, delta)-close, every test
that says "P" with rates TPR = P(test) and FPR = Q(test) has

    TPR <= e^epsilon FPR + delta,      so      epsilon >= ln((TPR - delta) / FPR).

The test (a statistic, a threshold, a side) is chosen on one half of the replays, and its rates are counted on the
other half. Clopper & Pearson's intervals bound both rates at once, so the bound holds with the stated confidence
for every statistic.

The release of a request is theta + N(0, sigma^2 I) with the client and phi + N(0, sigma^2 I) without, where theta and
phi are the models of its source node. Later rounds are post-processing and can only hide more. The audit therefore
attacks the noised model itself, with knowledge of both theta and phi.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sifu.audit.audited import Audited
from sifu.audit.replay_evidence import Evidence, NoiseEdge, Watched
from sifu.core.round import NormalSource
from sifu.errors import InputError
from sifu.theory.arrays import Floats, Integers
from sifu.theory.calibration import gaussian_epsilon

THRESHOLDS = 400
"""Number of thresholds tried on the first half."""
FEWEST_REPLAYS = 20
MISTAKE = 0.001
"""Probability that any of an audit's bounds on epsilon is wrong."""


@dataclass(frozen=True)
class EpsilonBound:
    """Empirical lower bound on epsilon, with its confidence.

    `true_positive_rate` is a lower and `false_positive_rate` an upper confidence limit on the measuring half. If the
    chosen `side` is "without", a positive is the verdict that the client was absent.
    """

    epsilon: float
    confidence: float
    replays: int
    true_positive_rate: float
    false_positive_rate: float
    side: str


def clopper_pearson(hits: Integers, trials: int, mistake: float) -> tuple[Floats, Floats]:
    """Return lower and upper confidence limits of success rates; each is wrong with probability `mistake` at most.

    The limits of `hits` successes in `trials` are those of Clopper & Pearson (1934).
    """
    from scipy.special import betaincinv

    counts = hits.astype(np.float64)
    inner_low, inner_high = np.maximum(counts, 1.0), np.minimum(counts, trials - 1.0)
    lower = np.where(hits == 0, 0.0, betaincinv(inner_low, trials - inner_low + 1.0, mistake))
    upper = np.where(hits == trials, 1.0, betaincinv(inner_high + 1.0, trials - inner_high, 1.0 - mistake))
    return lower, upper


def epsilon_lower_bound(
    with_client: Floats, without_client: Floats, delta: float, mistake: float = 0.01
) -> EpsilonBound:
    """Return a lower bound on epsilon from the best threshold on a statistic, given its values in independent replays.

    The bound is wrong with probability `mistake` at most.
    """
    if min(with_client.size, without_client.size) < FEWEST_REPLAYS:
        raise InputError(
            f"{min(with_client.size, without_client.size)} replays are too few to bound epsilon: use {FEWEST_REPLAYS} "
            "at least, 10000 are usual"
        )
    best = (-math.inf, 0.0, "with", 1.0)
    for sign in (1.0, -1.0):  # the client may increase or decrease the statistic
        choose_p, choose_q = np.sort(sign * with_client[::2]), np.sort(sign * without_client[::2])
        thresholds = _thresholds(choose_p, choose_q)
        for side in ("with", "without"):
            bounds = _bounds(choose_p, choose_q, thresholds, side, delta, mistake)[0]
            place = int(np.argmax(bounds))
            best = max(best, (float(bounds[place]), float(thresholds[place]), side, sign))
    _, threshold, side, sign = best
    measure_p, measure_q = np.sort(sign * with_client[1::2]), np.sort(sign * without_client[1::2])
    epsilon, rates, alarms = _bounds(measure_p, measure_q, np.array([threshold]), side, delta, mistake)
    return EpsilonBound(
        max(0.0, float(epsilon[0])),
        1.0 - mistake,
        int(with_client.size),
        float(rates[0]),
        float(alarms[0]),
        side,
    )


def _thresholds(values_p: Floats, values_q: Floats) -> Floats:
    """Return candidate thresholds: evenly spaced by rank, and the outermost values, because tails matter most."""
    pooled = np.sort(np.concatenate([values_p, values_q]))
    ranks = np.linspace(0, pooled.size - 1, THRESHOLDS).astype(np.int64)
    edges = np.arange(min(50, pooled.size))
    return np.unique(pooled[np.concatenate([ranks, edges, pooled.size - 1 - edges])])


def _bounds(
    values_p: Floats, values_q: Floats, thresholds: Floats, side: str, delta: float, mistake: float
) -> tuple[Floats, Floats, Floats]:
    """Return ln((TPR_low - delta) / FPR_high) at each threshold, and both limits; the values must be sorted."""
    above_p = values_p.size - np.searchsorted(values_p, thresholds, side="right")
    above_q = values_q.size - np.searchsorted(values_q, thresholds, side="right")
    if side == "with":
        hits, alarms, trials_hits, trials_alarms = above_p, above_q, values_p.size, values_q.size
    else:
        trials_hits, trials_alarms = values_q.size, values_p.size
        hits, alarms = values_q.size - above_q, values_p.size - above_p
    rate = clopper_pearson(hits, trials_hits, mistake / 2.0)[0]
    alarm = clopper_pearson(alarms, trials_alarms, mistake / 2.0)[1]
    with np.errstate(divide="ignore", invalid="ignore"):
        shown = np.log(np.maximum(rate - delta, 0.0) / alarm)
    return shown, rate, alarm


FARTHEST = 4e4
"""Distance, in units of the noise, beyond which a release hides nothing: epsilon is of the order of its square."""


@dataclass(frozen=True)
class ReleaseAudit:
    """Leakage of the releases that are charged to one subject.

    `gaussian_mu` is the true distance of the models with and without the client in units of the noise, over all
    releases in scope; `epsilon_true` follows from it exactly. `bound` is the lower bound on epsilon from the best test
    that uses the releases alone. `missed` counts releases in scope that could not be replayed; including them, epsilon
    may be larger.
    """

    epsilon_certified: float
    delta: float
    gaussian_mu: float
    epsilon_true: float
    bound: EpsilonBound | None
    missed: int = 0

    @property
    def epsilon_shown(self) -> float:
        """Empirical bound on epsilon, or 0 if there is none."""
        return 0.0 if self.bound is None else self.bound.epsilon


def audit_releases(
    audited: Audited, watched: Watched, edges: Sequence[NoiseEdge], evidence: Evidence, mistake: float
) -> ReleaseAudit | None:
    """Replay the noised releases that are charged to a subject; return None if none of them can be replayed.

    The bound on epsilon is wrong with a probability of at most `mistake`.
    """
    request = watched.request
    if request is None:
        return None
    ratios, missed = [], 0
    for edge in (edge for edge in edges if edge.noise_std > 0.0):
        counterfactuals = evidence.sources.get((watched.subject, edge.source))
        if counterfactuals is None:
            missed += 1
            continue
        drawn = evidence.noise.get(edge.node)
        # If the noise contradicts its record, the measured deviation is replayed, not the recorded one.
        noise_std = edge.noise_std if drawn is None or drawn.as_recorded else drawn.measured_std
        with_client, without = (model.astype(np.float64) for model in counterfactuals)
        ratios.append(float(np.linalg.norm(with_client - without)) / noise_std)
    if not ratios:
        return None
    terms = request.terms
    mu = math.hypot(*ratios)
    bound = None
    if mu > 0.0:
        drawn_ratios = _likelihood_ratios(mu, audited.normals, audited.options.replays)
        bound = epsilon_lower_bound(*drawn_ratios, terms.delta, mistake)
    true = gaussian_epsilon(mu, terms.delta) if mu < FARTHEST else math.inf
    return ReleaseAudit(terms.epsilon, terms.delta, mu, true, bound, missed)


def _likelihood_ratios(mu: float, normals: NormalSource, replays: int) -> tuple[Floats, Floats]:
    """Return ln p(releases)/q(releases) with and without the client, over all releases.

    With u_k = (theta_k - phi_k) / sigma_k, z_k = (release_k - phi_k) / sigma_k and mu^2 = sum_k |u_k|^2, the logarithm
    is sum_k <u_k, z_k> - mu^2/2. With the client, z_k is u_k plus standard normals; without the client, it is standard
    normals alone. The inner product of standard normals with a unit vector is standard normal, so sum_k <u_k, normals>
    / mu is one standard normal exactly. One draw per replay is enough here.
    """
    drawn = normals.standard_normal(2 * replays)
    return mu * drawn[:replays] + 0.5 * mu**2, mu * drawn[replays:] - 0.5 * mu**2
