"""Groups: the hash uses only names, and a merge is the weighted mean to the last bit."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sifu.theory.merging import KEY_BYTES, STRETCH, group_of, members_by_group, merge, move_on

NAMES = [f"client-{number:04d}" for number in range(2000)]
KEY = bytes(range(KEY_BYTES))


@given(st.sets(st.sampled_from(range(200)), min_size=1), st.sets(st.sampled_from(range(200))), st.integers(2, 12))
def test_nobody_changes_groups_when_others_leave(clients: set[int], leaving: set[int], count: int) -> None:
    before = members_by_group(KEY, NAMES, clients, count)
    after = members_by_group(KEY, NAMES, clients - leaving, count)
    assert [[client for client in group if client not in leaving] for group in before] == after


def test_groups_are_about_equal_and_depend_on_the_key() -> None:
    sizes = [len(group) for group in members_by_group(KEY, NAMES, range(2000), 10)]
    # A binomial count with mean 200 and deviation 13.4 exceeds five deviations about once in a million.
    assert all(abs(size - 200) < 5 * math.sqrt(2000 * 0.1 * 0.9) for size in sizes)
    other = bytes(KEY_BYTES)
    moved = sum(group_of(KEY, name, 10) != group_of(other, name, 10) for name in NAMES)
    assert abs(moved - 1800) < 5 * math.sqrt(2000 * 0.9 * 0.1)


@given(st.integers(0, 2**32), st.lists(st.integers(1, 1000), min_size=1, max_size=6))
def test_a_merge_is_the_weighted_mean(seed: int, samples: list[int]) -> None:
    models = list(np.random.default_rng(seed).normal(size=(len(samples), 3)))
    for column, value in enumerate(merge(models, samples)):
        exact = sum(Fraction(float(model[column])) * count for model, count in zip(models, samples, strict=True)) / sum(
            samples
        )
        largest = max(abs(model[column]) for model in models)
        assert abs(Fraction(float(value)) - exact) <= Fraction(8 * len(samples) * largest * 2**-52)


@given(st.integers(0, 2**32))
def test_a_moved_merge_is_the_line_through_fresh_and_mean(seed: int) -> None:
    mean, fresh = np.random.default_rng(seed).normal(size=(2, 5))
    moved = move_on(mean, fresh)
    for value, start, end in zip(moved.tolist(), fresh.tolist(), mean.tolist(), strict=True):
        exact = Fraction(start) + Fraction(STRETCH) * (Fraction(end) - Fraction(start))
        if exact >= 0 or min(start, end) < 0:
            assert abs(Fraction(value) - exact) <= Fraction(16 * max(abs(start), abs(end)) * 2**-52)
        else:
            assert value == end


def test_variances_stay_variances() -> None:
    """Scaling keeps variances of BatchNorm, which start at one, from becoming negative."""
    assert move_on(np.array([0.05, 0.5, -0.1]), np.array([1.0, 1.0, 1.0])).tolist() == [0.05, 0.375, -0.375]


def test_groups_without_samples_count_alike() -> None:
    assert merge([np.array([2.0]), np.array([4.0])], [0, 0]) == 3.0
    with pytest.raises(ValueError, match="2 models with 1 sample counts"):
        merge([np.zeros(1), np.zeros(1)], [1])
