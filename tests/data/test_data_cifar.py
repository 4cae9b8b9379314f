"""CIFAR's pickled batches: read without ever running what they say."""

from __future__ import annotations

import contextlib
import os
import pickle
import tarfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sifu.data.cifar import find, read_cifar, restricted_load
from sifu.errors import InputError


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("python2", [True, False])
@pytest.mark.parametrize("archive", [True, False])
def test_batches_are_read_as_written(tmp_path, write_cifar, name, python2, archive):
    written = write_cifar(tmp_path, name, python2=python2, archive=archive)
    read = read_cifar(name, find(name, tmp_path))
    samples = 20 if name == "cifar10" else 4
    assert read.x_train.shape == (samples, 32, 32, 3)
    assert read.classes[3] == "class 3"
    for split in ("train", "test"):
        np.testing.assert_array_equal(getattr(read, f"y_{split}"), written[f"y_{split}"])
        # Rows of a batch are the three channels one after another, the order of flat features.
        flat = read.features(split, flat=True)
        np.testing.assert_array_equal(flat, written[f"x_{split}"] / 255.0)


def test_the_folder_of_the_batches_itself_is_found(tmp_path, write_cifar):
    write_cifar(tmp_path, "cifar10")
    inner = tmp_path / "cifar-10-batches-py"
    assert find("cifar10", inner) == inner
    assert find("cifar100", tmp_path) is None


class Malice:
    """Unpickles into a call of `function(*arguments)`."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_malicious_batch_is_refused_and_not_run(tmp_path, write_cifar, protocol):
    write_cifar(tmp_path, "cifar10")
    trace = tmp_path / "trace"
    batch = {"data": Malice(os.mkdir, str(trace)), "labels": [0]}
    path = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    path.write_bytes(pickle.dumps(batch, protocol=protocol))
    with pytest.raises(InputError, match=r"data_batch_3 asks for (posix|nt)\.mkdir, .* it was not run"):
        read_cifar("cifar10", find("cifar10", tmp_path))
    assert not trace.exists()
    pickle.loads(path.read_bytes())  # the control: an ordinary reader does run it
    assert trace.exists()


@pytest.mark.parametrize("function", [eval, getattr, __import__, np.load, np.frombuffer, bytearray])
def test_no_other_name_is_admitted(function):
    with pytest.raises(InputError, match="asks for"):
        restricted_load(pickle.dumps({"data": Malice(function, "x")}, protocol=2), "batch")


def test_even_admitted_names_cannot_be_changed_for_the_next_file():
    """A pickle may set attributes on what it is handed; the next file gets fresh records."""
    tampering = b"\x80\x02c_codecs\nencode\n}U\x0c__defaults__NsN\x86b."
    with pytest.raises(InputError):
        restricted_load(tampering, "batch")
    good = pickle.dumps({"data": np.zeros((1, 3072), np.uint8)}, protocol=2)
    assert restricted_load(good, "batch")["data"].shape == (1, 3072)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([1, 2], "holds a list, not a dictionary"),
        ({"data": np.zeros((1, 3072))}, "not two axes of bytes"),
        ({"data": np.zeros(3072, np.uint8)}, "not two axes of bytes"),
        ({"data": np.array([["x"]], dtype=object)}, "not two axes of bytes"),
        ({"data": np.zeros((1, 100), np.uint8), "labels": [1]}, r"data of shape \(1, 100\)"),
        ({"data": [[1]], "labels": [1]}, "data of shape list"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}, "2 images but 1 labels"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": ["a"]}, "no list of whole numbers"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": [10**30]}, "labels from"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": [10]}, "run from"),
        ({"data": np.zeros((1, 3072), np.uint8)}, "no list of whole numbers 'labels'"),
    ],
)
def test_a_batch_of_another_shape_is_refused(tmp_path, write_cifar, record, message):
    write_cifar(tmp_path, "cifar10")
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(pickle.dumps(record, protocol=2))
    with pytest.raises(InputError, match=message):
        read_cifar("cifar10", find("cifar10", tmp_path))


def test_an_array_with_less_content_than_its_shape_is_refused(tmp_path, write_cifar):
    write_cifar(tmp_path, "cifar10")
    path = tmp_path / "cifar-10-batches-py" / "data_batch_1"
    # The official pickles hold the row count as a 4-byte number: claim a million rows.
    content = path.read_bytes().replace(b"K\x01J\x04\x00\x00\x00", b"K\x01J\x40\x42\x0f\x00")
    path.write_bytes(content)
    with pytest.raises(InputError, match="not two axes of bytes with all its content"):
        read_cifar("cifar10", find("cifar10", tmp_path))


def test_column_major_arrays_keep_their_order():
    array = np.asfortranarray(np.arange(12, dtype=np.uint8).reshape(3, 4))
    read = restricted_load(pickle.dumps({"data": array}, protocol=2), "batch")["data"]
    np.testing.assert_array_equal(read, array)


def test_class_names_must_be_there(tmp_path, write_cifar):
    write_cifar(tmp_path, "cifar100")
    (tmp_path / "cifar-100-python" / "meta").write_bytes(pickle.dumps({"coarse_label_names": []}, protocol=2))
    with pytest.raises(InputError, match="no list of strings 'fine_label_names'"):
        read_cifar("cifar100", find("cifar100", tmp_path))


def test_a_cut_or_foreign_archive_is_refused(tmp_path, write_cifar):
    write_cifar(tmp_path, "cifar10", archive=True)
    path = tmp_path / "cifar-10-python.tar.gz"
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"no archive", b""):
        path.write_bytes(content)
        with pytest.raises(InputError):
            read_cifar("cifar10", path)
    with tarfile.open(path, "w:gz"):
        pass
    with pytest.raises(InputError, match="has no cifar-10-batches-py/data_batch_1"):
        read_cifar("cifar10", path)


def test_an_oversized_batch_is_refused_before_it_is_read(tmp_path, write_cifar, monkeypatch):
    write_cifar(tmp_path, "cifar10")
    monkeypatch.setattr("sifu.data.cifar.LARGEST_BATCH", 100)
    with pytest.raises(InputError, match="bytes; an official batch has at most 100"):
        read_cifar("cifar10", find("cifar10", tmp_path))


GOOD_BATCH = pickle.dumps({"data": np.zeros((1, 12), np.uint8), "labels": [3]}, protocol=2)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(GOOD_BATCH) - 1), st.binary(min_size=1, max_size=4))
def test_damage_anywhere_is_read_or_refused_but_never_another_error(position, noise):
    damaged = GOOD_BATCH[:position] + noise + GOOD_BATCH[position + len(noise) :]
    with contextlib.suppress(InputError):
        restricted_load(damaged, "batch")


def test_a_memory_bomb_of_ten_bytes_is_refused_at_once():
    """LONG_BINPUT with a large slot makes Python's unpickler fill a table of gigabytes."""
    with pytest.raises(InputError, match="slot 2147483632"):
        restricted_load(b"\x80\x02Nr\xf0\xff\xff\x7f.", "batch")
