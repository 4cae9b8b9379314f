"""What noise added to every update while training promises a client, over all rounds together.

Round n averages the clipped updates c_i of its participants S, each with its own noise (docs/theory.md, section 10):

    theta' = theta + g sum_i w_i (c_i + z C xi_i),      ||c_i|| <= C,  xi_i standard normal.

Without W (the same schedule, W absent, its slots not refilled, the noise of the same size) the other weights
become w_i/(1 - w_W), so the mean of the c_i moves by sum_{W} w_c c_c - w_W/(1 - w_W) sum_{S\\W} w_i c_i, at most
2 w_W C. The total noise is N(0, (z C)^2 sum_i w_i^2 I) in both worlds. Given theta, which is released anyway, a
round is therefore a Gaussian mechanism of ratio

    mu_n = (2 w_W + (M + 8) 2^-51) / (z sqrt(sum_i w_i^2)),      0 where W did not take part,

the second term covering the rounding of two float64 sums of M clipped updates. All rounds together, chosen
adaptively, are one Gaussian mechanism of ratio sqrt(sum_n mu_n^2) (Gaussian DP; Dong, Roth & Su 2022), exactly.
No regularity of the loss is needed: the bound on ||c_i|| holds for any model.

**Which rounds.** Certificates are about the plan that was carried out, participation included. So the rounds that W
really took part in are composed, all of them, also those cut off later; sampling is not counted as amplification.
It could not be: the averages are divided by the samples of those who came, so a client's absence shows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sifu.choices import Calibration
from sifu.theory.arrays import Floats, Integers
from sifu.theory.calibration import check_budget, delta_reached_up, smallest_enough, stated_delta
from sifu.theory.rounding import UNIT_ROUNDOFF, slack

SUM_ROUNDING = 4.0 * UNIT_ROUNDOFF
_UP = slack(2**12)


@dataclass(frozen=True)
class TrainingNoise:
    """What the noise of training promises the clients of a request, the largest over its subjects.

    `epsilon_one_round` looks at one update and one round, as the paper does; a certificate may only state
    `epsilon_composed`, of all rounds together. Both are at the request's delta, `delta_composed` is at its epsilon.
    """

    clip: float
    noise: float
    counted_rounds: int
    epsilon_one_round: float
    epsilon_composed: float
    delta_composed: float


def composed_ratio(
    own: Integers,
    totals: Integers,
    square_sums: Floats,
    participants: Integers,
    noise: float,
) -> float:
    """mu of all rounds together, rounded up.

    For each round W took part in: its samples n_W, N, sum_i n_i^2, and M.

    >>> one = composed_ratio(np.array([1]), np.array([4]), np.array([4.0]), np.array([4]), 2.0)
    >>> round(one, 9)
    0.5
    """
    if own.size == 0:
        return 0.0
    shares = 2.0 * own / totals + (participants + 8) * SUM_ROUNDING
    ratios = shares * totals / (noise * np.sqrt(square_sums))
    return float(np.sqrt(np.sum(ratios**2))) * _UP


def gaussian_epsilon(ratio: float, delta: float) -> float:
    """The smallest epsilon for which a Gaussian mechanism of this ratio mu is (epsilon, delta)-DP, rounded up.

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


def one_round_epsilon(noise: float, delta: float, calibration: Calibration) -> float:
    """The paper's figure: epsilon of one noised update on its own, as if training had one round.

    >>> round(one_round_epsilon(1.0, 0.01, "classical"), 5)
    3.10751
    """
    if calibration == "classical":
        return math.sqrt(2.0 * math.log(1.25 / delta)) / noise
    return gaussian_epsilon(1.0 / noise, delta)


def promise_of(
    ratio: float, rounds: int, clip: float, noise: float, epsilon: float, delta: float, calibration: Calibration
) -> TrainingNoise:
    """What a ratio over a number of rounds means at a request's (epsilon, delta)."""
    check_budget(epsilon, delta)
    return TrainingNoise(
        clip=clip,
        noise=noise,
        counted_rounds=rounds,
        epsilon_one_round=one_round_epsilon(noise, delta, calibration),
        epsilon_composed=gaussian_epsilon(ratio, delta),
        delta_composed=stated_delta(epsilon, 1.0 / ratio) if ratio > 0.0 else 0.0,
    )
