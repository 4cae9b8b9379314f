"""Data sets in one numpy file: our subsets of the public sets, and a user's own arrays.

A subset has `x_train y_train x_test y_test classes` (or image mosaics `x_train_img`, `x_test_img` with
`tile` and `cols`), and `identity_train`, `identity_test` for faces. A user's own file has `x` and `y`,
and may have `client` (whose sample it is), `x_test`, `y_test` and `classes`. Nothing is ever unpickled.
"""

from __future__ import annotations

import io
import math
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from sifu.data.dataset import Dataset
from sifu.errors import InputError
from sifu.theory.arrays import Array

LARGEST_FILE = 16 << 30
"""Bytes of all arrays of a file together, unpacked; more than that does not fit our memory either."""

LARGEST_RATIO = 250
"""Of unpacked to stored bytes; data with something in it stays far below, zeros reach a thousand."""
ALWAYS_UNPACKED = 256 << 20
"""Bytes that are unpacked whatever the ratio."""

MOST_CLASSES = 100_000
REAL_KINDS = "biuf"
"""Kinds of arrays that hold real numbers: booleans, integers, floats."""
LARGEST_MOSAIC = 160_000_000
"""Pixels of one mosaic: 10,000 faces of 64x64 are 41 million. Stays below Pillow's own alarm."""


def read_npz(path: Path, name: str | None = None) -> Dataset:
    """A data set from `path`; `name` says which public set a subset belongs to, None that it is a user's own."""
    arrays = read_arrays(path)
    _check_samples(arrays, path)
    own = f"npz:{path.stem}" if name is None else name
    if "x" in arrays:
        arrays = _as_training(arrays, path)
    if "tile" in arrays:
        arrays |= _open_mosaics(arrays, path)
    missing = [key for key in ("x_train", "y_train", "x_test", "y_test") if key not in arrays]
    if missing:
        raise InputError(
            f"{path} has no array {missing[0]!r}; it has {', '.join(sorted(arrays)) or 'none'}. Store x and y (and "
            "client, x_test, y_test), or x_train, y_train, x_test and y_test"
        )
    y_train, y_test = _labels(arrays["y_train"]), _labels(arrays["y_test"])
    return Dataset(
        own,
        arrays["x_train"],
        y_train,
        arrays["x_test"],
        y_test,
        _classes(arrays, y_train, y_test, path),
        _labels(arrays["identity_train"]) if "identity_train" in arrays else None,
        _labels(arrays["identity_test"]) if "identity_test" in arrays else None,
        arrays.get("client_train"),
    )


def _as_training(arrays: dict[str, Array], path: Path) -> dict[str, Array]:
    """The arrays of a user's own file under the names that those of a subset have."""
    if "y" not in arrays:
        raise InputError(f"{path} has an array x but no y; it has {', '.join(sorted(arrays))}")
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise InputError(f"{path} has only one of x_test and y_test; store both or neither")
    own = {"x_train": arrays["x"], "y_train": arrays["y"], "x_test": arrays["x"][:0], "y_test": arrays["y"][:0]}
    own |= {key: arrays[key] for key in ("x_test", "y_test", "classes") if key in arrays}
    return own | ({"client_train": arrays["client"]} if "client" in arrays else {})


def read_arrays(path: Path) -> dict[str, Array]:
    """All arrays of an npz file, after their announced sizes were compared with what the file holds."""
    if path.exists() and not path.is_file():  # reading from a pipe could block forever
        raise InputError(f"{path} is not a regular file: give an npz file, written with np.savez")
    try:
        _check_members(path)
        with np.load(path, allow_pickle=False) as stored:
            return {key: stored[key] for key in stored.files}
    except InputError:
        raise
    except Exception as error:
        # Damaged zips and headers raise nearly anything: BadZipFile, LZMAError, ValueError, EOFError...
        raise InputError(f"{path} is not a readable npz file ({error}); write it again with np.savez") from error


def stored_samples(path: Path) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of one sample of a file, read from a header alone."""
    try:
        with zipfile.ZipFile(path) as file:
            name = next(member for member in ("x.npy", "x_train.npy") if member in file.namelist())
            with file.open(name) as stream:
                shape, dtype = _header(stream)
    except Exception as error:  # as in read_arrays
        raise InputError(f"{path} is not a readable npz file with x or x_train ({error})") from error
    return shape[1:], dtype


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of an array, whose numbers follow in the stream."""
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    else:
        shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
    return shape, dtype


def _check_members(path: Path) -> None:
    """Refuse arrays of objects, and headers that claim more than their member has, before any allocation."""
    total = 0
    with zipfile.ZipFile(path) as file:
        for member in file.infolist():
            total += member.file_size
            if total > LARGEST_FILE:
                raise InputError(f"{path} unpacks to more than {LARGEST_FILE} bytes; split it into smaller files")
            if total > max(ALWAYS_UNPACKED, LARGEST_RATIO * path.stat().st_size):
                raise InputError(
                    f"{path} has {path.stat().st_size} bytes and unpacks to more than {LARGEST_RATIO} times as many: "
                    "such a file is made to fill the memory. If it is meant, write it with np.savez, not compressed"
                )
            with file.open(member) as stream:
                shape, dtype = _header(stream)
                size = math.prod(shape) * dtype.itemsize
                if dtype.hasobject:
                    raise InputError(
                        f"array {member.filename} of {path} holds Python objects, which would have to be unpickled; "
                        "store numbers"
                    )
                if stream.tell() + size != member.file_size:
                    raise InputError(
                        f"array {member.filename} of {path} claims {size} bytes, but "
                        f"{member.file_size - stream.tell()} are there; write the file again"
                    )


def _check_samples(arrays: dict[str, Array], path: Path) -> None:
    """Refuse arrays of data that are one number each, or no real numbers."""
    for name in ("x", "y", "client", *(f"{part}_{split}" for part in "xy" for split in ("train", "test"))):
        if name in arrays and arrays[name].ndim == 0:
            raise InputError(f"array {name} of {path} is one number without a dimension; store a row for each sample")
    for name in ("x", "x_train", "x_test"):
        if name in arrays and arrays[name].dtype.kind not in REAL_KINDS:
            raise InputError(f"array {name} of {path} holds {arrays[name].dtype}; store real numbers")


def _labels(y: Array) -> Array:
    """Whole numbers as int64, floats (regression) as they are; other types are refused later by name."""
    return y.astype(np.int64) if y.dtype.kind in "biu" else y


def _classes(arrays: dict[str, Array], y: Array, y_test: Array, path: Path) -> tuple[str, ...]:
    """The names stored in the file, or else one for each number up to the largest label.

    Without stored names the number of classes is read off everybody's labels. Store `classes` when even
    that much must not depend on a client that may leave.
    """
    if "classes" in arrays:
        return tuple(str(label) for label in arrays["classes"].reshape(-1))
    if y.dtype.kind != "i":
        return ()
    if y.ndim == 2:  # several labels for each sample, a column each
        return tuple(str(label) for label in range(y.shape[1]))
    largest = max((int(labels.max()) for labels in (y, y_test) if labels.size), default=-1)
    if largest >= MOST_CLASSES:
        raise InputError(f"{path} has a class number {largest}; number the classes from 0, {MOST_CLASSES} at most")
    return tuple(str(label) for label in range(largest + 1))


def _open_mosaics(arrays: dict[str, Array], path: Path) -> dict[str, Array]:
    """Each split's one big image cut into its tiles, row by row."""
    if "cols" not in arrays:
        raise InputError(f"{path} has an array tile but no cols (tiles in a row of each mosaic); write it again")
    tile, columns = (arrays[key].astype(np.int64).reshape(-1) for key in ("tile", "cols"))
    if tile.shape != (3,) or columns.shape != (2,) or (tile < 1).any() or (columns < 1).any() or tile[2] not in (1, 3):
        raise InputError(
            f"{path} has tile {tile.tolist()} and cols {columns.tolist()}; [h, w, 3] and two counts expected"
        )
    opened = {}
    for split, across in zip(("train", "test"), columns.tolist(), strict=True):
        keys = (f"x_{split}_img", f"y_{split}")
        if any(key not in arrays for key in keys):
            raise InputError(f"{path} has tiles but not both {keys[0]} and {keys[1]}; write it again")
        images = cut_mosaic(arrays[keys[0]], tile.tolist(), across, f"{keys[0]} of {path}")
        samples = len(arrays[keys[1]])
        if not 0 <= len(images) - samples < across:
            raise InputError(f"{keys[0]} of {path} has {len(images)} tiles for {samples} labels; write it again")
        opened[f"x_{split}"] = images[:samples]
    return opened


def cut_mosaic(content: Array, tile: list[int], across: int, what: str) -> NDArray[np.uint8]:
    """The tiles (height, width, channels) of an encoded image that is `across` tiles wide."""
    from PIL import Image

    height, width, channels = tile
    try:
        with Image.open(io.BytesIO(content.astype(np.uint8).tobytes())) as image:
            if image.size[0] * image.size[1] > LARGEST_MOSAIC:
                raise InputError(
                    f"{what} has {image.size[0]}x{image.size[1]} pixels; at most {LARGEST_MOSAIC} are read"
                )
            pixels: NDArray[np.uint8] = np.asarray(image.convert("RGB" if channels == 3 else "L"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(
            f"{what} is not a readable image ({error}); AVIF mosaics need Pillow 11.3 or newer, else write it again"
        ) from error
    if pixels.shape[1] != across * width or pixels.shape[0] % height:
        raise InputError(
            f"{what} has {pixels.shape[1]}x{pixels.shape[0]} pixels, not {across} tiles of {width}x{height}"
        )
    down = pixels.shape[0] // height
    shape = (down * across, height, width) if channels == 1 else (down * across, height, width, channels)
    return pixels.reshape(down, height, across, width, channels).swapaxes(1, 2).reshape(shape)
