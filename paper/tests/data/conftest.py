"""Writers of small files in the official formats, and the folder of the shared subsets."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture(autouse=True)
def _no_data_of_this_machine(tmp_path_factory, monkeypatch):
    """Keep SIFU_DATA and the real home directory from influencing a test."""
    monkeypatch.delenv("SIFU_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of real subsets next to the repository (or SIFU_DATA); skip the test if there is none."""
    for place in (os.environ.get("SIFU_DATA"), Path(__file__).resolve().parents[4] / "shared" / "data"):
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
    """Return a writer of four idx files: 30 training and 10 test images of 28x28, plain or gzipped."""

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


@pytest.fixture
def write_cifar(rng) -> Callable[..., dict[str, np.ndarray]]:
    """Return a writer of CIFAR-10's or CIFAR-100's binary files, 4 images each, in the official folder or a tar.gz."""

    def write(folder: Path, name: str, *, archive: bool = False) -> dict[str, np.ndarray]:
        if name == "cifar10":
            train, test = [f"data_batch_{i}.bin" for i in range(1, 6)], "test_batch.bin"
            inner, tar_name, names = "cifar-10-batches-bin", "cifar-10-binary.tar.gz", "batches.meta.txt"
            count = 10
        else:
            train, test, inner, tar_name = ["train.bin"], "test.bin", "cifar-100-binary", "cifar-100-binary.tar.gz"
            names, count = "fine_label_names.txt", 100
        files = {names: "".join(f"class_{i}\n" for i in range(count)).encode() + b"\n"}
        data = {}
        for file in [*train, test]:
            images = rng.integers(0, 256, (4, 3072), dtype=np.uint8)
            labels = rng.integers(0, count, 4, dtype=np.uint8)
            columns = [labels[:, None], images]
            if name == "cifar100":
                columns.insert(0, rng.integers(0, 20, (4, 1), dtype=np.uint8))  # the coarse label comes first
            files[file] = np.hstack(columns).tobytes()
            data[file] = images, labels
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
    """Return a writer of 12 tiny faces with the three text files; it returns name -> (smiling, identity, partition)."""

    def write(folder: Path, *, zipped: bool = True) -> dict[str, tuple[int, int, int]]:
        folder.mkdir(parents=True, exist_ok=True)
        facts, jpegs = {}, {}
        for number in range(1, 13):
            name = f"{number:06d}.jpg"
            # Two parts with different people, and one face of the validation part.
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
