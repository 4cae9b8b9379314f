"""MNIST and FashionMNIST as published (four idx files, plain or gzipped), and scikit-learn's 8x8 digits.

The format (LeCun's page): two zero bytes, the element type, the number of axes, each axis as a big-endian
32-bit count, then the elements. Both sets use the same file names, so the labels say which one it is.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import zlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sifu.data.dataset import Dataset
from sifu.errors import InputError
from sifu.theory.arrays import Integers

UNSIGNED_BYTE = 0x08
LARGEST_FILE = 1 << 30
"""No idx file of these sets holds more than 47 MB; a header that claims more than 1 GiB is refused."""

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
"""How the official training labels begin."""


def find(name: str, folder: Path) -> dict[str, Path] | None:
    """The four files in `folder`, plain before gzipped, or None when one is missing or all belong elsewhere."""
    files = {}
    for file in FILES:
        # Some copies write train-images.idx3-ubyte.
        variants = [file, f"{file}.gz", file.replace("-idx", ".idx"), file.replace("-idx", ".idx") + ".gz"]
        paths = [folder / variant for variant in variants if (folder / variant).is_file()]
        if not paths:
            return None
        files[file] = paths[0]
    start = tuple(read_idx(files[LABELS["train"]], axes=1)[:10].tolist())
    others = [other for other, labels in FIRST_LABELS.items() if other != name and labels == start]
    return None if others else files


def read_idx_dataset(name: str, folder: Path) -> Dataset:
    """MNIST or FashionMNIST from the four files in `folder`."""
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
    """One idx file of bytes with `axes` axes; anything missing, left over or unlike its header is refused."""
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


SAMPLES = 1797
TRAIN_SAMPLES = 1600


def read_digits() -> Dataset:
    """The digits as bytes of 0..16, split into 1,600 training and 197 test images, always the same ones."""
    x, y = _stored_digits()
    order = fixed_order(SAMPLES)
    train, test = order[:TRAIN_SAMPLES], order[TRAIN_SAMPLES:]
    return Dataset("digits", x[train], y[train], x[test], y[test], tuple(str(digit) for digit in range(10)))


@cache
def _stored_digits() -> tuple[NDArray[np.uint8], Integers]:
    """Images and labels in scikit-learn's order; one command needs them several times."""
    package = find_spec("sklearn")
    # The file is read in milliseconds; importing scikit-learn, which brings most of scipy, takes more than a second.
    path = Path(package.origin if package and package.origin else "").parent / "datasets" / "data" / "digits.csv.gz"
    if not path.is_file():
        raise InputError(f"the digits come with scikit-learn, and there is no file {path}: pip install scikit-learn")
    rows = np.loadtxt(path, delimiter=",", dtype=np.int64)
    if rows.shape != (SAMPLES, 65):
        raise InputError(f"scikit-learn's digits have shape {rows.shape}, not ({SAMPLES}, 65)")
    return rows[:, :-1].reshape(-1, 8, 8).astype(np.uint8), rows[:, -1]


@cache
def fixed_order(samples: int) -> Integers:
    """A permutation that no release of numpy can change: row numbers ordered by their SHA-256.

    >>> fixed_order(5).tolist()
    [2, 4, 1, 3, 0]
    """
    return np.array(
        sorted(range(samples), key=lambda row: hashlib.sha256(f"sifu digits {row}".encode()).digest()),
        dtype=np.int64,
    )
