"""Writers of small files in the official formats, and the place of the shared subsets."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def _no_data_of_this_machine(tmp_path_factory, monkeypatch):
    """Neither SIFU_DATA nor a real home may decide a test."""
    monkeypatch.delenv("SIFU_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real subsets beside the repository (or SIFU_DATA); tests that need it skip without."""
    for place in (os.environ.get("SIFU_DATA"), Path(__file__).resolve().parents[3] / "shared" / "data"):
        if place and (Path(place) / "mnist.npz").is_file():
            return Path(place)
    pytest.skip("no real subsets on this machine")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20240501)


def idx_bytes(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">u4").tobytes()
    return header + array.astype(np.uint8).tobytes()


@pytest.fixture
def write_idx(rng) -> Callable[..., dict[str, np.ndarray]]:
    """Four idx files in a folder: 30 training and 10 test images of 28x28, plain or gzipped."""

    def write(folder: Path, *, gz: bool = False, first: tuple[int, ...] = ()) -> dict[str, np.ndarray]:
        folder.mkdir(parents=True, exist_ok=True)
        arrays = {}
        for stem, split, count in (("train", "train", 30), ("t10k", "test", 10)):
            arrays[f"x_{split}"] = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
            arrays[f"y_{split}"] = rng.integers(0, 10, count, dtype=np.uint8)
            arrays[f"y_{split}"][: len(first)] = first
            for file, key in ((f"{stem}-images-idx3-ubyte", "x"), (f"{stem}-labels-idx1-ubyte", "y")):
                content = idx_bytes(arrays[f"{key}_{split}"])
                if gz:
                    (folder / f"{file}.gz").write_bytes(gzip.compress(content))
                else:
                    (folder / file).write_bytes(content)
        return arrays

    return write


def python2_batch(data: np.ndarray, labels: list[int], labels_key: str) -> bytes:
    """A batch byte for byte as Python 2's cPickle wrote the official ones (protocol 2, plain strings)."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    def number(value: int) -> bytes:
        return b"J" + value.to_bytes(4, "little", signed=True)

    raw = data.tobytes()
    dtype = b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R(K\x03" + text(b"|") + b"NNN"
    dtype += number(-1) + number(-1) + b"K\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
    array += b"(K\x01" + number(data.shape[0]) + number(data.shape[1]) + b"\x86" + dtype + b"\x89"
    array += b"T" + len(raw).to_bytes(4, "little") + raw + b"tb"
    items = text(b"data") + array
    items += text(labels_key.encode()) + b"](" + b"".join(number(label) for label in labels) + b"e"
    return b"\x80\x02}(" + items + b"u."


@pytest.fixture
def write_cifar(rng) -> Callable[..., dict[str, np.ndarray]]:
    """The batches of CIFAR-10 or CIFAR-100, 4 images each, as Python 2 or Python 3 pickles them, or in a tar.gz."""

    def write(folder: Path, name: str, *, python2: bool = True, archive: bool = False) -> dict[str, np.ndarray]:
        if name == "cifar10":
            train, test = [f"data_batch_{i}" for i in range(1, 6)], "test_batch"
            inner, tar_name, meta, count = "cifar-10-batches-py", "cifar-10-python.tar.gz", "batches.meta", 10
            labels_key, names_key = "labels", "label_names"
        else:
            train, test, inner, tar_name = ["train"], "test", "cifar-100-python", "cifar-100-python.tar.gz"
            meta, count, labels_key, names_key = "meta", 100, "fine_labels", "fine_label_names"
        files = {meta: pickle.dumps({names_key: [f"class {i}" for i in range(count)]}, protocol=2)}
        data = {}
        for file in [*train, test]:
            images = rng.integers(0, 256, (4, 3072), dtype=np.uint8)
            labels = [int(label) for label in rng.integers(0, count, 4)]
            if python2:
                files[file] = python2_batch(images, labels, labels_key)
            else:
                files[file] = pickle.dumps({b"data": images, labels_key.encode(): labels}, protocol=2)
            data[file] = images, np.array(labels)
        folder.mkdir(parents=True, exist_ok=True)
        if archive:
            with tarfile.open(folder / tar_name, "w:gz") as tar:
                for file, content in files.items():
                    member = tarfile.TarInfo(f"{inner}/{file}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        else:
            (folder / inner).mkdir()
            for file, content in files.items():
                (folder / inner / file).write_bytes(content)
        return {
            "x_train": np.concatenate([data[file][0] for file in train]),
            "y_train": np.concatenate([data[file][1] for file in train]),
            "x_test": data[test][0],
            "y_test": data[test][1],
        }

    return write


@pytest.fixture
def write_celeba(rng) -> Callable[..., dict[str, tuple[int, int, int]]]:
    """12 tiny faces with the three text files; returns name -> (smiling, identity, partition)."""

    def write(folder: Path, *, zipped: bool = True) -> dict[str, tuple[int, int, int]]:
        from PIL import Image

        folder.mkdir(parents=True, exist_ok=True)
        facts, jpegs = {}, {}
        for number in range(1, 13):
            name = f"{number:06d}.jpg"
            # Two parts of different people, and one face of the validation part.
            part = 0 if number <= 7 else 1 if number == 8 else 2
            facts[name] = (int(rng.integers(2)), 100 * part + 10 - number // 3, part)
            buffer = io.BytesIO()
            colour = tuple(int(level) for level in rng.integers(0, 256, 3))
            Image.new("RGB", (17, 21), colour).save(buffer, "JPEG", quality=95)
            jpegs[name] = buffer.getvalue()
        if zipped:
            with zipfile.ZipFile(folder / "img_align_celeba.zip", "w") as file:
                for name, content in jpegs.items():
                    file.writestr(f"img_align_celeba/{name}", content)
        else:
            (folder / "img_align_celeba").mkdir()
            for name, content in jpegs.items():
                (folder / "img_align_celeba" / name).write_bytes(content)
        rows = [f"{name}  1 {'1' if smiling else '-1'} -1" for name, (smiling, _, _) in facts.items()]
        table = "\n".join([str(len(rows)), "Male Smiling Young", *rows])
        (folder / "list_attr_celeba.txt").write_text(table + "\n")
        people = [f"{name} {identity}" for name, (_, identity, _) in facts.items()]
        (folder / "identity_CelebA.txt").write_text("\n".join(people) + "\n")
        parts = [f"{name} {part}" for name, (_, _, part) in facts.items()]
        (folder / "list_eval_partition.txt").write_text("\n".join(parts) + "\n")
        return facts

    return write
