"""A lower bound on epsilon from replays alone, with confidence (Jagielski, Ullman & Oprea 2020; Nasr et al. 2023).

If what is released is (epsilon, delta)-close in two worlds P and Q, every test that says "P" with rates
TPR = P(test) and FPR = Q(test) has

    TPR <= e^epsilon FPR + delta,      so      epsilon >= ln((TPR - delta) / FPR).

The test (a statistic, a threshold, a side) is chosen on one half of the replays and its rates are counted on the
other half. Clopper & Pearson's intervals bound both rates at once, so the bound holds with the stated confidence
whatever the statistic is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sifu.errors import InputError
from sifu.theory.arrays import Floats, Integers
from sifu.theory.calibration import delta_reached, smallest_enough

THRESHOLDS = 400
"""How many thresholds are tried on the first half."""
FEWEST_REPLAYS = 20


@dataclass(frozen=True)
class EpsilonBound:
    """What one statistic shows: epsilon is at least `epsilon`, with confidence `confidence`.

    `true_positive_rate` is a lower, `false_positive_rate` an upper confidence limit on the measuring half; the side
    that was chosen may be "without"; then both are the rates of saying "the client was not there".
    """

    statistic: str
    epsilon: float
    confidence: float
    replays: int
    true_positive_rate: float
    false_positive_rate: float
    side: str


def clopper_pearson(hits: int, trials: int, mistake: float) -> tuple[float, float]:
    """(lower, upper) limits of a rate, each wrong with probability at most `mistake` (Clopper & Pearson 1934).

    >>> low, high = clopper_pearson(5, 100, 0.025)
    >>> round(low, 4), round(high, 4)
    (0.0164, 0.1128)
    """
    lower, upper = _clopper_pearson(np.array([hits]), trials, mistake)
    return float(lower[0]), float(upper[0])


def _clopper_pearson(hits: Integers, trials: int, mistake: float) -> tuple[Floats, Floats]:
    from scipy.special import betaincinv

    counts = hits.astype(np.float64)
    inner_low, inner_high = np.maximum(counts, 1.0), np.minimum(counts, trials - 1.0)
    lower = np.where(hits == 0, 0.0, betaincinv(inner_low, trials - inner_low + 1.0, mistake))
    upper = np.where(hits == trials, 1.0, betaincinv(inner_high + 1.0, trials - inner_high, 1.0 - mistake))
    return lower, upper


def epsilon_lower_bound(
    with_client: Floats, without_client: Floats, delta: float, mistake: float = 0.01, statistic: str = "statistic"
) -> EpsilonBound:
    """The largest epsilon that a threshold on a statistic shows, wrong with probability at most `mistake`.

    `with_client` and `without_client` are the statistic's values in independent replays of the two worlds.
    """
    if min(with_client.size, without_client.size) < FEWEST_REPLAYS:
        raise InputError(
            f"{min(with_client.size, without_client.size)} replays are too few to bound epsilon: take {FEWEST_REPLAYS} "
            "at least, 10000 are usual"
        )
    best = (-math.inf, 0.0, "with", 1.0)
    for sign in (1.0, -1.0):  # the statistic may be large with the client, or small
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
        statistic,
        max(0.0, float(epsilon[0])),
        1.0 - mistake,
        int(with_client.size),
        float(rates[0]),
        float(alarms[0]),
        side,
    )


def _thresholds(values_p: Floats, values_q: Floats) -> Floats:
    """Values to try as thresholds: evenly by rank, and the outermost one by one, since tails matter most."""
    pooled = np.sort(np.concatenate([values_p, values_q]))
    ranks = np.linspace(0, pooled.size - 1, THRESHOLDS).astype(np.int64)
    edges = np.arange(min(50, pooled.size))
    return np.unique(pooled[np.concatenate([ranks, edges, pooled.size - 1 - edges])])


def _bounds(
    values_p: Floats, values_q: Floats, thresholds: Floats, side: str, delta: float, mistake: float
) -> tuple[Floats, Floats, Floats]:
    """ln((TPR_low - delta) / FPR_high) at each threshold, with both limits; takes sorted values."""
    above_p = values_p.size - np.searchsorted(values_p, thresholds, side="right")
    above_q = values_q.size - np.searchsorted(values_q, thresholds, side="right")
    if side == "with":
        hits, alarms, trials_hits, trials_alarms = above_p, above_q, values_p.size, values_q.size
    else:
        trials_hits, trials_alarms = values_q.size, values_p.size
        hits, alarms = values_q.size - above_q, values_p.size - above_p
    rate = _clopper_pearson(hits, trials_hits, mistake / 2.0)[0]
    alarm = _clopper_pearson(alarms, trials_alarms, mistake / 2.0)[1]
    with np.errstate(divide="ignore", invalid="ignore"):
        shown = np.log(np.maximum(rate - delta, 0.0) / alarm)
    return shown, rate, alarm


def gaussian_epsilon(gaussian_mu: float, delta: float) -> float:
    """The epsilon at `delta` of a Gaussian mechanism whose two worlds are mu noises apart: the inverse of calibration.

    Balle & Wang's delta(epsilon, 1/mu) falls in epsilon; the root is found by bisection.

    >>> round(gaussian_epsilon(1 / 0.3501, 0.01), 2), gaussian_epsilon(0.0, 0.01)
    (10.0, 0.0)
    """
    if not gaussian_mu > 0.0 or delta_reached(0.0, 1.0 / gaussian_mu) <= delta:
        return 0.0
    if not math.isfinite(gaussian_mu):
        return math.inf
    low, high = 0.0, 1.0
    while delta_reached(high, 1.0 / gaussian_mu) > delta:
        low, high = high, 2.0 * high
        if high > 1e9:
            return math.inf
    return smallest_enough(lambda epsilon: delta_reached(epsilon, 1.0 / gaussian_mu) <= delta, low, high)
