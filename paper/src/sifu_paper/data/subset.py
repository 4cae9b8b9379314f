"""Subsets of public data sets in one numpy file, with separate images or mosaics.

A subset has `x_train y_train x_test y_test classes`, or image mosaics `x_train_img` and `x_test_img` with `tile` and
`cols` instead of `x_train` and `x_test`; and `identity_train`, the person who is the client, for faces.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sifu import InputError
from sifu.data import Dataset, dataset_of, read_arrays
from sifu.theory.arrays import Array

LARGEST_MOSAIC = 160_000_000
"""Limit on the pixels of one mosaic, below Pillow's own limit: 10,000 faces of 64x64 are 41 million."""


def read_subset(name: str, path: Path) -> Dataset:
    """Return the subset of the public data set `name` in a file."""
    arrays = read_arrays(path)
    if "tile" in arrays:
        arrays |= open_mosaics(arrays, path)
    if "identity_train" in arrays:
        arrays["client_train"] = arrays["identity_train"].astype(np.int64)
    return dataset_of(arrays, path, name)


def open_mosaics(arrays: dict[str, Array], path: Path) -> dict[str, Array]:
    """Cut the mosaic of each split into its tiles, row by row."""
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
    """Return the tiles (height, width, channels) of an encoded image that is `across` tiles wide."""
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
