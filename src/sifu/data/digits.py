"""8x8 handwritten digits, shipped with this package.

The 1,797 images have pixels in 0..16 and the order of scikit-learn. They are the test part of "Optical Recognition of
Handwritten Digits" (E. Alpaydin and C. Kaynak 1998, UCI Machine Learning Repository, CC BY 4.0).
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import numpy as np

from sifu.data.dataset import Dataset
from sifu.data.npz import read_arrays, read_npz
from sifu.errors import InputError
from sifu.theory.arrays import Array, Integers

DIGITS = "digits"
FILE = Path(__file__).with_name("digits.npz")
SAMPLES, TRAIN_SAMPLES, SHAPE = 1797, 1600, (8, 8)
CLASSES = tuple(str(digit) for digit in range(10))
LARGEST = 16.0
"""Largest pixel."""


def load(name: str | Path) -> Dataset:
    """Return the digits, by their name, or the data set of an npz file, by its path."""
    if name == DIGITS:
        return read_digits()
    if not Path(name).expanduser().is_file():
        raise InputError(f"there is no file {name}: give {DIGITS!r}, or the path of an npz file with arrays x and y")
    return read_npz(Path(name).expanduser())


def largest_of(name: str) -> float | None:
    """Return the largest value of a stored byte of the data set that a spec names, or None."""
    return LARGEST if name == DIGITS else None


def read_digits() -> Dataset:
    """Return the digits with a fixed split into 1,600 training and 197 test images."""
    images, labels = stored_digits()
    order = fixed_order()
    train, test = order[:TRAIN_SAMPLES], order[TRAIN_SAMPLES:]
    return Dataset("digits", images[train], labels[train], images[test], labels[test], CLASSES, largest=LARGEST)


@cache
def stored_digits() -> tuple[Array, Integers]:
    """Return the images, as bytes of shape (1797, 8, 8), and their labels, in the order of the file."""
    arrays = read_arrays(FILE)
    return arrays["images"], arrays["labels"].astype(np.int64)


@cache
def fixed_order() -> Integers:
    """Return a permutation of the images that no version of numpy changes: row numbers ordered by their SHA-256."""
    order = sorted(range(SAMPLES), key=lambda row: hashlib.sha256(f"sifu digits {row}".encode()).digest())
    return np.array(order, dtype=np.int64)
