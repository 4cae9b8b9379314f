"""Partitions: disjoint, of the requested sizes, and with the properties of their kinds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sifu.data.partition import even_sizes, given_clients, partition
from sifu.errors import InputError
from suite_setup import examples

BALANCED = np.repeat(np.arange(10), 100)


def generator(seed=0):
    return np.random.default_rng(seed)


def check_disjoint(parts, samples):
    taken = np.concatenate(parts)
    assert all(part.dtype == np.int64 and part.size and (np.diff(part) > 0).all() for part in parts)
    assert np.unique(taken).size == taken.size
    assert taken.min() >= 0
    assert taken.max() < samples


@settings(max_examples=examples(150), deadline=None)
@given(
    kind=st.sampled_from(["iid", "one_class", "dirichlet"]),
    class_sizes=st.lists(st.integers(5, 30), min_size=1, max_size=6),
    clients=st.integers(1, 12),
    share=st.one_of(st.none(), st.integers(1, 40)),
    alpha=st.floats(1e-4, 1e4),
    seed=st.integers(0, 2**32 - 1),
)
def test_parts_are_disjoint_and_of_the_right_size(kind, class_sizes, clients, share, alpha, seed):
    labels = generator(seed).permutation(np.repeat(np.arange(len(class_sizes)), class_sizes))
    per_class = np.bincount(np.arange(clients) * len(class_sizes) // clients, minlength=len(class_sizes))
    pools = [(per_class[k], size) for k, size in enumerate(class_sizes)] if kind == "one_class" else []
    if any(sharers * (share or 1) > size for sharers, size in [*pools, (clients, labels.size)]):
        with pytest.raises(
            InputError, match=r"\d+ .*(but \d+ are available|there are \d+ samples|each (client )?needs at least one)"
        ):
            partition(kind, labels, clients, share, generator(seed), alpha=alpha)
        return
    parts = partition(kind, labels, clients, share, generator(seed), alpha=alpha)
    assert len(parts) == clients
    check_disjoint(parts, labels.size)
    if share is not None:
        assert {part.size for part in parts} == {share}
    elif kind != "one_class":
        assert sorted(part.size for part in parts) == sorted(even_sizes(labels.size, clients))


@pytest.mark.parametrize("kind", ["iid", "one_class", "dirichlet"])
def test_the_generator_alone_decides(kind):
    first, same, other = (partition(kind, BALANCED, 20, 10, generator(s), alpha=0.5) for s in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, same, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_iid_clients_see_all_classes_alike():
    """100 draws of 1,000 from 10 balanced classes: a class count has mean 10, deviation at most 3."""
    parts = partition("iid", BALANCED, 10, 100, generator(3))
    counts = np.array([np.bincount(BALANCED[part], minlength=10) for part in parts])
    assert (abs(counts - 10) <= 5 * 3).all()
    assert counts.min() > 0


@pytest.mark.parametrize(("clients", "share"), [(100, 10), (10, 100), (20, None), (5, 50), (15, 20)])
def test_one_class_is_pure_and_classes_are_spread_evenly(clients, share):
    parts = partition("one_class", BALANCED, clients, share, generator())
    check_disjoint(parts, BALANCED.size)
    classes = [np.unique(BALANCED[part]) for part in parts]
    assert all(held.size == 1 for held in classes)
    clients_of_class = np.bincount([int(held[0]) for held in classes], minlength=10)
    if clients >= 10:
        assert clients_of_class.max() - clients_of_class.min() <= 1
    else:
        assert clients_of_class.max() == 1


def test_one_class_holds_when_class_numbers_have_gaps():
    labels = np.repeat([3, 7, 90], 20)
    parts = partition("one_class", labels, 6, 10, generator())
    assert [int(labels[part][0]) for part in parts] == [3, 3, 7, 7, 90, 90]


def test_dirichlet_is_nearly_iid_for_large_alpha_and_nearly_one_class_for_small():
    labels = np.repeat(np.arange(10), 1000)

    def largest_shares(alpha):
        parts = partition("dirichlet", labels, 20, 100, generator(5), alpha=alpha)
        return np.array([np.bincount(labels[part], minlength=10).max() / part.size for part in parts])

    assert largest_shares(1e5).mean() < 0.25
    assert np.median(largest_shares(1e-3)) > 0.95


def test_dirichlet_proportions_have_the_moments_of_the_distribution():
    """Each share of Dirichlet(alpha, 10 classes) has variance p(1-p)/(10 alpha + 1), p = 1/10, plus sampling.

    With pools that stay far from empty and 500 clients of 200 samples, the variance of a share is p(1-p) * (1/(10 alpha
    + 1) * (1 - 1/200) + 1/200). The relative error of a variance over 5,000 correlated shares stays below 15 %; the
    control (half of alpha) is off by 60 % and must fail.
    """
    labels = np.repeat(np.arange(10), 60_000)
    alpha = 0.5

    def expected(alpha):
        spread = 1 / (10 * alpha + 1)
        return 0.09 * (spread * (1 - 1 / 200) + 1 / 200)

    parts = partition("dirichlet", labels, 500, 200, generator(11), alpha=alpha)
    shares = np.array([np.bincount(labels[part], minlength=10) / 200 for part in parts])
    variance = ((shares - 0.1) ** 2).mean()
    assert abs(variance / expected(alpha) - 1) < 0.15
    assert abs(variance / expected(alpha / 2) - 1) > 0.15
    np.testing.assert_allclose(shares.mean(axis=0), 0.1, atol=5 * np.sqrt(expected(alpha) / 500))


def test_dirichlet_uses_other_classes_when_a_pool_is_empty():
    parts = partition("dirichlet", BALANCED, 10, 100, generator(), alpha=1e-3)
    check_disjoint(parts, BALANCED.size)
    assert np.concatenate(parts).size == BALANCED.size


@pytest.mark.parametrize("alpha", [1e-300, 1e308])
def test_dirichlet_survives_extreme_alphas(alpha):
    check_disjoint(partition("dirichlet", BALANCED, 7, 30, generator(), alpha=alpha), BALANCED.size)


def test_given_ids_are_kept_in_sorted_order():
    ids = np.array(["south", "north", "south", "east"])
    names, parts = given_clients(ids)
    assert [part.tolist() for part in parts] == [[3], [1], [0, 2]]
    assert names == ("east", "north", "south")
    with pytest.raises(InputError, match="1 samples have a client that is NaN"):
        given_clients(np.array([0.0, np.nan]))


@pytest.mark.parametrize(
    ("kind", "clients", "share", "more", "message"),
    [
        ("iid", 11, 100, {}, "1100 samples are requested, but 1000 are available"),
        ("dirichlet", 11, 100, {"alpha": 1.0}, "1100 samples are requested, but 1000 are available"),
        ("one_class", 20, 51, {}, "102 samples of class 0 for 2 clients are requested, but 100 are available"),
        ("iid", 1001, None, {}, "1001 clients are requested, but there are 1000 samples"),
    ],
)
def test_what_cannot_be_split_is_refused_with_numbers(kind, clients, share, more, message):
    with pytest.raises(InputError, match=message):
        partition(kind, BALANCED, clients, share, generator(), **more)


def test_classes_with_fewer_samples_than_clients_are_refused():
    with pytest.raises(InputError, match="class 1 has 1 samples for 2 clients"):
        partition("one_class", np.array([0, 0, 0, 1]), 4, None, generator())


@pytest.mark.parametrize("kind", ["one_class", "dirichlet"])
def test_regression_labels_have_no_classes(kind):
    with pytest.raises(InputError, match="use iid for regression"):
        partition(kind, np.linspace(0, 1, 50), 2, 5, generator(), alpha=1.0)
    assert len(partition("iid", np.linspace(0, 1, 50), 2, 5, generator())) == 2
