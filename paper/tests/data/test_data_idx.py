"""MNIST's and FashionMNIST's official files: read completely, or refused."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sifu.errors import InputError
from sifu_paper.data.idx import FIRST_LABELS, find, read_idx, read_idx_dataset


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
@pytest.mark.parametrize("gz", [False, True])
def test_the_four_files_are_read_as_written(tmp_path, write_idx, name, gz):
    written = write_idx(tmp_path, gz=gz)
    read = read_idx_dataset(name, tmp_path)
    for key, array in written.items():
        np.testing.assert_array_equal(getattr(read, key), array)
    assert read.name == name
    assert len(read.classes) == 10
    assert read.y_train.dtype == np.int64


def test_names_with_a_dot_are_found(tmp_path, write_idx):
    write_idx(tmp_path)
    for path in list(tmp_path.iterdir()):
        path.rename(tmp_path / path.name.replace("-idx", ".idx"))
    assert len(read_idx_dataset("mnist", tmp_path).y_train) == 30


def test_the_labels_tell_the_two_sets_apart(tmp_path, write_idx):
    """Both sets use the same file names, and MNIST's files are not taken for FashionMNIST's."""
    write_idx(tmp_path, first=FIRST_LABELS["mnist"])
    assert find("mnist", tmp_path) is not None
    assert find("fashion_mnist", tmp_path) is None
    with pytest.raises(InputError, match="does not hold the four idx files of fashion_mnist"):
        read_idx_dataset("fashion_mnist", tmp_path)


def test_a_missing_file_means_not_found(tmp_path, write_idx):
    write_idx(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    assert find("mnist", tmp_path) is None


def test_images_and_labels_must_pair_up(tmp_path, write_idx):
    write_idx(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 7]))
    with pytest.raises(InputError, match=r"holds 30 images but .* holds 2 labels"):
        read_idx_dataset("mnist", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "starts with nothing, not 00000801"),
        (b"\x00\x00\x08\x03" + bytes(12), "starts with 00000803, not 00000801"),
        (b"\x00\x00\x0d\x01" + bytes(4), "starts with 00000d01"),
        (b"\x00\x00\x08\x01\x00\x00", "ends within its header after 6 bytes"),
        (b"\x00\x00\x08\x01\x00\x00\x00\x05abc", "should hold 5 bytes after its header .*, found 3"),
        (b"\x00\x00\x08\x01\x00\x00\x00\x02abc", "should hold 2 bytes after its header .*, found more"),
        (b"\x00\x00\x08\x01\xff\xff\xff\xff", "claims 4294967295 bytes"),
    ],
)
def test_a_file_unlike_its_header_is_refused(tmp_path, content, message):
    path = tmp_path / "labels"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_idx(path, axes=1)


def test_a_damaged_gzip_is_refused(tmp_path):
    path = tmp_path / "labels.gz"
    whole = gzip.compress(b"\x00\x00\x08\x01\x00\x00\x10\x00" + bytes(range(256)) * 16)
    for content in (b"no gzip at all", whole[: len(whole) // 2], whole[:30] + b"\xff" * 20 + whole[50:]):
        path.write_bytes(content)
        with pytest.raises(InputError):
            read_idx(path, axes=1)


def test_a_missing_path_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_idx(tmp_path / "absent", axes=1)


@settings(deadline=None)
@given(array=arrays(np.uint8, st.tuples(*[st.integers(0, 6)] * 3)), cut=st.integers(1, 12))
def test_reading_inverts_writing_and_any_cut_is_noticed(tmp_path_factory, array, cut):
    path = tmp_path_factory.mktemp("idx") / "images"
    content = bytes([0, 0, 8, 3]) + np.array(array.shape, dtype=">u4").tobytes() + array.tobytes()
    path.write_bytes(content)
    np.testing.assert_array_equal(read_idx(path, axes=3), array)
    path.write_bytes(content[:-cut])
    with pytest.raises(InputError):
        read_idx(path, axes=3)
