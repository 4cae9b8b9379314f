"""Watermarks: ten pixels at the maximum value, at positions specific to the client, and no other change."""

from __future__ import annotations

import numpy as np
import pytest

from sifu.core.spec import Spec
from sifu.data import Dataset, watermarked
from sifu.data.watermarks import mark_places
from sifu.errors import InputError
from sifu.run.clients_and_engine import clients_from_spec


def images(rng: np.random.Generator, shape: tuple[int, ...]) -> Dataset:
    x = rng.integers(0, 200, (12, *shape), dtype=np.uint8)
    y = np.arange(12) % 2
    return Dataset("own", x, y, x[:0], y[:0], ("a", "b"))


@pytest.mark.parametrize("shape", [(9, 7), (9, 7, 3)])
def test_only_the_marked_pixels_change_and_in_every_channel(rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    dataset = images(rng, shape)
    parts = [np.array([0, 3, 5]), np.array([1, 2])]
    marked = watermarked(dataset, parts, 4, seed=8)
    for client, rows in enumerate(parts):
        places = mark_places(8, client, 63, 4)
        mask = np.zeros((9, 7), dtype=bool)
        mask[places // 7, places % 7] = True
        assert mask.sum() == 4
        assert (marked.x_train[rows][:, mask] == 255).all()
        assert np.array_equal(marked.x_train[rows][:, ~mask], dataset.x_train[rows][:, ~mask])
    assert np.array_equal(marked.x_train[6:], dataset.x_train[6:])
    assert not np.array_equal(marked.x_train, dataset.x_train)


def test_places_depend_on_seed_and_client_and_fresh_ones_are_others() -> None:
    def key(*arguments: int, fresh: bool = False) -> tuple[int, ...]:
        return tuple(sorted(mark_places(*arguments, fresh=fresh).tolist()))

    marks = [key(1, 0, 784, 10), key(1, 1, 784, 10), key(2, 0, 784, 10), key(1, 0, 784, 10, fresh=True)]
    assert len(set(marks)) == 4
    assert key(1, 0, 784, 10) == marks[0]


def test_a_spec_marks_digits_with_their_own_maximum() -> None:
    plain = {"clients": 4, "samples_per_client": 10, "partition": "dirichlet", "alpha": 1.0}
    before = clients_from_spec(Spec.from_mapping({"data": plain}))
    after = clients_from_spec(Spec.from_mapping({"data": plain | {"watermark": 10}}))
    for plain_client, other in zip(before, after, strict=True):
        assert np.array_equal(plain_client.y, other.y)
        assert ((other.x == 1.0).all(axis=0)).sum() >= 10  # 16 of 16, scaled to 1
        assert (plain_client.x != other.x).any(axis=0).sum() <= 10


@pytest.mark.parametrize("pixels", [0, 64])
def test_an_impossible_number_of_pixels_is_refused(rng: np.random.Generator, pixels: int) -> None:
    with pytest.raises(InputError, match="1 to 63 pixels"):
        watermarked(images(rng, (9, 7)), [np.array([0])], pixels, seed=1)


def test_features_that_are_no_images_are_refused(rng: np.random.Generator) -> None:
    x = rng.random((6, 5))
    dataset = Dataset("own", x, np.arange(6) % 2, x[:0], np.arange(0), ("a", "b"))
    with pytest.raises(InputError, match=r"data\.watermark = 0"):
        watermarked(dataset, [np.array([0])], 3, seed=1)
