"""MNIST and FashionMNIST as published (four idx files, plain or gzipped).

The format (LeCun's page): two zero bytes, the element type, the number of axes, each axis as a big-endian 32-bit count,
then the elements. Both sets use the same file names, so the first labels distinguish them.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sifu import InputError
from sifu.data import Dataset

UNSIGNED_BYTE = 0x08
LARGEST_FILE = 1 << 30
"""Limit on the size of a file in bytes: idx files of these sets have at most 47 MB, and a header that claims more than
1 GiB is refused.
"""

IMAGES = {"train": "train-images-idx3-ubyte", "test": "t10k-images-idx3-ubyte"}
LABELS = {"train": "train-labels-idx1-ubyte", "test": "t10k-labels-idx1-ubyte"}
FILES = (*IMAGES.values(), *LABELS.values())

CLASSES = {
    "mnist": tuple(str(digit) for digit in range(10)),
    "fashion_mnist": (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
}
FIRST_LABELS = {
    "mnist": (5, 0, 4, 1, 9, 2, 1, 3, 1, 4),
    "fashion_mnist": (9, 0, 0, 3, 0, 2, 7, 2, 5, 5),
}
"""First labels of the official training sets."""


def find(name: str, folder: Path) -> dict[str, Path] | None:
    """Return the four files in `folder`, plain before gzipped; None if one is missing or they
    belong to the other set.
    """
    files = {}
    for file in FILES:
        # Some copies are named train-images.idx3-ubyte.
        variants = [file, f"{file}.gz", file.replace("-idx", ".idx"), file.replace("-idx", ".idx") + ".gz"]
        paths = [folder / variant for variant in variants if (folder / variant).is_file()]
        if not paths:
            return None
        files[file] = paths[0]
    start = tuple(read_idx(files[LABELS["train"]], axes=1)[:10].tolist())
    others = [other for other, labels in FIRST_LABELS.items() if other != name and labels == start]
    return None if others else files


def read_idx_dataset(name: str, folder: Path) -> Dataset:
    """Read MNIST or FashionMNIST from the four files in `folder`."""
    files = find(name, folder)
    if files is None:
        raise InputError(
            f"folder {folder} does not hold the four idx files of {name} ({', '.join(FILES)}, each plain or .gz)"
        )
    arrays = {}
    for split in ("train", "test"):
        images = read_idx(files[IMAGES[split]], axes=3)
        labels = read_idx(files[LABELS[split]], axes=1)
        if len(images) != len(labels):
            raise InputError(
                f"{files[IMAGES[split]]} holds {len(images)} images but {files[LABELS[split]]} holds "
                f"{len(labels)} labels; one of them is another set's: get both again"
            )
        arrays[split] = images, labels.astype(np.int64)
    return Dataset(name, *arrays["train"], *arrays["test"], CLASSES[name])


def read_idx(path: Path, axes: int) -> NDArray[np.uint8]:
    """Read one idx file of bytes with `axes` axes; refuse missing or extra content and a wrong header."""
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as file:
            magic = file.read(4)
            wanted = bytes([0, 0, UNSIGNED_BYTE, axes])
            if magic != wanted:
                raise InputError(
                    f"{path} starts with {magic.hex() or 'nothing'}, not {wanted.hex()}: it is not an idx file "
                    f"of bytes with {axes} axes; get it again"
                )
            header = file.read(4 * axes)
            if len(header) != 4 * axes:
                raise InputError(f"{path} ends within its header after {4 + len(header)} bytes; get it again")
            shape = tuple(int(count) for count in np.frombuffer(header, dtype=">u4"))
            size = math.prod(shape)
            if size > LARGEST_FILE:
                raise InputError(f"{path} claims {size} bytes in its header {shape}; at most {LARGEST_FILE} are read")
            content = file.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read ({error}); it is damaged or cut off: get it again") from error
    if len(content) != size:
        held = "more" if len(content) > size else str(len(content))
        raise InputError(f"{path} should hold {size} bytes after its header {shape}, found {held}; get it again")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape).copy()
