"""Watermarks: some pixels of every image of a client set to the maximum, at places of the client's own.

The paper (section 5.3, after Sommer et al. 2020) marks clients so that forgetting can be looked at: the mark is the
only thing a client's images share with no one else's. Places depend on the seed and the client's number alone, never on
data. (In the authors' code clients whose numbers are equal modulo 10 share one mark; here each has its own.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sifu.core.randomness import keyed_generator
from sifu.data.dataset import SCALES, Dataset
from sifu.errors import InputError
from sifu.theory.arrays import Array, Integers


def watermarked(
    dataset: Dataset, indices: Sequence[Integers], pixels: int, seed: int, *, fresh: bool = False
) -> Dataset:
    """The data set with each client's training rows marked; test samples stay as they are.

    `fresh` marks are drawn apart from those clients train with: what a model does with them says how much of its
    accuracy is owed to the mark itself.
    """
    images = dataset.x_train
    height, width = _size(dataset)
    if not 1 <= pixels <= height * width:
        raise InputError(f"a watermark has 1 to {height * width} pixels on {height}x{width} images, found {pixels}")
    marked = images.copy()
    largest = SCALES[dataset.name].largest if dataset.name in SCALES else 255.0
    for client, rows in enumerate(indices):
        for place in mark_places(seed, client, height * width, pixels, fresh=fresh):
            marked[rows, place // width, place % width] = images.dtype.type(largest)  # every channel of the pixel
    return replace(dataset, x_train=marked)


def mark_places(seed: int, client: int, places: int, pixels: int, *, fresh: bool = False) -> Integers:
    """Which of `places` pixels carry the mark of a client.

    >>> mark_places(1, 0, 64, 3).size, bool(np.array_equal(mark_places(1, 0, 64, 3), mark_places(1, 1, 64, 3)))
    (3, False)
    """
    generator = keyed_generator(seed, "fresh watermark" if fresh else "watermark", client)
    return generator.choice(places, size=pixels, replace=False)


def _size(dataset: Dataset) -> tuple[int, int]:
    images: Array = dataset.x_train
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] > 4):
        raise InputError(
            f"a watermark needs images as bytes of shape (N, H, W) or (N, H, W, C); {dataset.name!r} has "
            f"{images.dtype} of shape {images.shape}: set data.watermark = 0"
        )
    return int(images.shape[1]), int(images.shape[2])
