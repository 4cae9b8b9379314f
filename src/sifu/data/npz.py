"""Data sets in a user's own npz files.

The file has `x` and `y`, and optionally `client` (the client of each sample), `x_test`, `y_test` and `classes`. Or it
has `x_train`, `y_train`, `x_test` and `y_test`, and optionally `classes`. Nothing is ever unpickled.
"""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np

from sifu.data.dataset import Dataset
from sifu.errors import InputError
from sifu.theory.arrays import Array

LARGEST_FILE = 16 << 30
"""Largest total size of the unpacked arrays of a file, in bytes."""

LARGEST_RATIO = 250
"""Largest ratio of unpacked to stored bytes. Real data stay far below it; an array of zeros reaches a thousand."""
ALWAYS_UNPACKED = 256 << 20
"""Unpacked size up to which `LARGEST_RATIO` does not apply, in bytes."""

MOST_CLASSES = 100_000
REAL_KINDS = "biuf"
"""Kinds of arrays that hold real numbers: booleans, integers, floats."""


def read_npz(path: Path) -> Dataset:
    """Return the data set of a user's own file."""
    return dataset_of(read_arrays(path), path, f"npz:{path.stem}")


def dataset_of(arrays: dict[str, Array], path: Path, name: str) -> Dataset:
    """Return the data set made of a file's arrays."""
    _check_samples(arrays, path)
    if "x" in arrays:
        arrays = _as_training(arrays, path)
    missing = [key for key in ("x_train", "y_train", "x_test", "y_test") if key not in arrays]
    if missing:
        raise InputError(
            f"{path} has no array {missing[0]!r}; it has {', '.join(sorted(arrays)) or 'none'}. Store x and y (and "
            "client, x_test, y_test), or x_train, y_train, x_test and y_test"
        )
    y_train, y_test = _labels(arrays["y_train"]), _labels(arrays["y_test"])
    return Dataset(
        name,
        arrays["x_train"],
        y_train,
        arrays["x_test"],
        y_test,
        _classes(arrays, y_train, y_test, path),
        arrays.get("client_train"),
    )


def _as_training(arrays: dict[str, Array], path: Path) -> dict[str, Array]:
    """Return the arrays of a user's own file, renamed to `x_train`, `y_train` and so on."""
    if "y" not in arrays:
        raise InputError(f"{path} has an array x but no y; it has {', '.join(sorted(arrays))}")
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise InputError(f"{path} has only one of x_test and y_test; store both or neither")
    own = {"x_train": arrays["x"], "y_train": arrays["y"], "x_test": arrays["x"][:0], "y_test": arrays["y"][:0]}
    own |= {key: arrays[key] for key in ("x_test", "y_test", "classes") if key in arrays}
    return own | ({"client_train": arrays["client"]} if "client" in arrays else {})


def read_arrays(path: Path) -> dict[str, Array]:
    """Return all arrays of an npz file, after checking the sizes in their headers against the file."""
    if path.exists() and not path.is_file():  # reading from a pipe could block forever
        raise InputError(f"{path} is not a regular file: give an npz file, written with np.savez")
    try:
        _check_members(path)
        with np.load(path, allow_pickle=False) as stored:
            return {key: stored[key] for key in stored.files}
    except InputError:
        raise
    except Exception as error:
        # Damaged zips and headers raise many exceptions: BadZipFile, LZMAError, ValueError, EOFError...
        raise InputError(f"{path} is not a readable npz file ({error}); write it again with np.savez") from error


def stored_samples(path: Path) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape and type of one sample of a file; only the header of the array is read."""
    try:
        with zipfile.ZipFile(path) as file:
            name = next(member for member in ("x.npy", "x_train.npy") if member in file.namelist())
            with file.open(name) as stream:
                shape, dtype = _header(stream)
    except Exception as error:  # damaged files raise many exceptions, as in `read_arrays`
        raise InputError(f"{path} is not a readable npz file with x or x_train ({error})") from error
    return shape[1:], dtype


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape and type of an array, and leave the stream at its data."""
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    else:
        shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
    return shape, dtype


def _check_members(path: Path) -> None:
    """Refuse oversized files, arrays of objects, and headers with a wrong size, before anything is allocated."""
    total = 0
    with zipfile.ZipFile(path) as file:
        for member in file.infolist():
            total += member.file_size
            if total > LARGEST_FILE:
                raise InputError(f"{path} unpacks to more than {LARGEST_FILE} bytes; split it into smaller files")
            if total > max(ALWAYS_UNPACKED, LARGEST_RATIO * path.stat().st_size):
                raise InputError(
                    f"{path} has {path.stat().st_size} bytes and unpacks to more than {LARGEST_RATIO} times as many: "
                    "it could exhaust the memory. If this is intended, write it uncompressed with np.savez"
                )
            with file.open(member) as stream:
                shape, dtype = _header(stream)
                size = math.prod(shape) * dtype.itemsize
                if dtype.hasobject:
                    raise InputError(
                        f"array {member.filename} of {path} holds Python objects, which are not read for safety; store "
                        "numbers"
                    )
                if stream.tell() + size != member.file_size:
                    raise InputError(
                        f"array {member.filename} of {path} claims {size} bytes, but "
                        f"{member.file_size - stream.tell()} are present; write the file again"
                    )


def _check_samples(arrays: dict[str, Array], path: Path) -> None:
    """Refuse arrays of scalars, samples that are not real numbers, and clients that are neither text nor numbers."""
    for name in ("x", "y", "client", *(f"{part}_{split}" for part in "xy" for split in ("train", "test"))):
        if name in arrays and arrays[name].ndim == 0:
            raise InputError(f"array {name} of {path} is a single number; store one row per sample")
    for name in ("x", "x_train", "x_test"):
        if name in arrays and arrays[name].dtype.kind not in REAL_KINDS:
            raise InputError(f"array {name} of {path} holds {arrays[name].dtype}; store real numbers")
    for name in ("client", "client_train"):
        if name in arrays and arrays[name].dtype.kind not in REAL_KINDS + "U":
            raise InputError(f"array {name} of {path} holds {arrays[name].dtype}; store names as strings (dtype str)")


def _labels(y: Array) -> Array:
    """Return whole numbers as int64 and other types unchanged; `Dataset` refuses unsupported types."""
    return y.astype(np.int64) if y.dtype.kind in "biu" else y


def _classes(arrays: dict[str, Array], y: Array, y_test: Array, path: Path) -> tuple[str, ...]:
    """Return the class names stored in the file, or one name for each number up to the largest label.

    Without stored names, the number of classes depends on all clients' labels. Store `classes` if it must not depend on
    a client that may leave.
    """
    if "classes" in arrays:
        return tuple(str(label) for label in arrays["classes"].reshape(-1))
    if y.dtype.kind != "i":
        return ()
    if y.ndim == 2:  # one column for each of several labels
        return tuple(str(label) for label in range(y.shape[1]))
    largest = max((int(labels.max()) for labels in (y, y_test) if labels.size), default=-1)
    if largest >= MOST_CLASSES:
        raise InputError(f"{path} has a class number {largest}; number the classes from 0, {MOST_CLASSES} at most")
    return tuple(str(label) for label in range(largest + 1))
