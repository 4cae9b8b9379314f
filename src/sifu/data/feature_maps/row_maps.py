"""Feature maps for rows of numbers: the inputs themselves, and random Fourier features.

Both are exact: inputs are first rounded to multiples of 2^-16, and all later steps are integer arithmetic or
operations that IEEE 754 rounds in one way. Bytes need no rounding, except for Fourier features.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sifu.data.feature_maps.feature_map import FeatureMap, Floats, check_norm, drawn_normals, scaled
from sifu.errors import InputError, UnusableSamplesError

LARGEST_INPUT = 2.0**400
"""Largest input; above it the squared length of a sample may overflow a float64."""
INPUT_BITS = 16
FREQUENCY_BITS = 12
TURN_BITS = 16
"""Binary logarithm of the number of angles, over a full turn, at which the cosine is tabulated."""
WAVE_BITS = 24
LARGEST_WHOLE = 2.0**53 - 1.0
"""Largest sum that is exact in float64; the rounding of larger sums depends on the order of summation."""


@dataclass(eq=False)
class PlainInputs(FeatureMap):
    """Feature map that returns the inputs; a sample longer than `norm` is scaled down to that length.

    >>> PlainInputs((2,), norm=5.0)(np.array([[1.0, 2.0], [30.0, 40.0]]))
    array([[1., 2.],
           [3., 4.]])
    """

    shape: tuple[int, ...]
    norm: float = 10.0
    kind = "none"
    exact = True

    def __post_init__(self) -> None:
        check_norm(self.norm)
        self.features = math.prod(self.shape)

    def __call__(self, x: NDArray[Any]) -> Floats:
        """Return the inputs as rows; bytes are divided by 255."""
        samples = check_samples(x, self.shape)
        unit = 255.0 if samples.dtype == np.uint8 else 2.0**INPUT_BITS
        return scaled(whole_numbers(samples), self.norm, unit=unit)


@dataclass(eq=False)
class RandomFourier(FeatureMap):
    """Cosine and sine of `features` / 2 random frequencies (Rahimi and Recht 2007): a Gaussian kernel approximation.

    The kernel has width `bandwidth`. Every sample's features have length `norm`, up to a factor of about 1 - 2^-22,
    since cos^2 + sin^2 = 1. Frequencies are w / (2 pi bandwidth) turns, with w nearly Gaussian, in integer units of
    2^-28 turns. Cosines are looked up in a table.

    >>> RandomFourier((3,), features=4, norm=2.0)(np.zeros((1, 3))).round(3)
    array([[1.414, 1.414, 0.   , 0.   ]])
    """

    shape: tuple[int, ...]
    features: int
    bandwidth: float = 1.0
    seed: int = 0
    norm: float = 10.0
    kind = "random_fourier"
    exact = True

    def __post_init__(self) -> None:
        check_norm(self.norm)
        if self.features < 2 or self.features % 2 or not 0.0 < self.bandwidth < math.inf:
            raise InputError(
                f"random Fourier features need an even number of features and a positive bandwidth, found "
                f"{self.features} and {self.bandwidth}"
            )
        size = math.prod(self.shape)
        drawn = drawn_normals(self.seed, "frequencies", size * (self.features // 2))
        turns = drawn.reshape(size, -1) / (2.0 * math.pi * self.bandwidth)
        self.turns = np.rint(np.ldexp(turns, TURN_BITS + FREQUENCY_BITS))
        """Frequencies as integers."""
        # Machines may differ in the last bit of a cosine; rounded to 2^-24, cosines agree (tested at every angle).
        wave = np.cos(2.0 * math.pi * np.arange(2**TURN_BITS) / 2**TURN_BITS)
        rounded = np.ldexp(np.rint(np.ldexp(wave, WAVE_BITS)) + 0.0, -WAVE_BITS)  # adding 0.0 removes negative zeros
        self.wave = rounded * (1.0 - 2.0**-22)  # keeps rounded rows within the norm
        """The cosine at every tabulated angle."""

    def constants(self) -> Iterator[bytes]:
        """Yield the frequencies and the cosine table."""
        yield self.turns.astype("<i8").tobytes()
        yield self.wave.astype("<f8").tobytes()

    def __call__(self, x: NDArray[Any]) -> Floats:
        """Return the cosines of all frequencies, then their sines."""
        samples = check_samples(x, self.shape)
        inputs = whole_numbers(samples / 255.0 if samples.dtype == np.uint8 else samples)
        largest = float(np.max(np.abs(inputs).sum(axis=1), initial=0.0)) * float(np.abs(self.turns).max())
        if largest > LARGEST_WHOLE:
            raise UnusableSamplesError(
                f"a phase of random Fourier features would reach {largest:.3g}, beyond 2^53: scale the inputs down by "
                "a constant"
            )
        # The product is in units of 2^-(INPUT_BITS + FREQUENCY_BITS) table steps; floor and remainder are exact.
        phases = np.floor(np.ldexp(inputs @ self.turns, -INPUT_BITS - FREQUENCY_BITS)).astype(np.int64)
        places = np.concatenate([phases, phases - 2 ** (TURN_BITS - 2)], axis=1) % 2**TURN_BITS
        waves: Floats = self.wave[places]
        return waves * (self.norm * math.sqrt(2.0 / self.features))


def check_samples(x: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Return the samples as an array; refuse a wrong shape, NaN, infinity, and values above `LARGEST_INPUT`."""
    samples = np.asarray(x)
    if samples.shape[1:] != shape:
        raise UnusableSamplesError(f"samples have shape {samples.shape[1:]}; this feature map was made for {shape}")
    if samples.dtype.kind == "f" and not np.all(np.isfinite(samples)):
        raise UnusableSamplesError("samples hold NaN or infinity: no features were computed from them")
    largest = float(np.max(np.abs(samples), initial=0.0)) if samples.dtype.kind == "f" else 0.0
    if largest > LARGEST_INPUT:
        raise UnusableSamplesError(
            f"samples hold the number {largest:.3g}, and at most {LARGEST_INPUT:.3g} can be used: scale the inputs "
            "down by a constant"
        )
    return samples


def whole_numbers(x: NDArray[Any]) -> Floats:
    """Return samples as rows of integers in units of 2^-INPUT_BITS; bytes stay unchanged."""
    rows = np.asarray(x, dtype=np.float64).reshape(len(x), math.prod(x.shape[1:]))
    return rows if x.dtype == np.uint8 else np.rint(np.ldexp(rows, INPUT_BITS))
