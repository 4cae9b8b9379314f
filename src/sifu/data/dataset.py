"""Stored data sets, the fixed constants that turn them into features, and digests of samples.

A certificate's premise is that a client influences nothing but the model's training. A mean or a scale fitted to the
clients' data would violate this premise. Features are therefore computed from constants only.

A digest of a client's samples, in order, shows whether a later command reads the data with which the run was created.
Requests for records name rows by number, so the same rows in another order are different data. If a feature map
computes a model's inputs, the original samples are digested, because not every map gives the same bits everywhere.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from sifu.errors import InputError
from sifu.theory.arrays import Array, Integers

Normalise = Literal["unit", "standard"]
Split = Literal["train", "test"]

NORMALISATIONS: tuple[Normalise, ...] = ("unit", "standard")
FEATURE_TYPES = ("float32", "float64")
MIDDLE, SPREAD = 0.5, 0.5
"""Constants of `standard`: the middle and half of the range of scaled bytes."""


@dataclass(frozen=True)
class Dataset:
    """Training and test samples as stored: bytes of images (N, H, W) or (N, H, W, C), or float features.

    Without test samples, `x_test` and `y_test` have length zero.

    Attributes:
        name: Name of the data set.
        x_train: Training samples.
        y_train: Labels of the training samples: int64 class numbers into `classes`, rows of 0 and 1 (several labels),
            or floats (regression).
        x_test: Test samples.
        y_test: Labels of the test samples.
        classes: Names of the classes, or an empty tuple for regression.
        client_train: Client of each training sample, as stated in the user's own file.
        row_ids: Identity of each training sample in the user's own file.
        client_test: Client of each test sample.
        largest: Largest value of a stored byte, or None if it is not known.
    """

    name: str
    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array
    classes: tuple[str, ...]
    client_train: Array | None = None
    row_ids: Array | None = None
    client_test: Array | None = None
    largest: float | None = None

    def __post_init__(self) -> None:
        for split in get_args(Split):
            x, y = self.raw(split)
            check_pair(f"data set {self.name!r}", x, y, f"x_{split}", f"y_{split}")
            check_labels(f"y_{split} of data set {self.name!r}", y, len(self.classes))
        if self.x_train.shape[0] == 0:
            raise InputError(f"data set {self.name!r} has no training samples; check the files it came from")
        if self.x_train.shape[1:] != self.x_test.shape[1:]:
            raise InputError(
                f"data set {self.name!r} has training samples of shape {self.x_train.shape[1:]} and test samples of "
                f"shape {self.x_test.shape[1:]}; they must agree"
            )
        for field, column, samples in (
            ("client_train", self.client_train, self.y_train.shape[0]),
            ("row_ids", self.row_ids, self.y_train.shape[0]),
            ("client_test", self.client_test, self.y_test.shape[0]),
        ):
            if column is not None and column.shape != (samples,):
                raise InputError(
                    f"{field} of data set {self.name!r} has shape {column.shape}; ({samples},) was expected, "
                    "one entry per sample"
                )

    def raw(self, split: Split) -> tuple[Array, Array]:
        """Return the stored samples and labels of a split."""
        return (self.x_train, self.y_train) if split == "train" else (self.x_test, self.y_test)

    def features(
        self,
        split: Split = "train",
        *,
        dtype: str = "float64",
        flat: bool = True,
        normalise: Normalise = "unit",
        rows: Integers | None = None,
    ) -> Array:
        """Return the model inputs of a split, or of its `rows`; see `scale_features`."""
        x = self.raw(split)[0]
        return scale_features(x if rows is None else x[rows], self.largest, dtype=dtype, flat=flat, normalise=normalise)


def scale_features(
    x: Array, largest: float | None, *, dtype: str = "float64", flat: bool = True, normalise: Normalise = "unit"
) -> Array:
    """Return stored samples as model inputs, scaled by constants only.

    Args:
        x: Samples as stored.
        largest: Largest value of a stored byte, 255 by default. Floats are unchanged.
        dtype: Type of the inputs, float32 or float64.
        flat: True to flatten each image to one row, in torch's order (C, H, W).
        normalise: `unit` divides bytes by `largest`. `standard` then subtracts `MIDDLE` and divides by `SPREAD`.

    Returns:
        One row of inputs per sample, or images (N, C, H, W) if `flat` is False.

    Raises:
        InputError: If the samples, the type or the normalisation do not fit the constants.

    >>> bytes_of = np.array([[[0, 16]]], dtype=np.uint8)
    >>> scale_features(bytes_of, 16.0), scale_features(bytes_of, 16.0, normalise="standard")
    (array([[0., 1.]]), array([[-1.,  1.]]))
    """
    if dtype not in FEATURE_TYPES:
        raise InputError(f"feature type {dtype!r} is not supported: write {' or '.join(FEATURE_TYPES)}")
    if normalise not in NORMALISATIONS:
        raise InputError(
            f"normalisation {normalise!r} is unknown: write unit (x / largest) or standard (mean and deviation)"
        )
    if largest is None and normalise != "unit":
        raise InputError(
            "these data have no published mean and deviation, so they cannot be standardised without fitting on "
            "clients' data; write normalise = unit, or standardise them beforehand by constants"
        )
    images = channels_first(x)
    if images.dtype == np.uint8:
        # Look every byte up in a table computed in float64.
        levels = np.arange(256, dtype=np.float64) / (largest or 255.0)
        levels = levels if normalise == "unit" else (levels - MIDDLE) / SPREAD
        features = np.ascontiguousarray(levels.astype(dtype)[images])
    elif largest is None:
        with np.errstate(over="ignore"):  # values that overflow float32 become Inf, which a later check refuses
            features = np.ascontiguousarray(images.astype(dtype))
    else:
        raise InputError(
            f"the data must be stored as bytes (uint8) for their constants to apply, found {images.dtype}; load other "
            "features from an npz file, by its path"
        )
    # Not -1: the size of an empty test set cannot be inferred.
    return features.reshape(features.shape[0], math.prod(features.shape[1:])) if flat else features


def channels_first(x: Array) -> Array:
    """Return images (N, H, W) or (N, H, W, C) as (N, C, H, W); rows of features (N, D) are unchanged.

    Channels are expected last, as in image files. If the last axis cannot be channels but the second can, the array is
    assumed to be (N, C, H, W) already.
    """
    if x.ndim == 3:
        return x[:, None, :, :]
    if x.ndim != 4:
        return x
    if x.shape[3] <= 4:
        return x.transpose(0, 3, 1, 2)
    if x.shape[1] <= 4:
        return x
    raise InputError(
        f"images of shape {x.shape[1:]} have no axis of 1 to 4 channels; store them as (N, H, W) or (N, H, W, C)"
    )


def check_finite(owner: str, field: str, values: Array) -> None:
    """Refuse NaN and Inf: they would spread to every client's model in the next round."""
    if not np.issubdtype(values.dtype, np.inexact):
        return
    # Blocks of rows keep the mask small for a data set of gigabytes.
    bad = sum(int((~np.isfinite(values[i : i + 4096])).sum()) for i in range(0, values.shape[0], 4096))
    if bad:
        raise InputError(
            f"{field} of {owner} holds {bad} values that are NaN or Inf out of {values.size}; remove or repair them"
        )


def check_pair(owner: str, x: Array, y: Array, x_field: str, y_field: str) -> None:
    """Refuse samples and labels that are not finite numbers, or whose numbers of rows differ."""
    for field, values in ((x_field, x), (y_field, y)):
        if values.ndim == 0 or not (
            np.issubdtype(values.dtype, np.integer) or np.issubdtype(values.dtype, np.floating)
        ):
            raise InputError(
                f"{field} of {owner} has type {values.dtype} and shape {values.shape}; an array of real "
                "numbers with one row per sample was expected"
            )
    if x.ndim < 2:
        raise InputError(f"{x_field} of {owner} has shape {x.shape}; write one feature as shape (N, 1)")
    if x.shape[0] != y.shape[0]:
        raise InputError(
            f"{owner} has {x.shape[0]} samples in {x_field} but {y.shape[0]} labels in {y_field}; the numbers must be "
            "equal"
        )
    check_finite(owner, x_field, x)
    check_finite(owner, y_field, y)


def check_labels(owner: str, y: Array, classes: int) -> None:
    """Refuse labels that do not fit the task.

    Class numbers must be in 0..classes-1, several labels per sample must be 0 or 1, and floats (regression) need
    `classes` = 0.
    """
    if np.issubdtype(y.dtype, np.floating):
        if classes:
            raise InputError(f"{owner} are {y.dtype} although {classes} classes are named; store integers")
        return
    if not classes and y.size:
        raise InputError(f"{owner} are whole numbers but no classes are named; store floats for regression")
    if y.ndim == 2 and y.shape[1] == classes and bool(np.all((y == 0) | (y == 1))):
        return
    if y.ndim != 1:
        raise InputError(
            f"{owner} have shape {y.shape}; one class number per sample was expected, or 0 and 1 for each of {classes} "
            "labels"
        )
    if y.size and (int(y.min()) < 0 or int(y.max()) >= classes):
        raise InputError(
            f"{owner} run from {int(y.min())} to {int(y.max())}; class numbers 0 to {classes - 1} were expected"
        )


PIECE_BYTES = 1 << 24
"""Number of bytes hashed at once, so that a memory-mapped or converted array is never copied as a whole."""


def sample_digest(client: Any) -> str:
    """Return the SHA-256 of the types, shapes and bytes of a client's samples and labels.

    For a client that keeps only features, the digests of its samples in `mapped_from` are hashed instead.

    >>> from types import SimpleNamespace
    >>> x, y = np.arange(6.0).reshape(3, 2), np.array([0, 1, 1])
    >>> digests = [sample_digest(SimpleNamespace(x=x[rows], y=y[rows])) for rows in ([0, 1, 2], [0, 2, 1])]
    >>> digests[0][:8], digests[0] == digests[1]
    ('43b0e34b', False)
    """
    mapped = getattr(client, "mapped_from", None)
    digest, labels = hashlib.sha256(), np.asarray(client.y)
    for values in (np.asarray(client.x) if mapped is None else mapped, labels):
        stored = values.dtype.newbyteorder("<")
        digest.update(f"{stored.str} {values.shape} ".encode())
        rows = max(1, PIECE_BYTES // max(1, values[:1].nbytes))
        for start in range(0, len(values), rows):
            digest.update(np.ascontiguousarray(values[start : start + rows], dtype=stored).data)
    return digest.hexdigest()


def row_digests(x: Array) -> Array:
    """Return the SHA-256 of each sample, as bytes of shape (N, 32), for clients that keep only features."""
    stored = x.dtype.newbyteorder("<")
    rows = (hashlib.sha256(np.ascontiguousarray(row, dtype=stored).data).digest() for row in x)
    return np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(len(x), hashlib.sha256().digest_size)
