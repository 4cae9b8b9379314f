"""Federations of the experiments: who holds which samples, marks on images, and who asks."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from sifu.errors import InputError
from sifu_paper.federation import federation_of, requests_of
from sifu_paper.partition import marked, split
from sifu_paper.settings import PRESETS, dataset_names, settings_of

DIGITS = settings_of("digits", "table")
LABELS = np.random.default_rng(2).permutation(np.repeat(np.arange(5), 60))


@pytest.mark.parametrize("kind", ["one_class", "dirichlet", "identity"])
def test_every_client_has_its_samples_and_nobody_elses(kind: str) -> None:
    settings = replace(DIGITS, partition=kind, alpha=0.1, clients=10, samples=20)
    people = np.arange(300) // 7
    parts = split(settings, LABELS, people, seed=1)
    assert len(np.unique(np.concatenate(parts))) == sum(map(len, parts))
    if kind == "identity":  # whole people, as many as it takes
        assert all(20 <= len(rows) < 27 for rows in parts)
        assert not any(set(people[a]) & set(people[b]) for a, b in itertools.pairwise(parts))
    else:
        assert {len(rows) for rows in parts} == {20}
    classes = [len(np.unique(LABELS[rows])) for rows in parts]
    assert set(classes) == {1} if kind == "one_class" else max(classes) > 1
    assert all(map(np.array_equal, parts, split(settings, LABELS, people, seed=1)))
    if kind != "identity":
        assert not all(map(np.array_equal, parts, split(settings, LABELS, people, seed=2)))


def test_a_smaller_alpha_gives_clients_fewer_classes() -> None:
    settings = replace(DIGITS, partition="dirichlet", clients=10, samples=20)
    shares = []
    for alpha in (0.05, 100.0):
        parts = split(replace(settings, alpha=alpha), LABELS, None, seed=1)
        shares.append(np.mean([np.bincount(LABELS[rows]).max() / 20 for rows in parts]))
    assert shares[0] > 0.6 > 0.4 > shares[1]


def test_more_samples_than_there_are_cannot_be_asked_for() -> None:
    for kind, clients in (("one_class", 20), ("dirichlet", 16), ("identity", 15)):
        settings = replace(DIGITS, partition=kind, clients=clients, samples=20)
        with pytest.raises(InputError):
            split(settings, LABELS, np.arange(300) // 50, seed=1)


def test_a_mark_is_the_clients_own_and_a_fresh_one_is_another() -> None:
    images = np.zeros((4, 8, 8), dtype=np.uint8)
    parts = [np.array([0, 1]), np.array([2])]
    own, fresh = (marked(images, parts, 5, 16.0, 1, fresh=fresh) for fresh in (False, True))
    assert not own[3].any()
    assert [(image == 16).sum() for image in own[:3]] == [5, 5, 5]
    np.testing.assert_array_equal(own[0], own[1])
    assert not np.array_equal(own[0], own[2])
    assert not np.array_equal(own[0], fresh[0])
    assert not images.any()


def test_watermarked_federations_differ_in_the_marks_alone() -> None:
    federation = federation_of(replace(DIGITS, watermark=6), 1)
    plain = federation_of(DIGITS, 1)
    for client in range(3):
        assert (federation.x[client] != plain.x[client]).sum(axis=1).max() <= 6
        assert (federation.x[client] != federation.fresh[client]).sum(axis=1).max() <= 12
    assert not plain.fresh


def test_requests_are_of_one_class_if_clients_have_one_and_never_name_a_client_twice() -> None:
    federation = federation_of(DIGITS, 1)
    chosen = requests_of(federation, DIGITS, 3, 10, by_class=True, seed=1)
    classes = [{int(federation.y[client][0]) for client in clients} for clients in chosen]
    assert [len(one) for one in classes] == [1, 1, 1]
    assert len(set().union(*map(frozenset, chosen))) == 30
    assert requests_of(federation, DIGITS, 1, 10, by_class=True, seed=1, turn=1)[0] == chosen[1]
    anyone = requests_of(federation, DIGITS, 3, 10, by_class=False, seed=1)
    assert len(set().union(*map(frozenset, anyone))) == 30
    assert any(len({int(federation.y[client][0]) for client in clients}) > 1 for clients in anyone)
    with pytest.raises(InputError):
        requests_of(federation, DIGITS, 10, 10, by_class=True, seed=1)


def test_every_preset_has_settings_for_every_data_set() -> None:
    for preset in PRESETS.values():
        for name in dataset_names():
            for scale in ("paper", "smoke"):
                settings = settings_of(name, preset.training, scale)  # type: ignore[arg-type]
                assert settings.min_rounds <= settings.max_rounds
    clipped, unclipped = (settings_of("mnist", name) for name in ("authors", "authors_unclipped"))
    assert (clipped.clip, unclipped.clip, settings_of("mnist", "table").evaluate_every) == (0.5, 0.0, 1)
