"""Random filters with whole-number weights, whose responses are exact in float32 on any machine.

Filters are Gaussian, whitened by a covariance that belongs to no data set: neighbouring pixels of natural images are
alike, cov = exp(-distance / REACH), and so are their colours, 0.9. Without it most filters would see the same slow
changes. Weights are rounded to whole numbers that sum to zero, and pixels are whole numbers from 0 to 255, so a
response is an integer below 2^24: float32 has it exactly, whatever the order of summation.

The response is divided by the deviation of its patch (a correctly rounded square root and division of integers),
rounded to a grid, and shrunk towards zero by `THRESHOLD` deviations; positive and negative parts are summed over each
region, again as integers below 2^24.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sifu.data.feature_maps.feature_map import Floats, drawn_normals
from sifu.errors import InputError

if TYPE_CHECKING:
    import torch

REACH, COLOURS, RIDGE = 8.0, 0.9, 0.3
"""The covariance that whitens: length in pixels, correlation of two colours, and what is added to its diagonal."""
FLAT = 10.0
"""Added to the variance of a patch: about the noise of a camera, so that flat patches stay flat."""
THRESHOLD = 1.0
EXACT = 2**24
"""Whole numbers up to here are float32 numbers, all of them."""
ROUNDING = 1.5 * 2.0**23
"""Adding and subtracting it rounds a float32 below 2^22 to a whole number, ties to even."""


class FilterBank:
    """Filters of patch x patch pixels, summed by sign over regions x regions: 2 filters regions^2 numbers."""

    def __init__(self, shape: tuple[int, int, int], filters: int, patch: int, regions: int, seed: int) -> None:
        channels, height, width = shape
        self.rows, self.columns = height - patch + 1, width - patch + 1
        if min(filters, regions) < 1 or patch < 2 or min(self.rows, self.columns) < regions:
            raise InputError(
                f"{filters} filters of {patch} x {patch} pixels and {regions} x {regions} regions do not fit images of "
                f"{height} x {width} pixels (a filter needs at least 2 x 2)"
            )
        self.patch, self.taps = patch, channels * patch * patch
        self.weights, shift = _whole_filters(channels, filters, patch, seed)
        edges = [[round(part * size / regions) for part in range(regions + 1)] for size in (self.rows, self.columns)]
        self.windows = [
            (slice(top, bottom), slice(left, right))
            for top, bottom in zip(edges[0][:-1], edges[0][1:], strict=True)
            for left, right in zip(edges[1][:-1], edges[1][1:], strict=True)
        ]
        self.areas = [(rows.stop - rows.start) * (columns.stop - columns.start) for rows, columns in self.windows]
        # By Cauchy-Schwarz |response / deviation| <= |w| sqrt(taps): bits so that a region's sum stays below 2^24.
        largest = math.sqrt(float(np.max(np.sum(self.weights**2, axis=1))) * self.taps) / 2.0**shift
        self.bits = min(12, math.floor(math.log2(EXACT / (max(self.areas) * largest))))
        self.threshold = float(round(THRESHOLD * 2.0**self.bits))
        self.gain = 2.0 ** (self.bits - shift)
        self.numbers = 2 * filters * len(self.windows)

    def deviations(self, sums: NDArray[np.int64], squares: NDArray[np.int64]) -> NDArray[np.float32]:
        """gain / sqrt(variance + FLAT) of every patch, from sums of pixels and of their squares up to each corner."""
        first, second = (self._patch_sums(corners).astype(np.float64) for corners in (sums, squares))
        variance = (self.taps * second - first * first) / float(self.taps * self.taps)
        return np.asarray(self.gain / np.sqrt(variance + FLAT), dtype=np.float32)

    def _patch_sums(self, corners: NDArray[np.int64]) -> NDArray[np.int64]:
        size = self.patch
        return np.asarray(
            corners[:, size:, size:]
            - corners[:, :-size, size:]
            - corners[:, size:, :-size]
            + corners[:, :-size, :-size]
        )

    def sums(self, images: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Positive and negative parts summed over each region, (n, regions^2, 2, filters), as whole numbers."""
        import torch

        patches = images.unfold(2, self.patch, 1).unfold(3, self.patch, 1).permute(0, 1, 4, 5, 2, 3)
        count = len(images)
        parts = []
        for (rows, columns), area in zip(self.windows, self.areas, strict=True):
            window = patches[:, :, :, :, rows, columns].reshape(count, self.taps, area)
            response = torch.matmul(weights, window)
            response.mul_(inverse[:, rows, columns].reshape(count, 1, area))
            response.add_(ROUNDING).sub_(ROUNDING)
            response.sub_(response.clamp(-self.threshold, self.threshold))
            signed = response.sum(dim=2)
            both = response.abs_().sum(dim=2)
            parts.append(torch.stack([both + signed, both - signed], dim=1) / 2.0)
        return torch.stack(parts, dim=1)


def _whole_filters(channels: int, filters: int, patch: int, seed: int) -> tuple[Floats, int]:
    """Weights as whole numbers, (filters, taps), and the s for which they are about 2^s times the whitened filters."""
    taps = channels * patch * patch
    drawn = drawn_normals(seed, f"filters {channels} {patch}", filters * taps).reshape(filters, taps)
    drawn = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
    places = np.stack(np.meshgrid(np.arange(patch), np.arange(patch), indexing="ij"), axis=-1).reshape(-1, 2)
    distances = np.sqrt(((places[:, None] - places[None, :]) ** 2).sum(axis=-1))
    colours = np.full((channels, channels), COLOURS) + (1.0 - COLOURS) * np.eye(channels)
    values, vectors = np.linalg.eigh(np.kron(colours, np.exp(-distances / REACH)))
    whitened = drawn @ (vectors / np.sqrt(values + RIDGE)) @ vectors.T
    whitened -= whitened.mean(axis=1, keepdims=True)
    # sum |w| 255 stays below 2^24 also after every weight moved by one more than its rounding.
    room = EXACT / 255.0 - 2.0 * taps
    shift = math.floor(math.log2(room / float(np.abs(whitened).sum(axis=1).max())))
    weights: Any = np.rint(whitened * 2.0**shift)
    for row in weights:  # what rounding left of the sum is taken away one by one
        rest = int(row.sum())
        row[: abs(rest)] -= math.copysign(1.0, rest)
    return weights, shift
