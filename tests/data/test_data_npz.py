"""User arrays from one numpy file, which is never unpickled."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from sifu.data import load, npz
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
    with pytest.raises(InputError, match="claims 160000000000000 bytes, but 16 are present"):
        read_npz(path)


def test_a_file_too_large_when_unpacked_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("sifu.data.npz.LARGEST_FILE", 100)
    with pytest.raises(InputError, match="unpacks to more than 100 bytes"):
        read_npz(save(tmp_path, x=X, y=Y))


def test_a_file_that_unpacks_to_thousands_of_times_its_size_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(npz, "ALWAYS_UNPACKED", 1 << 20)
    np.savez_compressed(tmp_path / "bomb.npz", x=np.zeros((1 << 18, 8)), y=np.zeros(1 << 18, dtype=np.int64))
    with pytest.raises(InputError, match="unpacks to more than 250 times as many"):
        npz.read_npz(tmp_path / "bomb.npz")
    np.savez(tmp_path / "meant.npz", x=np.zeros((1 << 18, 8)), y=np.zeros(1 << 18, dtype=np.int64))
    assert npz.read_npz(tmp_path / "meant.npz").x_train.shape == (1 << 18, 8)


def test_a_file_is_loaded_by_its_path(tmp_path):
    path = tmp_path / "hospital.npz"
    np.savez(path, x=np.ones((3, 2)), y=[0, 1, 0])
    assert load(str(path)).name == "npz:hospital"
    with pytest.raises(InputError, match=r"there is no file .*absent\.npz"):
        load(tmp_path / "absent.npz")
