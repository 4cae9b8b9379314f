"""One numpy file: a user's own arrays, our subsets, mosaics; never a pickle."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sifu.data import npz
from sifu.data.npz import read_npz
from sifu.errors import InputError

X = np.arange(12.0).reshape(6, 2)
Y = np.array([0, 1, 2, 0, 1, 2])


def save(tmp_path, **arrays):
    path = tmp_path / "own.npz"
    np.savez(path, **arrays)
    return path


def test_own_arrays_with_clients(tmp_path):
    clients = np.array(["north", "south", "north", "east", "east", "south"])
    read = read_npz(save(tmp_path, x=X, y=Y, client=clients))
    np.testing.assert_array_equal(read.x_train, X)
    np.testing.assert_array_equal(read.client_train, clients)
    assert read.name == "npz:own"
    assert read.classes == ("0", "1", "2")
    assert read.x_test.shape == (0, 2)


def test_own_arrays_with_a_test_part_and_class_names(tmp_path):
    read = read_npz(save(tmp_path, x=X, y=Y.astype(np.uint8), x_test=X[:2], y_test=Y[:2], classes=["a", "b", "c"]))
    assert read.classes == ("a", "b", "c")
    assert read.y_train.dtype == np.int64
    np.testing.assert_array_equal(read.features("test"), X[:2])


def test_float_labels_mean_regression(tmp_path):
    read = read_npz(save(tmp_path, x=X, y=Y / 2.0))
    assert read.classes == ()
    assert read.y_train.dtype == np.float64


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X}, "has an array x but no y"),
        ({"x_train": X, "y_train": Y}, "has no array 'x_test'"),
        ({"x": X, "y": Y, "x_test": X}, "only one of x_test and y_test"),
        ({"x": X, "y": Y[:3]}, "6 samples in x_train but 3 labels"),
        ({"x": np.where(X > 9, np.nan, X), "y": Y}, "x_train of data set 'npz:own' holds 2 values that are NaN"),
        ({"x": X, "y": Y - 1}, "run from -1 to 1"),
        ({"x": X, "y": Y * 10**9}, "class number 2000000000"),
        ({"x": X, "y": np.array(list("abcabc"))}, "array of real numbers"),
        ({"x": X, "y": Y, "client": Y[:2]}, r"client_train .* shape \(2,\)"),
        ({"x": X, "y": np.array([{}] * 6)}, "holds Python objects"),
        ({"tile": np.array([8, 8, 3])}, "no cols"),
        ({"tile": np.array([8, 8, 2]), "cols": np.array([1, 1])}, r"tile \[8, 8, 2\]"),
        ({"tile": np.array([8, 8, 3]), "cols": np.array([1, 1])}, "not both x_train_img and y_train"),
    ],
)
def test_bad_arrays_are_refused_with_what_was_found(tmp_path, arrays, message):
    with pytest.raises(InputError, match=message):
        read_npz(save(tmp_path, **arrays))


def test_damaged_files_are_refused(tmp_path):
    path = save(tmp_path, x=X, y=Y)
    whole = path.read_bytes()
    for content in (b"", b"not a zip", whole[: len(whole) // 2], whole[:150] + b"\xff" * 40 + whole[190:]):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"own\.npz"):
            read_npz(path)
    with pytest.raises(InputError, match="not a readable npz"):
        read_npz(tmp_path / "absent.npz")


def test_a_header_that_claims_more_than_is_there_is_refused_before_allocation(tmp_path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (10**13, 2)})
    path = tmp_path / "huge.npz"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x.npy", header.getvalue() + bytes(16))
    with pytest.raises(InputError, match="claims 160000000000000 bytes, but 16 are there"):
        read_npz(path)


def test_a_file_too_large_when_unpacked_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("sifu.data.npz.LARGEST_FILE", 100)
    with pytest.raises(InputError, match="unpacks to more than 100 bytes"):
        read_npz(save(tmp_path, x=X, y=Y))


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
    read = read_npz(save(tmp_path, **arrays), "cifar10")
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
            read_npz(save(tmp_path, **(arrays | change)), "cifar10")


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
    read = read_npz(shared_data / f"{name}.npz", name)
    assert (read.x_train.shape, len(read.y_test), len(read.classes)) == (shape, tests, classes)
    assert read.x_train.dtype == np.uint8
    if name != "celeba":
        assert (np.bincount(read.y_train) == 10_000 // classes).all()
        # Real pixels, decoded right: the published moments hold for the subset, too.
        rows = np.arange(0, 10_000, 5)
        standard = read.features(dtype="float32", normalise="standard", rows=rows)
        assert abs(standard.mean()) < 0.03
        assert abs(standard.std() - 1) < 0.03
    else:
        assert np.unique(read.identity_train).size == 2_000
        assert not set(read.identity_train) & set(read.identity_test)


def test_a_file_that_unpacks_to_thousands_of_times_its_size_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(npz, "ALWAYS_UNPACKED", 1 << 20)
    np.savez_compressed(tmp_path / "bomb.npz", x=np.zeros((1 << 18, 8)), y=np.zeros(1 << 18, dtype=np.int64))
    with pytest.raises(InputError, match="unpacks to more than 250 times as many"):
        npz.read_npz(tmp_path / "bomb.npz")
    np.savez(tmp_path / "meant.npz", x=np.zeros((1 << 18, 8)), y=np.zeros(1 << 18, dtype=np.int64))
    assert npz.read_npz(tmp_path / "meant.npz").x_train.shape == (1 << 18, 8)
