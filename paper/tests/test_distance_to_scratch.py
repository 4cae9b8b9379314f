"""KLoM, the challenge's epsilon and its score: by hand, by another implementation, and with negative controls."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import entropy

from sifu_paper.distance_to_scratch import BINS, SMALLEST, forgetting_epsilons, forgetting_quality, klom

margins = st.lists(st.integers(-150_000, 150_000).map(lambda value: value / 1000), min_size=2, max_size=9)


def column(*values: float) -> np.ndarray:
    return np.array(values)[:, None]


def test_klom_counted_by_hand() -> None:
    # Range 0 to 20, so a bin for each integer: ours 3/4 in the first and 1/4 in the last, theirs half and half.
    ours, theirs = column(0.0, 0.5, 0.9, 20.0), column(0.0, 0.1, 19.5, 20.0)
    floor = SMALLEST
    sum_ = 1.0 + 18 * floor
    expected = 0.75 / sum_ * math.log(0.75 / 0.5) + 0.25 / sum_ * math.log(0.25 / 0.5)
    assert klom(ours, theirs) == pytest.approx([expected])


@settings(derandomize=True, deadline=None, max_examples=60)
@given(ours=margins, theirs=margins)
def test_klom_agrees_with_scipy(ours: list[float], theirs: list[float]) -> None:
    clipped = [np.clip(values, -100, 100) for values in (ours, theirs)]
    low, high = min(map(np.min, clipped)), max(map(np.max, clipped))
    if high - low < 1e-6:
        return
    shares = []
    for values in clipped:
        places = np.minimum(((values - low) / (high - low) * BINS).astype(int), BINS - 1)
        edges = np.linspace(low, high, BINS + 1)
        if np.any(np.min(np.abs(values[:, None] - edges[None, 1:-1]), axis=1) < 1e-9):
            return  # at a bin's edge both roundings are right
        shares.append(np.maximum(np.bincount(places, minlength=BINS) / values.size, SMALLEST))
    assert klom(column(*ours), column(*theirs)) == pytest.approx([entropy(*shares)], abs=1e-9)


def independent_epsilon(ours: list[float], theirs: list[float]) -> float:
    """Return the challenge's epsilon by brute force: every threshold, both directions, loops
    instead of sorted counts.
    """
    best = 0.0
    for threshold in {*ours, *theirs}:
        for large in (True, False):
            says = [(value > threshold) is large for value in (*ours, *theirs)]
            fnr = sum(not said for said in says[: len(ours)]) / len(ours)
            fpr = sum(says[len(ours) :]) / len(theirs)
            if fpr == 0 and fnr == 0:
                return math.inf
            if fpr == 0 or fnr == 0:
                continue
            for first, second in ((fpr, fnr), (fnr, fpr)):
                if first < 1:
                    best = max(best, math.log((1 - first) / second))
    return best


@settings(derandomize=True, deadline=None, max_examples=100)
@given(ours=margins, theirs=margins)
def test_epsilon_agrees_with_brute_force(ours: list[float], theirs: list[float]) -> None:
    assert forgetting_epsilons(column(*ours), column(*theirs)) == pytest.approx([independent_epsilon(ours, theirs)])


def test_epsilon_and_quality_counted_by_hand() -> None:
    # "Above 2.5 is unlearned" is wrong for one of four on either side: ln(0.75 / 0.25) = ln 3, which is bin 3: 2 / 2^3.
    epsilons = forgetting_epsilons(column(1.0, 3.0, 4.0, 5.0), column(0.0, 1.5, 2.0, 4.5))
    assert epsilons == pytest.approx([math.log(3)])
    assert forgetting_quality(epsilons) == 0.25
    assert forgetting_quality(np.array([0.49, 0.51, 100.0])) == pytest.approx((1 + 0.5 + 2 / 2**13) / 3)
    assert forgetting_epsilons(column(1.0, 3.0, 4.0, 5.0), column(0.0, 1.5, 2.0, 4.5), delta=0.5) == pytest.approx(
        [0.0]
    )


def test_models_that_did_not_forget_score_badly_and_others_of_the_same_kind_do_not() -> None:
    generator = np.random.default_rng(0)
    retrained = generator.normal(size=(40, 50))
    again, remembering = generator.normal(size=(40, 50)), 4.0 + generator.normal(size=(40, 50))
    assert np.median(klom(again, retrained)) < 2.0 < 4.0 < np.median(klom(remembering, retrained))
    near, far = forgetting_epsilons(again, retrained), forgetting_epsilons(remembering, retrained)
    assert np.median(near) < 1.6 < 3.0 < np.median(far)
    assert forgetting_quality(near) > 4 * forgetting_quality(far)
