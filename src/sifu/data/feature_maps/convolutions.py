"""Random filters with integer weights, whose responses are exact in float32 on any machine.

Filters are Gaussian, whitened by a covariance that comes from no data set. The covariance models natural images: two
pixels have the correlation exp(-distance / REACH), and two colours have the correlation 0.9. Without whitening, most
filters would respond mainly to the same low spatial frequencies. Weights are rounded to integers that sum to zero, and
pixels are integers from 0 to 255, so a response is an integer below 2^24. A float32 holds it exactly, whatever the
order of summation.

The response is divided by the standard deviation of its patch (a correctly rounded square root and division of
integers), rounded to a grid, and shrunk towards zero by `THRESHOLD` deviations. Positive and negative parts are summed
over each region, again as integers below 2^24.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sifu.data.dataset import channels_first
from sifu.data.feature_maps.feature_map import FeatureMap, Floats, check_norm, drawn_normals, scaled
from sifu.errors import InputError, UnusableSamplesError

if TYPE_CHECKING:
    import torch

REACH, COLOURS, DAMPING = 8.0, 0.9, 0.3
"""Whitening covariance: correlation length in pixels, correlation of two colours, and the value added to its diagonal.
"""
FLAT = 10.0
"""Amount added to a patch's variance, about the variance of camera noise, so that flat patches do not amplify noise.
"""
THRESHOLD = 1.0
EXACT = 2**24
"""Largest n such that float32 represents every integer up to n exactly."""
ROUNDING = 1.5 * 2.0**23
"""Constant whose addition and subtraction rounds a float32 below 2^22 to an integer, ties to even."""


class FilterBank:
    """Random filters of patch x patch pixels, which give 2 * filters * regions^2 features.

    Positive and negative responses are summed separately over each of regions x regions areas of an image.
    """

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
        # By Cauchy-Schwarz |response / deviation| <= |w| sqrt(taps). `bits` keeps a region's sum below 2^24.
        largest = math.sqrt(float(np.max(np.sum(self.weights**2, axis=1))) * self.taps) / 2.0**shift
        self.bits = min(12, math.floor(math.log2(EXACT / (max(self.areas) * largest))))
        self.threshold = float(round(THRESHOLD * 2.0**self.bits))
        self.gain = 2.0 ** (self.bits - shift)
        self.numbers = 2 * filters * len(self.windows)

    def deviations(self, sums: NDArray[np.int64], squares: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return gain / sqrt(variance + FLAT) of every patch, from integral images of the pixels and their squares."""
        size = self.patch
        first, second = (
            total[:, size:, size:] - total[:, :-size, size:] - total[:, size:, :-size] + total[:, :-size, :-size]
            for total in (sums.astype(np.float64), squares.astype(np.float64))
        )
        variance = (self.taps * second - first * first) / float(self.taps * self.taps)
        return np.asarray(self.gain / np.sqrt(variance + FLAT), dtype=np.float32)

    def sums(self, images: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return integer sums of positive and negative parts over each region, (n, regions^2, 2, filters)."""
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
    """Return integer weights, (filters, taps), and the exponent s: weights are about 2^s times the whitened filters."""
    taps = channels * patch * patch
    drawn = drawn_normals(seed, f"filters {channels} {patch}", filters * taps).reshape(filters, taps)
    drawn = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
    places = np.stack(np.meshgrid(np.arange(patch), np.arange(patch), indexing="ij"), axis=-1).reshape(-1, 2)
    distances = np.sqrt(((places[:, None] - places[None, :]) ** 2).sum(axis=-1))
    colours = np.full((channels, channels), COLOURS) + (1.0 - COLOURS) * np.eye(channels)
    values, vectors = np.linalg.eigh(np.kron(colours, np.exp(-distances / REACH)))
    whitened = drawn @ (vectors / np.sqrt(values + DAMPING)) @ vectors.T
    whitened -= whitened.mean(axis=1, keepdims=True)
    # Leave room for rounding and for the correction below, so that 255 * sum |w| stays below 2^24.
    room = EXACT / 255.0 - 2.0 * taps
    shift = math.floor(math.log2(room / float(np.abs(whitened).sum(axis=1).max())))
    weights: Any = np.rint(whitened * 2.0**shift)
    for row in weights:  # rounding may leave a nonzero sum: subtract it, one from each weight
        rest = int(row.sum())
        row[: abs(rest)] -= math.copysign(1.0, rest)
    return weights, shift


LARGEST_SIDE = 48
"""Longest side of an image that is not shrunk; larger images are shrunk by an integer factor, averaging pixels."""
LARGE_IMAGES: dict[str, Any] = {"banks": ((170, 5, 2),), "waves": (24, 8, 8), "grey_waves": 26, "wave_weight": 2.5}
"""Options of the default map for shrunk images.

Labels of large images depend on the position of an object's parts, so the map has more and heavier waves, and fewer
filters.
"""
WAVE_BITS = 10
GPU_BATCH = 256


@dataclass(eq=False)
class RandomConvolutions(FeatureMap):
    """Feature map for images of a `shape` (channels, height, width), with filters drawn from `seed`.

    `banks` lists (filters, patch, regions) of each bank. `waves` is the number of cosine waves in each direction for
    the brightness and for each of the two colour differences; images of one channel use `grey_waves` instead.
    Before all features are scaled to length `norm` at most, the wave features of a full-contrast image have length
    `wave_weight`, and the features of each bank have length 1.

    >>> tiny = RandomConvolutions((1, 8, 8), banks=((4, 3, 2),), grey_waves=3)
    >>> tiny(np.arange(64, dtype=np.uint8).reshape(1, 1, 8, 8)).shape == (1, tiny.features)
    True
    """

    shape: tuple[int, int, int]
    banks: tuple[tuple[int, int, int], ...] = ((208, 5, 2),)
    waves: tuple[int, int, int] = (18, 6, 6)
    grey_waves: int = 20
    wave_weight: float = 0.7
    seed: int = 0
    norm: float = 10.0
    device: str = "cpu"
    kind = "random_convolutions"
    exact = True

    def __post_init__(self) -> None:
        check_norm(self.norm)
        channels, height, width = self.shape
        if min(self.shape) < 1:
            raise InputError(f"images of shape {self.shape} (channels, height, width) have no pixels")
        self._factor = max(1, math.ceil(max(height, width) / LARGEST_SIDE))
        self._small = (channels, height // self._factor, width // self._factor)
        self._banks = [FilterBank(self._small, *bank, seed=self.seed) for bank in self.banks]
        counts = self.waves if channels == 3 else (self.grey_waves,) * channels
        self._waves = _waves(self._small, counts) if self.wave_weight else []
        self.features = sum(bank.numbers for bank in self._banks)
        self.features += sum(len(down) * len(across) for down, across in self._waves)

    def on(self, device: str) -> RandomConvolutions:
        """Return the same map computed on another device."""
        return replace(self, device=device)

    def constants(self) -> Iterator[bytes]:
        """Yield the weights of every filter and wave, as little-endian int32."""
        for bank in self._banks:
            yield bank.weights.astype("<i4").tobytes()
        for pair in self._waves:
            for wave in pair:
                yield wave.astype("<i4").tobytes()

    def __call__(self, x: NDArray[Any]) -> Floats:
        """Return the features of bytes (n, H, W) or (n, H, W, C), or of numbers from 0 to 1 as (n, C, H, W)."""
        images = self._shrunk(levels(x, self.shape))
        if not len(images):
            return np.zeros((0, self.features))
        parts = [scaled(sums, 1.0) for sums in self._filtered(images)]
        if self._waves:
            parts.append(self._wave_part(images))
        features = np.concatenate(parts, axis=1)
        # The total length of all parts is bounded, so one fixed factor bounds the norm and keeps their proportions.
        longest = math.sqrt(len(self._banks) + (self.wave_weight**2 if self._waves else 0.0))
        return features * (self.norm / longest)

    def _shrunk(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        factor, (channels, height, width) = self._factor, self._small
        if factor == 1:
            return images.astype(np.float32)
        kept = images[:, :, : height * factor, : width * factor]
        blocks = kept.reshape(len(kept), channels, height, factor, width, factor).astype(np.float64)
        means: Floats = blocks.sum(axis=(3, 5)) / factor**2
        return np.rint(means).astype(np.float32)

    def _filtered(self, images: NDArray[np.float32]) -> list[Floats]:
        """Return each bank's unnormalised integer sums over regions, (n, features of the bank)."""
        import torch

        whole = images.astype(np.int64)
        corners = np.zeros((2, len(images), whole.shape[2] + 1, whole.shape[3] + 1), dtype=np.int64)
        corners[0, :, 1:, 1:] = whole.sum(axis=1).cumsum(axis=1).cumsum(axis=2)
        corners[1, :, 1:, 1:] = (whole * whole).sum(axis=1).cumsum(axis=1).cumsum(axis=2)
        pixels = torch.from_numpy(images).to(self.device)
        results = []
        for bank in self._banks:
            inverse = torch.from_numpy(bank.deviations(corners[0], corners[1])).to(self.device)
            weights = torch.from_numpy(bank.weights.astype(np.float32)).to(self.device)
            results.append(_in_pieces(bank, pixels, inverse, weights).reshape(len(images), -1))
        return results

    def _wave_part(self, images: NDArray[np.float32]) -> Floats:
        """Return cosine coefficients of brightness and colour differences, scaled to length at most `wave_weight`."""
        centred = images.astype(np.float64) * 2.0 - 255.0
        planes = [centred[:, channel] for channel in range(centred.shape[1])]
        if len(planes) == 3:
            red, green, blue = planes
            planes = [red + green + blue, red - blue, red - 2.0 * green + blue]
        lengths = [3.0, 2.0, 6.0] if len(planes) == 3 else [1.0] * len(planes)
        pixels = centred.shape[2] * centred.shape[3]
        # An image of full contrast has length 255 sqrt(channels pixels), and a wave has length 2^WAVE_BITS in each
        # direction. The factor 1.02 is a margin, because rounded waves are not exactly orthogonal.
        full = 1.02 * 255.0 * math.sqrt(len(planes) * pixels) * 4.0**WAVE_BITS
        parts = []
        for plane, square, (down, across) in zip(planes, lengths, self._waves, strict=True):
            whole = down @ plane @ across.T
            parts.append(whole.reshape(len(images), -1) * (self.wave_weight / (full * math.sqrt(square))))
        return np.concatenate(parts, axis=1)


def levels(x: NDArray[Any], shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Return images as bytes (n, C, H, W); numbers from 0 to 1 are multiplied by 255 and rounded."""
    images = np.asarray(x)
    if images.dtype != np.uint8:
        if images.ndim == 2 and images.shape[1] == math.prod(shape):
            images = images.reshape(len(images), *shape)
        if images.size and not (images.min() >= 0.0 and images.max() <= 1.0):
            raise UnusableSamplesError(
                f"images must be bytes or numbers from 0 to 1, found {images.dtype} from {images.min()} to "
                f"{images.max()}"
            )
        images = np.rint(images.astype(np.float64) * 255.0).astype(np.uint8)
    if images.shape[1:] != shape:
        images = channels_first(images)
    if images.shape[1:] != shape:
        raise UnusableSamplesError(f"images have shape {images.shape[1:]}; this feature map was made for {shape}")
    return images


def _in_pieces(bank: FilterBank, pixels: Any, inverse: Any, weights: Any) -> Floats:
    """Return `bank.sums` for all images, computed in large batches on a GPU, or one image at a time per CPU core.

    The responses of one image fit in a core's cache. Batch sizes and threads affect only the time.
    """
    import torch

    step = GPU_BATCH if pixels.is_cuda else 1

    def piece(start: int) -> Any:
        with torch.no_grad():
            sums = bank.sums(pixels[start : start + step], inverse[start : start + step], weights)
        return sums.cpu().numpy()

    starts = range(0, len(pixels), step)
    if pixels.is_cuda:
        short = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False  # TF32 has eleven bits, too few for the weights
        try:
            return np.concatenate([piece(start) for start in starts]).astype(np.float64)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = short
    before = torch.get_num_threads()
    if before == 1:
        return np.concatenate([piece(start) for start in starts]).astype(np.float64)
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(min(before, os.cpu_count() or 1)) as pool:
            return np.concatenate(list(pool.map(piece, starts))).astype(np.float64)
    finally:
        torch.set_num_threads(before)


def _waves(shape: tuple[int, int, int], counts: tuple[int, ...]) -> list[tuple[Floats, Floats]]:
    """Return, for each plane, the first cosine waves down and across the image, in units of 2^-WAVE_BITS."""
    return [tuple(_cosines(size, min(count, size)) for size in shape[1:]) for count in counts]  # type: ignore[misc]


def _cosines(size: int, count: int) -> Floats:
    """Return cos(pi (i + 1/2) j / size), normalised to length one, times 2^WAVE_BITS and rounded towards zero."""
    waves = np.cos(np.pi * (np.arange(size) + 0.5) * np.arange(count)[:, None] / size)
    waves /= np.linalg.norm(waves, axis=1, keepdims=True)
    return np.trunc(np.ldexp(waves, WAVE_BITS))
