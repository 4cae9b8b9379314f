"""Scikit-learn's 8x8 handwritten digits: 1,797 images that come with the package, for demos and tests."""

from __future__ import annotations

import hashlib

import numpy as np

from sifu.data.dataset import Dataset
from sifu.errors import InputError
from sifu.theory.arrays import Integers

SAMPLES = 1797
TRAIN_SAMPLES = 1600


def read_digits() -> Dataset:
    """The digits as bytes of 0..16, split into 1,600 training and 197 test images, always the same ones."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise InputError("the digits come with scikit-learn, which is not installed: pip install sifu") from error
    stored = load_digits()
    images = np.asarray(stored.images)
    if images.shape != (SAMPLES, 8, 8):
        raise InputError(f"scikit-learn's digits have shape {images.shape}, not ({SAMPLES}, 8, 8)")
    order = fixed_order(SAMPLES)
    train, test = order[:TRAIN_SAMPLES], order[TRAIN_SAMPLES:]
    x, y = images.astype(np.uint8), np.asarray(stored.target).astype(np.int64)
    return Dataset("digits", x[train], y[train], x[test], y[test], tuple(str(digit) for digit in range(10)))


def fixed_order(samples: int) -> Integers:
    """A permutation that no release of numpy can change: row numbers ordered by their SHA-256.

    >>> fixed_order(5).tolist()
    [2, 4, 1, 3, 0]
    """
    return np.array(
        sorted(range(samples), key=lambda row: hashlib.sha256(f"sifu digits {row}".encode()).digest()),
        dtype=np.int64,
    )
