"""Public data sets: found wherever their files are; otherwise the message lists the searched folders."""

from __future__ import annotations

import gzip
import hashlib
import io

import numpy as np
import pytest

from sifu import InputError
from sifu_paper.data import load
from sifu_paper.data.download import OFFICIAL, OfficialFile
from sifu_paper.data.idx import FIRST_LABELS
from sifu_paper.data.public import WANTED, download


def write_subset(path, samples=5):
    path.parent.mkdir(parents=True, exist_ok=True)
    images, labels = np.zeros((samples, 28, 28), np.uint8), np.zeros(samples, np.uint8)
    names = [str(digit) for digit in range(10)]
    np.savez(path, x_train=images, y_train=labels, x_test=images, y_test=labels, classes=names)


@pytest.mark.parametrize("place", ["", "mnist", "MNIST/raw"])
def test_official_files_are_found_in_the_folder_and_below(tmp_path, write_idx, place):
    write_idx(tmp_path / place)
    assert load("mnist", tmp_path).x_train.shape == (30, 28, 28)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_and_celeba_are_found(tmp_path, write_cifar, write_celeba, name):
    write_cifar(tmp_path, name, archive=True)
    write_celeba(tmp_path / "celeba")
    assert load(name, tmp_path).name == name
    assert load("celeba", tmp_path).x_train.shape == (7, 64, 64, 3)


@pytest.mark.parametrize("place", ["mnist.npz", "mnist/mnist.npz"])
def test_a_subset_is_found_and_official_files_come_first(tmp_path, write_idx, place):
    write_subset(tmp_path / place)
    assert len(load("mnist", tmp_path).y_train) == 5
    write_idx(tmp_path / "mnist")
    assert len(load("mnist", tmp_path).y_train) == 30


def test_folder_then_environment_then_cache(tmp_path, monkeypatch):
    home, environment, folder = tmp_path / "home", tmp_path / "environment", tmp_path / "folder"
    monkeypatch.setenv("HOME", str(home))
    write_subset(home / ".cache" / "sifu" / "data" / "mnist.npz", 1)
    assert len(load("mnist").y_train) == 1
    write_subset(environment / "mnist.npz", 2)
    monkeypatch.setenv("SIFU_DATA", str(environment))
    assert len(load("mnist").y_train) == 2
    folder.mkdir()
    assert len(load("mnist", folder).y_train) == 2
    write_subset(folder / "mnist.npz", 3)
    assert len(load("mnist", folder).y_train) == 3


def test_mnist_in_the_way_does_not_become_fashion_mnist(tmp_path, write_idx):
    write_idx(tmp_path, first=FIRST_LABELS["mnist"])
    with pytest.raises(InputError, match="share their file names"):
        load("fashion_mnist", tmp_path)
    write_idx(tmp_path / "fashion_mnist", first=FIRST_LABELS["fashion_mnist"])
    assert load("fashion_mnist", tmp_path).y_train[:3].tolist() == [9, 0, 0]


def test_nothing_found_says_where_and_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("SIFU_DATA", str(tmp_path / "elsewhere"))
    for name in WANTED:
        with pytest.raises(InputError) as caught:
            load(name, tmp_path)
        for part in (str(tmp_path), "elsewhere", ".cache/sifu/data", f"{name}.npz", "--data DIR", "SIFU_DATA"):
            assert part in str(caught.value)
        wanted = {"celeba": "licence", "hospitals": "archive.ics.uci.edu"}.get(name, "sifu-bench download")
        assert wanted in str(caught.value)


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(InputError, match=r"absent does not exist.*--data DIR"):
        load("mnist", tmp_path / "absent")


def test_download_goes_below_the_first_folder_and_is_read(tmp_path, write_idx, monkeypatch):
    write_idx(tmp_path / "server", gz=True)
    served = {path.name: path.read_bytes() for path in (tmp_path / "server").iterdir()}
    files = tuple(
        OfficialFile(name, ("https://example.org/",), "sha256:" + hashlib.sha256(content).hexdigest())
        for name, content in served.items()
    )
    monkeypatch.setitem(OFFICIAL, "mnist", files)
    calls, urls = [], []

    class Reply(io.BytesIO):
        headers: dict[str, str] = {}  # noqa: RUF012

    def opener(url):
        urls.append(url)
        return Reply(served[url.rpartition("/")[2]])

    folder = tmp_path / "new"
    download("mnist", folder, lambda *call: calls.append(call), opener=opener)
    read = load("mnist", folder)
    assert read.x_train.shape == (30, 28, 28)
    assert calls
    assert sorted(path.name for path in (folder / "mnist").iterdir()) == sorted(served)
    download("mnist", folder, opener=opener)
    assert len(urls) == 4  # the second call finds the files and fetches nothing


def test_celeba_cannot_be_downloaded(tmp_path):
    with pytest.raises(InputError, match="licence"):
        download("celeba", tmp_path)


def test_a_damaged_official_file_is_an_error_and_not_skipped(tmp_path, write_idx):
    write_subset(tmp_path / "mnist.npz")
    write_idx(tmp_path, gz=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-1]))
    with pytest.raises(InputError, match="train-images"):
        load("mnist", tmp_path)
