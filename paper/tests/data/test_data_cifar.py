"""CIFAR's binary files: fixed-length records, read as written or refused."""

from __future__ import annotations

import contextlib
import tarfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sifu.errors import InputError
from sifu_paper.data.cifar import find, read_cifar
from suite_setup import examples


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("archive", [True, False])
def test_files_are_read_as_written(tmp_path, write_cifar, name, archive):
    written = write_cifar(tmp_path, name, archive=archive)
    read = read_cifar(name, find(name, tmp_path))
    samples = 20 if name == "cifar10" else 4
    assert read.x_train.shape == (samples, 32, 32, 3)
    assert read.classes[3] == "class_3"
    for split in ("train", "test"):
        np.testing.assert_array_equal(getattr(read, f"y_{split}"), written[f"y_{split}"])
        # A record contains the three channels one after another, in the order of flat features.
        flat = read.features(split, flat=True)
        np.testing.assert_array_equal(flat, written[f"x_{split}"] / 255.0)


def test_the_first_pixel_of_each_channel_is_where_the_format_says(tmp_path, write_cifar):
    """A hand-made record (label 7, a red ramp, then all green 50, all blue 200) is read correctly."""
    write_cifar(tmp_path, "cifar10")
    record = bytes([7]) + bytes(i % 256 for i in range(1024)) + bytes([50]) * 1024 + bytes([200]) * 1024
    (tmp_path / "cifar-10-batches-bin" / "test_batch.bin").write_bytes(record)
    read = read_cifar("cifar10", find("cifar10", tmp_path))
    assert read.y_test.tolist() == [7]
    assert read.x_test[0, 0, 5].tolist() == [5, 50, 200]
    assert read.x_test[0, 1, 0].tolist() == [32, 50, 200]


def test_the_folder_of_the_files_itself_is_found(tmp_path, write_cifar):
    write_cifar(tmp_path, "cifar10")
    inner = tmp_path / "cifar-10-batches-bin"
    assert find("cifar10", inner) == inner
    assert find("cifar100", tmp_path) is None


def test_the_pickled_version_is_never_read(tmp_path):
    inner = tmp_path / "cifar-10-batches-py"
    inner.mkdir()
    for file in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta"):
        (inner / file).write_bytes(b"\x80\x02}.")
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"")
    assert find("cifar10", tmp_path) is None
    assert find("cifar10", inner) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 0 bytes, which is not a whole number of records of 3073"),
        (bytes(3072), "has 3072 bytes, which is not a whole number of records of 3073"),
        (bytes(3074), "has 3074 bytes, which is not a whole number"),
        (bytes([10]) + bytes(3072), "labels up to 10; 0 to 9 were expected"),
    ],
)
def test_a_file_of_another_shape_is_refused(tmp_path, write_cifar, content, message):
    write_cifar(tmp_path, "cifar10")
    (tmp_path / "cifar-10-batches-bin" / "test_batch.bin").write_bytes(content)
    with pytest.raises(InputError, match=f"test_batch.bin .*{message}"):
        read_cifar("cifar10", find("cifar10", tmp_path))


def test_class_names_must_be_there(tmp_path, write_cifar):
    write_cifar(tmp_path, "cifar100")
    (tmp_path / "cifar-100-binary" / "fine_label_names.txt").write_text("apple\n")
    with pytest.raises(InputError, match=r"fine_label_names\.txt has 1 names of classes, not 100"):
        read_cifar("cifar100", find("cifar100", tmp_path))


def test_a_cut_or_foreign_archive_is_refused(tmp_path, write_cifar):
    write_cifar(tmp_path, "cifar10", archive=True)
    path = tmp_path / "cifar-10-binary.tar.gz"
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"no archive", b""):
        path.write_bytes(content)
        with pytest.raises(InputError):
            read_cifar("cifar10", path)
    with tarfile.open(path, "w:gz"):
        pass
    with pytest.raises(InputError, match=r"has no cifar-10-batches-bin/data_batch_1\.bin"):
        read_cifar("cifar10", path)


def test_an_oversized_file_is_refused_before_it_is_read(tmp_path, write_cifar, monkeypatch):
    write_cifar(tmp_path, "cifar10")
    monkeypatch.setattr("sifu_paper.data.cifar.LARGEST_FILE", 100)
    with pytest.raises(InputError, match="bytes; an official file has at most 100"):
        read_cifar("cifar10", find("cifar10", tmp_path))


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damage_anywhere_is_read_or_refused_but_never_another_error(tmp_path, write_cifar, data):
    path = tmp_path / "cifar-10-binary.tar.gz"
    if not path.exists():
        write_cifar(tmp_path, "cifar10", archive=True)
        (tmp_path / "whole").write_bytes(path.read_bytes())
    whole = (tmp_path / "whole").read_bytes()
    position = data.draw(st.integers(0, len(whole) - 1))
    noise = data.draw(st.binary(min_size=1, max_size=4))
    path.write_bytes(whole[:position] + noise + whole[position + len(noise) :])
    with contextlib.suppress(InputError):
        read_cifar("cifar10", path)
