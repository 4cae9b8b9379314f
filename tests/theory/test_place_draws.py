"""Draws by place, against splitmix64 written in Python integers."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sifu.theory.participation import (
    Participation,
    Places,
    base_key,
    fraction_limit,
    fractions,
    place_key,
    scores,
    scores_below,
    smallest_scores,
)
from suite_setup import examples

WORD = 2**64


def mixed(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % WORD
    return value ^ (value >> 31)


def score(key: int, index: int) -> int:
    return mixed((key + 0x9E3779B97F4A7C15 * (index + 1)) % WORD)


def key_of(seed: int, purpose: str, *place: int) -> int:
    key = int.from_bytes(hashlib.sha256(f"{seed}:{purpose}".encode()).digest()[:8], "little")
    for part in place:
        key = score(key, part)
    return key


@given(st.integers(0, 2**63), st.lists(st.integers(0, 10**9), max_size=4), st.lists(st.integers(0, 10**9), min_size=1))
def test_keys_and_scores_are_those_of_plain_integers(seed: int, place: list[int], indices: list[int]) -> None:
    key = place_key(base_key(seed, "batches"), *place)
    assert int(key) == key_of(seed, "batches", *place)
    assert scores(key, np.array(indices)).tolist() == [score(int(key), index) for index in indices]


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 7, 300, 16384, 16385, 40_000]), st.floats(0.0, 1.0))
def test_the_short_cut_finds_exactly_what_is_below(seed: int, count: int, fraction: float) -> None:
    index = np.arange(count) * 3 + 1
    key = place_key(base_key(seed, "participation"), 0, seed)
    drawn = scores(key, index)
    places, below = scores_below(key, Places.of(index), fraction_limit(fraction))
    assert (places == np.flatnonzero(fractions(drawn) < fraction)).all()
    assert (below == drawn[places]).all()
    for limit in (0, 1, int(drawn[0]), int(drawn[0]) + 1, WORD - 1, WORD):
        expected = [place for place, score in enumerate(drawn.tolist()[:300]) if score < limit]
        assert scores_below(key, Places.of(index[:300]), limit)[0].tolist() == expected


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3000) | st.integers(4090, 9000), st.integers(1, 500))
def test_the_smallest_are_the_smallest(seed: int, size: int, count: int) -> None:
    index = np.arange(size) * 2
    key = place_key(base_key(seed, "participation"), 1, 2)
    expected = sorted(np.argsort(scores(key, index), kind="stable")[:count].tolist())
    assert smallest_scores(key, Places.of(index), count).tolist() == expected
    assert Participation("fixed", count=count).draw(index, key).tolist() == [2 * place for place in expected]


def test_when_too_few_are_below_everybody_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    import sifu.theory.participation as draws

    index, key = np.arange(10_000), place_key(base_key(0, "participation"), 0, 0)
    expected = smallest_scores(key, Places.of(index), 100)
    monkeypatch.setattr(draws, "fraction_limit", lambda fraction: 1)
    assert (smallest_scores(key, Places.of(index), 100) == expected).all()


@pytest.mark.parametrize("size", [10, 10_000])
def test_ties_go_to_earlier_places(size: int) -> None:
    numbers = np.zeros(size, dtype=np.int64)
    assert smallest_scores(place_key(0, 1), Places.of(np.arange(size), numbers), 4).tolist() == [0, 1, 2, 3]


def test_golden_participants() -> None:
    """Golden: any other implementation of the draws must find these participants."""
    key = place_key(base_key(1, "participation"), 0, 0)
    assert int(key) == key_of(1, "participation", 0, 0)
    everyone = np.arange(1000)
    ranked = sorted(range(1000), key=lambda index: (score(int(key), index), index))
    assert Participation("fixed", count=5).draw(everyone, key).tolist() == sorted(ranked[:5])
    below = [index for index in range(1000) if (score(int(key), index) >> 11) * 2.0**-53 < 0.01]
    assert Participation("poisson", rate=0.01).draw(everyone, key).tolist() == below


def test_places_are_copied_and_give_the_same_draws() -> None:
    index, key = np.arange(0, 3000, 3), place_key(base_key(3, "participation"), 0, 9)
    places = Places.of(index)
    for rule in (Participation("all"), Participation("fixed", count=20), Participation("poisson", rate=0.1)):
        expected = rule.draw(index, key)
        assert rule.draw(places, key).tolist() == expected.tolist() == rule.draw(index[::-1], key).tolist()
    index[:] = 0
    assert places.index[-1] == 2997
