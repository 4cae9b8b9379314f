"""Subsets of public data sets: arrays or mosaics in one numpy file."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from sifu import InputError
from sifu_paper.data import load
from sifu_paper.data.subset import read_subset


def save(tmp_path, **arrays):
    path = tmp_path / "own.npz"
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"tile": np.array([8, 8, 3])}, "no cols"),
        ({"tile": np.array([8, 8, 2]), "cols": np.array([1, 1])}, r"tile \[8, 8, 2\]"),
        ({"tile": np.array([8, 8, 3]), "cols": np.array([1, 1])}, "not both x_train_img and y_train"),
    ],
)
def test_bad_mosaics_are_refused_with_what_was_found(tmp_path, arrays, message):
    with pytest.raises(InputError, match=message):
        read_subset("cifar10", save(tmp_path, **arrays))


def mosaic(images, across, mode="RGB"):
    down = -(-len(images) // across)
    padded = np.zeros((down * across, *images.shape[1:]), dtype=np.uint8)
    padded[: len(images)] = images
    height, width = images.shape[1:3]
    rows = padded.reshape(down, across, height, width, -1).swapaxes(1, 2).reshape(down * height, across * width, -1)
    buffer = io.BytesIO()
    Image.fromarray(rows.squeeze() if mode == "L" else rows).save(buffer, "WEBP", lossless=True)
    return np.frombuffer(buffer.getvalue(), dtype=np.uint8)


def test_mosaics_are_cut_into_their_tiles(tmp_path, rng):
    train = rng.integers(0, 256, (12, 8, 10, 3), dtype=np.uint8)
    test = rng.integers(0, 256, (5, 8, 10, 3), dtype=np.uint8)
    arrays = {
        "x_train_img": mosaic(train, 4),
        "x_test_img": mosaic(test, 3),  # the sixth tile is empty
        "y_train": np.zeros(12, np.uint8),
        "y_test": np.zeros(5, np.uint8),
        "tile": np.array([8, 10, 3], np.uint8),
        "cols": np.array([4, 3], np.uint16),
    }
    read = read_subset("cifar10", save(tmp_path, **arrays))
    assert read.name == "cifar10"
    np.testing.assert_array_equal(read.x_train, train)
    np.testing.assert_array_equal(read.x_test, test)
    for change, message in (
        ({"cols": np.array([5, 3])}, "not 5 tiles of 10x8"),
        ({"y_train": np.zeros(8, np.uint8)}, "12 tiles for 8 labels"),
        ({"x_test_img": np.zeros(50, np.uint8)}, "not a readable image"),
        ({"x_test_img": arrays["x_test_img"][:60]}, "not a readable image"),
    ):
        with pytest.raises(InputError, match=message):
            read_subset("cifar10", save(tmp_path, **(arrays | change)))


SUBSETS = {
    "mnist": ((10_000, 28, 28), 2_000, 10),
    "fashion_mnist": ((10_000, 28, 28), 2_000, 10),
    "cifar10": ((10_000, 32, 32, 3), 1_000, 10),
    "cifar100": ((10_000, 32, 32, 3), 1_000, 100),
    "celeba": ((10_000, 64, 64, 3), 1_000, 2),
}


@pytest.mark.parametrize("name", SUBSETS)
def test_the_shared_subsets_are_read(shared_data, name):
    shape, tests, classes = SUBSETS[name]
    read = load(name, shared_data)
    assert (read.x_train.shape, len(read.y_test), len(read.classes)) == (shape, tests, classes)
    assert read.x_train.dtype == np.uint8
    if name != "celeba":
        assert (np.bincount(read.y_train) == 10_000 // classes).all()
    else:
        assert np.unique(read.client_train).size == 2_000
