"""Comparison of a sum with its parts by random vectors: true sums pass, and wrong ones are found."""

from __future__ import annotations

import secrets
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sifu.theory.closed_form import FixedPoint, Rows, Statistics, statistics_of, sum_check, total
from sifu.theory.closed_form.fixed_point import LARGEST_SUM
from sifu.theory.closed_form.rows import rows_of_chunks
from sifu.theory.closed_form.sum_check import SECURITY_BITS, is_sum_of, vectors_needed

FIXED = FixedPoint(features=9, outputs=2, norm=4.0)
LONG = FixedPoint(features=9, outputs=2, feature_bits=25, target_bits=20, norm=1.0)
COARSE = FixedPoint(features=3, outputs=1, feature_bits=1, target_bits=1, norm=2.0)


def parts_of(fixed: FixedPoint, seed: int, counts: list[int], *, in_rows: bool = True) -> list[Statistics | Rows]:
    parts: list[Statistics | Rows] = []
    for number, count in enumerate(counts):
        generator = np.random.default_rng([seed, number])
        phi, targets = generator.normal(size=(count, fixed.features)), generator.normal(size=(count, fixed.outputs))
        phi *= fixed.norm / np.linalg.norm(phi, axis=1, keepdims=True)
        targets *= fixed.target_norm / np.linalg.norm(targets, axis=1, keepdims=True)
        as_rows = in_rows and number % 3 != 2
        parts.append(rows_of_chunks(fixed, [(phi, targets)]) if as_rows else statistics_of(fixed, phi, targets))
    return parts


@given(
    seed=st.integers(0, 999),
    counts=st.lists(st.integers(0, 7), min_size=0, max_size=5),
    strip=st.integers(1, 12),
    fixed=st.sampled_from([FIXED, LONG, COARSE]),
    in_rows=st.booleans(),
)
def test_a_sum_passes(seed: int, counts: list[int], strip: int, fixed: FixedPoint, in_rows: bool) -> None:
    parts = parts_of(fixed, seed, counts, in_rows=in_rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sum_check, "STRIP", strip)
        assert is_sum_of(total(fixed, parts), parts)


@pytest.mark.parametrize("fixed", [FIXED, LONG, COARSE])
def test_every_word_of_a_sum_counts(fixed: FixedPoint) -> None:
    parts = parts_of(fixed, 1, [3, 4, 2])
    whole = total(fixed, parts)
    for place in range(whole.words.size):
        for difference in (1, -1, 64, 1 << 30, -(1 << 62)):
            words = whole.words.copy()
            words[place] += np.int64(difference)
            assert not is_sum_of(Statistics(fixed, words), parts), (place, difference)


def test_every_number_of_a_row_counts() -> None:
    rows, *others = parts_of(FIXED, 2, [3, 4])
    assert isinstance(rows, Rows)
    whole = total(FIXED, [rows, *others])
    for array in ("features", "targets"):
        for place in np.ndindex(getattr(rows, array).shape):
            values = getattr(rows, array).copy()
            values[place] += 1
            assert not is_sum_of(whole, [replace(rows, **{array: values}), *others])


def test_parts_that_are_missing_twice_there_or_in_another_format_are_found() -> None:
    parts = parts_of(FIXED, 3, [3, 4, 2, 5])
    whole = total(FIXED, parts)
    for wrong in (parts[1:], [*parts, parts[0]], [*parts, *parts_of(COARSE, 0, [1])], []):
        assert not is_sum_of(whole, wrong)


def test_a_number_beyond_what_samples_can_have_is_found() -> None:
    """A number beyond what samples can have could differ by a multiple of 2^64, which no vector detects."""
    (rows,) = parts_of(FIXED, 4, [1])
    assert isinstance(rows, Rows)
    long = replace(rows, features=np.full_like(rows.features, 1 << 30))
    words = total(FIXED, [rows]).words.copy()
    phi = np.append(long.features[0].astype(np.int64), FIXED.unit)
    words[:55] = [phi[row] * phi[column] for row in range(10) for column in range(row + 1)]
    words[55:75] = np.outer(phi, rows.targets[0]).ravel()
    assert not is_sum_of(Statistics(FIXED, words), [long])


@given(limit=st.integers(1, LARGEST_SUM))
def test_the_vectors_suffice_for_the_stated_probability(limit: int) -> None:
    """A vector hides a difference 2^t with probability 2^(t - 64); the number of vectors suffices for the largest t."""
    largest_power = (2 * limit).bit_length() - 1
    assert vectors_needed(limit) * (64 - largest_power) >= SECURITY_BITS
    assert (vectors_needed(limit) - 1) * (64 - largest_power) < SECURITY_BITS


@pytest.mark.system_secrets
def test_one_vector_hides_a_power_of_two_as_often_as_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a single vector misses a difference of 2^62 one time in four."""
    generator = np.random.default_rng(5)
    monkeypatch.setattr(secrets, "token_bytes", generator.bytes)
    monkeypatch.setattr(sum_check, "vectors_needed", lambda limit: 1)
    fixed = FixedPoint(features=1, outputs=1, feature_bits=24, target_bits=1, norm=1.0)
    samples = LARGEST_SUM // fixed.row_limit
    words = np.array([0, 0, 0, 0, 0, samples, 0])
    part, other = Statistics(fixed, words), words.copy()
    other[0] = 1 << 62
    passed = sum(is_sum_of(Statistics(fixed, other), [part]) for _ in range(400))
    assert 70 <= passed <= 130  # 100 expected, with a standard deviation of 8.7
    monkeypatch.undo()
    assert not any(is_sum_of(Statistics(fixed, other), [part]) for _ in range(50))


def test_vectors_that_are_known_beforehand_are_of_no_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: an attacker who knows the vectors can change the sum undetected."""
    parts = parts_of(FIXED, 6, [3])
    words = total(FIXED, parts).words.copy()
    words[0] += 1
    assert not is_sum_of(Statistics(FIXED, words), parts)
    monkeypatch.setattr(secrets, "token_bytes", bytes)
    assert is_sum_of(Statistics(FIXED, words), parts)
