"""Maps of rows of numbers: as they are, projected to fewer, or waves of random frequency. All of them exact.

Inputs are rounded to multiples of 2^-16 first (bytes are taken as they are); after that everything is whole numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sifu.data.feature_maps.feature_map import (
    FeatureMap,
    Floats,
    check_norm,
    check_samples,
    drawn_normals,
    scaled,
    whole_numbers,
)
from sifu.errors import InputError, UnusableSamplesError
from sifu.theory.participation import base_key, scores

INPUT_BITS = 16
FREQUENCY_BITS = 12
TURN_BITS = 16
"""A wave is looked up at 2^16 places of a turn."""
WAVE_BITS = 24
LARGEST_WHOLE = 2.0**53 - 1.0
"""Whole numbers beyond it would be rounded, in an order that depends on the machine."""


@dataclass(frozen=True)
class PlainInputs(FeatureMap):
    """The inputs themselves; a sample longer than `norm` is shortened to it.

    >>> PlainInputs((2,), norm=5.0)(np.array([[1.0, 2.0], [30.0, 40.0]]))
    array([[1., 2.],
           [3., 4.]])
    """

    shape: tuple[int, ...]
    norm: float = 10.0
    kind: str = field(default="none", init=False)
    exact: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        check_norm(self.norm)
        object.__setattr__(self, "features", math.prod(self.shape))

    def settings(self) -> dict[str, Any]:
        """The shape alone."""
        return {"shape": list(self.shape)}

    def constants(self) -> Iterator[bytes]:
        """Nothing is drawn."""
        return iter(())

    def __call__(self, x: NDArray[Any]) -> Floats:
        """Rows of inputs; bytes are 255ths."""
        samples = check_samples(x, self.shape)
        unit = 255.0 if samples.dtype == np.uint8 else 2.0**INPUT_BITS
        return scaled(whole_numbers(samples, INPUT_BITS), self.norm, unit=unit)


@dataclass(frozen=True)
class Projection(FeatureMap):
    """`features` random sums of the inputs with signs +1 and -1 from `seed`, divided by sqrt(features).

    By Johnson and Lindenstrauss lengths are nearly kept; a sample longer than `norm` is shortened to it.
    """

    shape: tuple[int, ...]
    features: int
    seed: int = 0
    norm: float = 10.0
    kind: str = field(default="projection", init=False)
    exact: bool = field(default=True, init=False)
    signs: Floats = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_norm(self.norm)
        if self.features < 1:
            raise InputError(f"a projection needs at least one feature, found {self.features}")
        inputs = math.prod(self.shape)
        words = scores(base_key(self.seed, "projection"), np.arange(inputs * self.features))
        signs = np.where(words >> np.uint64(63), 1.0, -1.0).reshape(inputs, self.features)
        object.__setattr__(self, "signs", signs)

    def settings(self) -> dict[str, Any]:
        """Shape and seed."""
        return {"shape": list(self.shape), "seed": self.seed}

    def constants(self) -> Iterator[bytes]:
        """The signs."""
        yield self.signs.astype("i1").tobytes()

    def __call__(self, x: NDArray[Any]) -> Floats:
        """Rows of projected inputs; bytes are 255ths."""
        samples = check_samples(x, self.shape)
        inputs = whole_numbers(samples, INPUT_BITS)
        _check_exact(float(np.max(np.abs(inputs).sum(axis=1), initial=0.0)), "the projection")
        unit = 255.0 if samples.dtype == np.uint8 else 2.0**INPUT_BITS
        return scaled(inputs @ self.signs, self.norm, unit=unit * math.sqrt(self.features))


@dataclass(frozen=True)
class RandomFourier(FeatureMap):
    """cos and sin of `features` / 2 random frequencies (Rahimi and Recht 2007): a Gaussian kernel of width `bandwidth`.

    Every sample has length `norm` up to 2^-22, since cos^2 + sin^2 = 1. Frequencies are w / (2 pi bandwidth)
    turns with w nearly Gaussian; they are rounded to whole numbers, the phase is looked up modulo a turn.

    >>> RandomFourier((3,), features=4, norm=2.0)(np.zeros((1, 3))).round(3)
    array([[1.414, 1.414, 0.   , 0.   ]])
    """

    shape: tuple[int, ...]
    features: int
    bandwidth: float = 1.0
    seed: int = 0
    norm: float = 10.0
    kind: str = field(default="random_fourier", init=False)
    exact: bool = field(default=True, init=False)
    turns: Floats = field(init=False, repr=False, compare=False)
    """Frequencies as whole numbers."""
    wave: Floats = field(init=False, repr=False, compare=False)
    """The cosine at every place of a turn."""

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
        object.__setattr__(self, "turns", np.rint(np.ldexp(turns, TURN_BITS + FREQUENCY_BITS)))
        # A machine's cosine may differ in its last bit; rounded to 2^-24 it does not (a test looks at every place).
        wave = np.cos(2.0 * math.pi * np.arange(2**TURN_BITS) / 2**TURN_BITS)
        rounded = np.ldexp(np.rint(np.ldexp(wave, WAVE_BITS)) + 0.0, -WAVE_BITS)  # + 0.0: no negative zero
        object.__setattr__(self, "wave", rounded * (1.0 - 2.0**-22))  # rounding makes nothing longer than the norm

    def settings(self) -> dict[str, Any]:
        """Shape, bandwidth and seed."""
        return {"shape": list(self.shape), "bandwidth": self.bandwidth, "seed": self.seed}

    def constants(self) -> Iterator[bytes]:
        """The frequencies and the wave."""
        yield self.turns.astype("<i8").tobytes()
        yield self.wave.astype("<f8").tobytes()

    def __call__(self, x: NDArray[Any]) -> Floats:
        """cos of every frequency, then sin of every frequency."""
        samples = check_samples(x, self.shape)
        inputs = whole_numbers(samples / 255.0 if samples.dtype == np.uint8 else samples, INPUT_BITS)
        _check_exact(
            float(np.max(np.abs(inputs).sum(axis=1), initial=0.0)) * float(np.abs(self.turns).max()),
            "a phase of random Fourier features",
        )
        # In units of 2^-(INPUT_BITS + FREQUENCY_BITS) places; floor and the remainder of whole numbers are exact.
        phases = np.floor(np.ldexp(inputs @ self.turns, -INPUT_BITS - FREQUENCY_BITS)).astype(np.int64)
        places = np.concatenate([phases, phases - 2 ** (TURN_BITS - 2)], axis=1) % 2**TURN_BITS
        return self.wave[places] * (self.norm * math.sqrt(2.0 / self.features))


def _check_exact(largest: float, what: str) -> None:
    """Refuse sums beyond `LARGEST_WHOLE`."""
    if largest > LARGEST_WHOLE:
        raise UnusableSamplesError(
            f"{what} would reach {largest:.3g}, beyond 2^53: scale the inputs down by a constant"
        )
