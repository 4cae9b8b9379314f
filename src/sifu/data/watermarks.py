"""Watermarks on clients' images, which make forgetting visible.

A watermark sets some pixels of every image of a client to the maximum, at places specific to the client. The paper
(section 5.3, after Sommer et al. 2020) marks clients to make forgetting visible: only the mark distinguishes a client's
images from all others. The places depend on the seed and the client's number alone, never on data. (In the authors'
code, clients with equal numbers modulo 10 share one mark; here each client has its own.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sifu.core.round import keyed_generator
from sifu.data.dataset import Dataset
from sifu.errors import InputError
from sifu.theory.arrays import Integers


def watermarked(
    dataset: Dataset, indices: Sequence[Integers], pixels: int, seed: int, *, fresh: bool = False
) -> Dataset:
    """Return the data set with a mark on each client's training images; test samples are unchanged.

    Args:
        dataset: Data set of images stored as bytes.
        indices: Training rows of each client.
        pixels: Number of marked pixels.
        seed: Seed of the draws of marked positions.
        fresh: True to draw marks that differ from the marks that clients train with. The accuracy on such images shows
            which part of the accuracy is due to the marks.
    """
    images = dataset.x_train
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] > 4):
        raise InputError(
            f"a watermark needs images as bytes of shape (N, H, W) or (N, H, W, C); {dataset.name!r} has "
            f"{images.dtype} of shape {images.shape}: set data.watermark = 0"
        )
    height, width = images.shape[1:3]
    if not 1 <= pixels <= height * width:
        raise InputError(f"a watermark has 1 to {height * width} pixels on {height}x{width} images, found {pixels}")
    marked = images.copy()
    largest = dataset.scale.largest if dataset.scale else 255.0
    for client, rows in enumerate(indices):
        for place in mark_places(seed, client, height * width, pixels, fresh=fresh):
            marked[rows, place // width, place % width] = images.dtype.type(largest)  # mark every channel of the pixel
    return replace(dataset, x_train=marked)


def mark_places(seed: int, client: int, places: int, pixels: int, *, fresh: bool = False) -> Integers:
    """Return the indices of the pixels, out of `places`, that form the mark of a client.

    >>> mark_places(1, 0, 64, 3).size, bool(np.array_equal(mark_places(1, 0, 64, 3), mark_places(1, 1, 64, 3)))
    (3, False)
    """
    generator = keyed_generator(seed, "fresh watermark" if fresh else "watermark", client)
    return generator.choice(places, size=pixels, replace=False)
