"""Noise in training: the ratio of a round, its composition, and the resulting epsilon, against dp-accounting."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from sifu.theory.calibration import (
    composed_ratio,
    delta_reached,
    exact_multiplier,
    gaussian_epsilon,
    one_round_epsilon,
    promise_of,
)
from suite_setup import examples


def ratio(own: list[int], rounds: list[list[int]], noise: float) -> float:
    """Return mu of a client with `own` samples in each of these rounds, given all participants' samples."""
    return composed_ratio(
        np.array(own),
        np.array([sum(counts) for counts in rounds]),
        np.array([float(sum(n * n for n in counts)) for counts in rounds]),
        np.array([len(counts) for counts in rounds]),
        noise,
    )


@pytest.mark.parametrize("rounds", [1, 4, 100])
def test_n_rounds_are_one_with_less_noise(rounds: int) -> None:
    same = [[10] * 8] * rounds
    single = ratio([10], [[10] * 8], 2.0 / math.sqrt(rounds))
    assert ratio([10] * rounds, same, 2.0) == pytest.approx(single, rel=1e-9)
    # Eight equal clients: their joint noise is sqrt(8) times one, and the client moves the mean by at most 2/8 of C.
    assert single == pytest.approx(2 / math.sqrt(8) * math.sqrt(rounds) / 2.0, rel=1e-9)


def test_composition_agrees_with_dp_accounting() -> None:
    rounds = [[10, 20, 30, 5], [10, 10], [10, 40, 40, 40, 40], [10] * 9]
    mu = ratio([10] * 4, rounds, 3.0)
    multipliers = [3.0 * math.sqrt(sum(n * n for n in counts)) / (2 * 10) for counts in rounds]
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_SPECIAL, value_discretization_interval=1e-4)
    for multiplier in multipliers:
        accountant.compose(dp_accounting.GaussianDpEvent(multiplier), 25)
    composed = mu * 5.0  # 25 rounds of each
    assert gaussian_epsilon(composed, 1e-3) == pytest.approx(accountant.get_epsilon(1e-3), rel=1e-3)
    assert delta_reached(2.0, 1 / composed) == pytest.approx(accountant.get_delta(2.0), rel=1e-2)


@given(st.floats(0.01, 50.0), st.floats(1e-8, 0.5))
def test_epsilon_is_the_inverse_of_the_calibration(mu: float, delta: float) -> None:
    epsilon = gaussian_epsilon(mu, delta)
    assert delta_reached(epsilon, 1 / mu) <= delta
    if epsilon > 0.01:
        assert exact_multiplier(epsilon, delta) == pytest.approx(1 / mu, rel=1e-6)
        assert delta_reached(epsilon * 0.999, 1 / mu) > delta * 0.999


def test_the_papers_figure_is_not_what_holds() -> None:
    """For a hundred rounds of noise z = 2, one round looks harmless, but all together are not."""
    mu = ratio([10] * 100, [[10] * 4] * 100, 2.0)
    promised = promise_of(mu, 100, 0.5, 2.0, 10.0, 0.01, "exact")
    assert promised.epsilon_one_round < 2 < 10 < promised.epsilon_composed
    assert promised.delta_composed > 0.01
    assert one_round_epsilon(2.0, 0.01, "classical") == pytest.approx(3.10751 / 2, rel=1e-5)
    assert promise_of(0.0, 0, 0.5, 2.0, 10.0, 0.01, "exact").epsilon_composed == 0.0


def test_a_delta_is_stated_rounded_up_and_never_as_zero() -> None:
    assert delta_reached(5000.0, 1.0) == 0.0
    assert promise_of(1.0, 1, 0.5, 2.0, 5000.0, 0.01, "exact").delta_composed == 1e-10
    assert promise_of(0.0, 0, 0.5, 2.0, 5000.0, 0.01, "exact").delta_composed == 0.0
    stated = promise_of(1.0, 1, 0.5, 2.0, 1.0, 0.01, "exact").delta_composed
    assert delta_reached(1.0, 1.0) < stated < delta_reached(1.0, 1.0) * (1 + 1e-12)


def removal(updates: np.ndarray, samples: np.ndarray, gone: int) -> float:
    """Return how far the mean of the updates moves without the first `gone` clients, with the others reweighted."""
    without = samples[gone:] @ updates[gone:] / samples[gone:].sum() if gone < len(samples) else 0.0
    return float(np.linalg.norm(samples @ updates / samples.sum() - without))


@settings(max_examples=examples(200))
@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.data())
def test_a_mean_of_clipped_updates_moves_by_twice_the_weight(seed: int, count: int, data: st.DataObject) -> None:
    generator = np.random.default_rng(seed)
    gone = data.draw(st.integers(1, count))
    samples = generator.integers(1, 50, count)
    updates = generator.standard_normal((count, 3)) + data.draw(st.sampled_from([0.0, 3.0]))
    updates /= np.maximum(1.0, np.linalg.norm(updates, axis=1))[:, None]
    assert removal(updates, samples, gone) <= 2 * samples[:gone].sum() / samples.sum() * (1 + 1e-9)


def test_once_the_weight_would_not_be_enough() -> None:
    """Negative control: a client that opposes all others moves the mean by twice its weight."""
    updates, samples = np.array([[1.0], [-1.0], [-1.0], [-1.0]]), np.array([1, 1, 1, 1])
    assert removal(updates, samples, 1) == pytest.approx(2 / 4)
    assert removal(updates, samples, 1) > 1.5 / 4


def test_the_ratio_is_that_of_the_real_mechanism() -> None:
    """Along the direction in which the two noised means differ, their measured separation equals mu."""
    generator, samples, noise = np.random.default_rng(3), np.array([5, 5, 10, 20]), 1.5
    weights = samples / samples.sum()
    updates = np.array([[1.0], [-1.0], [-1.0], [-1.0]])
    draws = (noise * generator.standard_normal((200_000, 4))) @ weights
    separation = removal(updates, samples, 1) / draws.std()
    assert separation == pytest.approx(ratio([5], [samples.tolist()], noise), rel=0.01)
