"""CIFAR-10 and CIFAR-100 as published in binary: fixed-length records, in a folder or in the official tar.gz.

A record is one label byte (CIFAR-100: the coarse label, then the fine one) and 3,072 bytes of pixels: the red channel,
the green and the blue one, each row by row. The authors' Python version of these images is a pickle, which can run
code, so this module does not read it.
"""

from __future__ import annotations

import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sifu import InputError
from sifu.data import Dataset
from sifu.theory.arrays import Integers

LARGEST_FILE = 512 << 20
"""Limit on the size of a file in bytes; the largest official one (CIFAR-100's train.bin) has 154 MB."""

IMAGE_BYTES = 3 * 32 * 32


@dataclass(frozen=True)
class Layout:
    """File layout of one of the two sets; the last of the `label_bytes` is the used label."""

    archive: str
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    class_names: str
    label_bytes: int
    classes: int


LAYOUTS = {
    "cifar10": Layout(
        archive="cifar-10-binary.tar.gz",
        folder="cifar-10-batches-bin",
        train=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        test=("test_batch.bin",),
        class_names="batches.meta.txt",
        label_bytes=1,
        classes=10,
    ),
    "cifar100": Layout(
        archive="cifar-100-binary.tar.gz",
        folder="cifar-100-binary",
        train=("train.bin",),
        test=("test.bin",),
        class_names="fine_label_names.txt",
        label_bytes=2,
        classes=100,
    ),
}


def find(name: str, folder: Path) -> Path | None:
    """Return the folder with the binary files or the archive, if `folder` is or contains one; otherwise None."""
    layout = LAYOUTS[name]
    for place in (folder, folder / layout.folder):
        if all((place / file).is_file() for file in (*layout.train, *layout.test, layout.class_names)):
            return place
    archive = folder / layout.archive
    return archive if archive.is_file() else None


def read_cifar(name: str, place: Path) -> Dataset:
    """Read CIFAR-10 or CIFAR-100 (fine labels) from a folder of binary files or from the official archive."""
    layout = LAYOUTS[name]
    wanted = (*layout.train, *layout.test, layout.class_names)
    contents = _from_folder(place, wanted) if place.is_dir() else _from_archive(place, layout, wanted)
    names = contents[layout.class_names].decode("latin1").split()
    if len(names) != layout.classes:
        raise InputError(
            f"{place}: {layout.class_names} has {len(names)} names of classes, not {layout.classes}; get it again"
        )
    splits = []
    for files in (layout.train, layout.test):
        parts = [_images_and_labels(contents[file], layout, f"{place}: {file}") for file in files]
        splits.append(np.concatenate([images for images, _ in parts]))
        splits.append(np.concatenate([labels for _, labels in parts]))
    x_train, y_train, x_test, y_test = splits
    return Dataset(name, x_train, y_train, x_test, y_test, tuple(names))


def _from_folder(folder: Path, wanted: tuple[str, ...]) -> dict[str, bytes]:
    contents = {}
    for file in wanted:
        path = folder / file
        try:
            _check_size(path.stat().st_size, str(path))
            contents[file] = path.read_bytes()
        except OSError as error:
            raise InputError(f"{path} cannot be read ({error}); extract the official archive again") from error
    return contents


def _from_archive(archive: Path, layout: Layout, wanted: tuple[str, ...]) -> dict[str, bytes]:
    """Read the wanted members into memory, without writing any to disk."""
    contents: dict[str, bytes] = {}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                folder, _, file = member.name.removeprefix("./").partition("/")
                if folder != layout.folder or file not in wanted or not member.isfile():
                    continue
                _check_size(member.size, f"{archive}: {member.name}")
                stream = tar.extractfile(member)
                contents[file] = b"" if stream is None else stream.read()
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise InputError(f"{archive} cannot be read ({error}); it is damaged or cut off: get it again") from error
    missing = [file for file in wanted if file not in contents]
    if missing:
        raise InputError(f"{archive} has no {layout.folder}/{missing[0]}; it is not the official archive")
    return contents


def _check_size(size: int, what: str) -> None:
    if size > LARGEST_FILE:
        raise InputError(f"{what} has {size} bytes; an official file has at most {LARGEST_FILE}")


def _images_and_labels(content: bytes, layout: Layout, what: str) -> tuple[NDArray[np.uint8], Integers]:
    record_bytes = layout.label_bytes + IMAGE_BYTES
    if not content or len(content) % record_bytes:
        raise InputError(
            f"{what} has {len(content)} bytes, which is not a whole number of records of {record_bytes}; get it again"
        )
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, record_bytes)
    labels = records[:, layout.label_bytes - 1].astype(np.int64)
    if labels.max() >= layout.classes:
        raise InputError(f"{what} has labels up to {labels.max()}; 0 to {layout.classes - 1} were expected")
    pixels = records[:, layout.label_bytes :].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(pixels), labels
