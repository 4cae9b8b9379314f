"""Delta of one round equals the round recomputed without the client (docs/theory.md, section 3.1)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_federation import (
    Array,
    Federation,
    RoundRecord,
    largest_smoothness,
    random_clients,
    run_round,
)

from sifu.theory.tracking import client_increments

SEEDS = st.integers(0, 2**32 - 1)


def one_round(seed: int) -> tuple[RoundRecord, Array]:
    """Return a round of random clients from one common model, and the change by each removal."""
    generator = np.random.default_rng(seed)
    loss = str(generator.choice(("quadratic", "logistic", "softmax", "cosine", "tanh")))
    count = int(generator.integers(1, 7))
    clients = random_clients(generator, loss, count, 3)
    rate = float(generator.uniform(0.1, 3.0)) / largest_smoothness(loss, clients, 0)
    federation = Federation(loss, clients, rate, seed=seed, assumed=1.0)
    removed = [frozenset([i]) for i in range(count)]
    start = np.tile(generator.normal(size=federation.size), (count + 1, 1))
    after, record = run_round(federation, start, removed, range(count), 0)
    change = np.linalg.norm(after[1:] - after[0], axis=1)  # all counterfactuals start from the same model
    return record, change


@given(seed=SEEDS)
def test_delta_of_a_client_is_the_round_without_it(seed: int) -> None:
    record, change = one_round(seed)
    total = int(record.samples.sum())
    increments = client_increments(record.samples, record.drifts, total, record.mean_shift)
    np.testing.assert_allclose(increments, change, rtol=1e-9, atol=1e-13)
    assert np.all(increments >= change - 1e-13)


def test_nobody_left_is_told_by_the_counts() -> None:
    """If nobody is left, the counterfactual round does nothing; sample counts, not a tolerance, decide this."""
    counts = np.array([3])
    assert client_increments(counts, np.array([0.0]), 3, 2.0)[0] == pytest.approx(2.0)
    huge = np.array([2**40])  # w_W rounds to 1 in float32, although one sample is left
    assert client_increments(huge, np.array([1.0]), 2**40 + 1, 2.0)[0] == pytest.approx(2.0**40)


def test_rounds_of_one_client_in_one_call() -> None:
    """The same formula works along a client's history, with arrays of totals and shifts."""
    samples, drifts = np.array([2, 2, 2]), np.array([1.0, 1.0, 7.0])
    increments = client_increments(samples, drifts, np.array([4, 10, 2]), np.array([9.0, 9.0, 5.0]))
    np.testing.assert_allclose(increments, [1.0, 0.25, 5.0], rtol=1e-12)


def test_control_population_accounting_is_far_too_small() -> None:
    """Negative control: shares of the federation are (M-1)/(m-1) times too small (docs/theory.md, section 3.2)."""
    samples, drifts = np.full(5, 10), np.ones(5)
    honest = client_increments(samples, drifts, 50, 1.0)
    theirs = client_increments(samples, drifts, 1000, 1.0)
    np.testing.assert_allclose(honest / theirs, 99 / 4, rtol=1e-9)
