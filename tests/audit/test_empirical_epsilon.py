"""Empirical lower bounds on epsilon: rarely above the truth, close to it if the tests are sharp, with a stated
confidence.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from sifu.audit.releases import clopper_pearson, epsilon_lower_bound
from sifu.errors import InputError
from sifu.theory.calibration import delta_reached, exact_multiplier, gaussian_epsilon
from suite_setup import examples


@given(hits=st.integers(0, 60), trials=st.integers(1, 60), mistake=st.sampled_from([0.05, 0.001, 1e-6]))
@settings(derandomize=True, max_examples=examples(200), deadline=None)
def test_clopper_pearson_is_scipys(hits: int, trials: int, mistake: float) -> None:
    hits = min(hits, trials)
    limits = tuple(float(limit[0]) for limit in clopper_pearson(np.array([hits]), trials, mistake))
    interval = stats.binomtest(hits, trials).proportion_ci(1.0 - 2.0 * mistake, method="exact")
    assert limits == pytest.approx((interval.low, interval.high), abs=1e-9)


@given(epsilon=st.floats(0.05, 30.0), delta=st.sampled_from([1e-5, 1e-2, 0.2]))
@settings(derandomize=True, max_examples=examples(100), deadline=None)
def test_gaussian_epsilon_inverts_the_calibration(epsilon: float, delta: float) -> None:
    mu = 1.0 / exact_multiplier(epsilon, delta)
    assert gaussian_epsilon(mu, delta) == pytest.approx(epsilon, rel=1e-6, abs=1e-9)
    assert delta_reached(gaussian_epsilon(mu, delta), 1.0 / mu) <= delta


def test_gaussian_epsilon_at_its_ends() -> None:
    assert gaussian_epsilon(0.0, 0.01) == 0.0
    assert gaussian_epsilon(1e-4, 0.01) == 0.0  # delta alone covers this difference


def gaussian_counterfactuals(mu: float, replays: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return generator.standard_normal(replays) + mu, generator.standard_normal(replays)


@pytest.mark.parametrize(("epsilon", "share"), [(1.0, 0.6), (3.0, 0.6), (10.0, 0.3)])
def test_a_fully_used_budget_is_nearly_shown(epsilon: float, share: float) -> None:
    counterfactuals = gaussian_counterfactuals(1.0 / exact_multiplier(epsilon, 0.01), 40_000, 3)
    shown = epsilon_lower_bound(*counterfactuals, 0.01, 0.01)
    assert share * epsilon < shown.epsilon <= epsilon


@pytest.mark.long
def test_the_bound_is_wrong_as_seldom_as_it_says() -> None:
    """At most 75 of 500 audits are wrong for a mechanism exactly at its epsilon, with an error rate of one in ten."""
    epsilon, delta, mistake = 1.0, 0.01, 0.1
    mu = 1.0 / exact_multiplier(epsilon, delta)
    wrong = sum(
        epsilon_lower_bound(*gaussian_counterfactuals(mu, 2000, seed), delta, mistake).epsilon > epsilon
        for seed in range(500)
    )
    # P(more than 75 of 500 | rate 0.1) < 2e-4
    assert wrong <= 75


@pytest.mark.long
def test_a_bound_without_a_second_half_would_be_wrong_far_too_often() -> None:
    """Negative control: thresholds chosen and evaluated on the same replays, with the plain rates, exceed the truth far
    too often.
    """
    epsilon, delta = 1.0, 0.01
    mu = 1.0 / exact_multiplier(epsilon, delta)

    def naive(seed: int) -> float:
        with_client, without = gaussian_counterfactuals(mu, 1000, seed)
        thresholds = np.concatenate([with_client, without])
        rates = np.array([((with_client > t).mean(), (without > t).mean()) for t in thresholds])
        usable = rates[:, 1] > 0
        return float(np.log(np.maximum(rates[usable, 0] - delta, 1e-12) / rates[usable, 1]).max())

    assert sum(naive(seed) > epsilon for seed in range(40)) > 20


def test_nothing_is_shown_where_there_is_nothing() -> None:
    generator = np.random.default_rng(0)
    values = generator.standard_normal((2, 5000))
    assert epsilon_lower_bound(values[0], values[1], 0.01).epsilon <= 0.1
    constant = np.zeros(100)
    assert epsilon_lower_bound(constant, constant, 0.01).epsilon == 0.0


def test_the_other_side_is_tried_too() -> None:
    with_client, without = gaussian_counterfactuals(2.0, 5000, 1)
    assert epsilon_lower_bound(-with_client, -without, 0.0).epsilon > 1.0
    rarely = np.where(np.arange(5000) % 50 < 2, 9.0, 0.0)  # occurs only without the client
    assert epsilon_lower_bound(np.zeros(5000), rarely, 0.0).side == "without"


def test_too_few_replays_are_refused() -> None:
    with pytest.raises(InputError, match="too few"):
        epsilon_lower_bound(np.zeros(10), np.zeros(10), 0.01)
