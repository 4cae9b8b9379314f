"""Feature maps: public functions from one sample to k features of norm at most c, identified by a digest.

A map depends on no client's data, so a head on its features depends on a client only through the statistics that the
client sent. A map is `exact` if every machine computes the same bits: it uses only integers and operations that IEEE
754 rounds in one way. Its features then do not depend on batches, threads, libraries or a GPU, and statistics of the
same samples have the same digest everywhere. A map that uses a network is not exact: its bits depend on the kind of
machine, and proofs hold for the statistics that were sent.

This module also holds the maps for rows of numbers: the inputs themselves, a random projection, and random Fourier
features. All three are exact: inputs are first rounded to multiples of 2^-16 (bytes only for Fourier features), and all
later steps are integer arithmetic or operations that IEEE 754 rounds in one way.
"""

from __future__ import annotations

import abc
import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from sifu.errors import InputError, UnusableSamplesError
from sifu.theory.participation import base_key, scores

Floats = NDArray[np.float64]

CHUNK = 256
"""Number of samples mapped at a time, so that the features of a large data set need not fit in memory."""
LARGEST_INPUT = 2.0**400
"""Largest input; above it the squared length of a sample may overflow a float64."""


OUTSIDE_SETTINGS = {"features", "norm", "device"}
"""Fields that `settings` omits: `digest` adds the first two itself, and the device does not change the map."""


class FeatureMap(abc.ABC):
    """A public map from a sample to `features` values with a norm of at most `norm`."""

    kind: str
    features: int
    norm: float
    exact: bool
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]  # every map is a dataclass, or has its own settings

    @abc.abstractmethod
    def __call__(self, x: NDArray[Any]) -> Floats:
        """Return the features of each sample, (n, k), without the constant."""

    def constants(self) -> Iterator[bytes]:
        """Yield the bytes of all random draws and loaded weights that the features depend on, for the digest."""
        return iter(())

    def settings(self) -> dict[str, Any]:
        """Return all options of the map except `OUTSIDE_SETTINGS`."""
        chosen = {entry.name for entry in fields(self) if entry.init} - OUTSIDE_SETTINGS
        return {name: getattr(self, name) for name in chosen}

    def on(self, device: str) -> FeatureMap:
        """Return the same map computed on a device (cpu, cuda)."""
        return self

    def digest(self) -> str:
        """Return the SHA-256 of the settings (JSON, sorted keys) and the constants; it identifies the map."""
        settings = {"kind": self.kind, "features": self.features, "norm": self.norm, **self.settings()}
        hashed = hashlib.sha256(f"sifu features 1 {json.dumps(settings, sort_keys=True)}\n".encode())
        for piece in self.constants():
            hashed.update(piece)
        return hashed.hexdigest()

    @property
    def is_declared(self) -> bool:
        """True if the operator must declare that the map is public: a network needs this, a seeded map does not."""
        return self.kind in ("module", "pretrained", "transformers")

    def chunks(self, x: NDArray[Any]) -> Iterator[tuple[slice, Floats]]:
        """Yield the features of many samples, `CHUNK` at a time, with their rows."""
        for rows in in_chunks(len(x)):
            yield rows, self(x[rows])


def in_chunks(samples: int) -> Iterator[slice]:
    """Return slices over the rows of samples, `CHUNK` at a time."""
    return (slice(start, min(start + CHUNK, samples)) for start in range(0, samples, CHUNK))


def check_norm(norm: float) -> float:
    """Return the norm bound c as a float; refuse a bound that is not positive and finite."""
    if not 0.0 < norm < math.inf:
        raise InputError(f"the length of a sample's features must be a positive number, found {norm}")
    return float(norm)


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


def scaled(rows: Floats, norm: float, unit: float | None = None) -> Floats:
    """Scale integer rows to length `norm`; with a unit, return rows / unit, and shorten only rows longer than `norm`.

    The squared length is summed as an integer, so the order of summation does not matter. Zero rows stay zero.

    >>> scaled(np.array([[3.0, -4.0], [0.0, 0.0]]), 1.0)
    array([[ 0.6, -0.8],
           [ 0. ,  0. ]])
    >>> scaled(np.array([[3.0, -4.0], [30.0, -40.0]]), 10.0, unit=1.0)
    array([[ 3., -4.],
           [ 6., -8.]])
    """
    lengths = np.sqrt(square_lengths(rows))
    factors = np.divide(norm, lengths, out=np.zeros_like(lengths), where=lengths > 0.0)
    if unit is not None:
        factors = np.minimum(factors, 1.0 / unit, out=np.full_like(factors, 1.0 / unit), where=lengths > 0.0)
    return rows * factors[:, None]


def square_lengths(rows: Floats) -> Floats:
    """Return sum_j u_j^2 of each integer row, computed exactly and rounded once."""
    squares: Floats = np.einsum("ij,ij->i", rows, rows)
    for row in np.flatnonzero(squares >= 2.0**52):  # einsum may have rounded intermediate sums
        squares[row] = float(sum(int(value) ** 2 for value in rows[row]))
    return squares


def whole_numbers(x: NDArray[Any], bits: int) -> Floats:
    """Return flat samples rounded to units of 2^-bits; bytes stay unchanged."""
    rows = np.asarray(x, dtype=np.float64).reshape(len(x), math.prod(x.shape[1:]))
    return rows if np.asarray(x).dtype == np.uint8 else np.rint(np.ldexp(rows, bits))


def drawn_normals(seed: int, purpose: str, count: int) -> Floats:
    """Return nearly Gaussian numbers of mean 0 and variance 1, the same on every machine: sums of twelve 16-bit draws.

    >>> drawn_normals(0, "filters", 3).round(3)
    array([ 0.491,  0.052, -2.191])
    """
    words = scores(base_key(seed, purpose), np.arange(3 * count)).reshape(count, 3)
    total = np.zeros(count, dtype=np.int64)
    for shift in (0, 16, 32, 48):
        total += ((words >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64).sum(axis=1)
    return (total - 6 * 65535) / 65536.0


class CachedFeatures(FeatureMap):
    """A wrapper around a map that caches the features of whole clients (`chunks`) in `folder`.

    The name of a file identifies the map and the samples. Its last 32 bytes are the SHA-256 of the name and the
    features, so a file that was damaged, or holds the features of another client or map, is computed again.
    """

    def __init__(self, computed: FeatureMap, folder: Path) -> None:
        self._map, self._folder = computed, folder
        self.kind, self.features = computed.kind, computed.features
        self.norm, self.exact = computed.norm, computed.exact
        self._digest = computed.digest()

    def __call__(self, x: NDArray[Any]) -> Floats:
        """Return the features of the wrapped map, without the cache."""
        return self._map(x)

    def on(self, device: str) -> CachedFeatures:
        """Return the same map computed on another device, with the same cache folder."""
        return CachedFeatures(self._map.on(device), self._folder)

    def digest(self) -> str:
        """Return the digest of the wrapped map: the cache does not change the features."""
        return self._map.digest()

    def chunks(self, x: NDArray[Any]) -> Iterator[tuple[slice, Floats]]:
        """Yield the features of a client's samples, `CHUNK` at a time, from the cache or computed and stored there."""
        path = self.path_of(x)
        kept = self._kept(path, len(x))
        if kept is None:
            yield from self._computed(x, path)
            return
        for rows in in_chunks(len(x)):
            yield rows, np.array(kept[rows])

    def _kept(self, path: Path, samples: int) -> Floats | None:
        """Return the features in a file; None if the file is missing or differs from the file that was written."""
        try:
            kept: Floats = np.load(path, mmap_mode="r", allow_pickle=False)
            if kept.shape != (samples, self.features) or kept.dtype != np.dtype("<f8"):
                return None
            with path.open("rb") as file:
                file.seek(-hashlib.sha256().digest_size, os.SEEK_END)
                recorded = file.read()
        except (OSError, ValueError):
            return None
        hashed = hashlib.sha256(path.stem.encode())
        for rows in in_chunks(samples):
            hashed.update(kept[rows].tobytes())
        return kept if hashed.digest() == recorded else None

    def path_of(self, x: NDArray[Any]) -> Path:
        """Return the cache file for the features of these samples."""
        hashed = hashlib.sha256(f"{self._digest} {x.dtype.str} {x.shape}\n".encode())
        for rows in in_chunks(len(x)):
            hashed.update(np.ascontiguousarray(x[rows]).tobytes())
        return self._folder / f"{hashed.hexdigest()}.npy"

    def _computed(self, x: NDArray[Any], path: Path) -> Iterator[tuple[slice, Floats]]:
        """Yield computed features and write them to a temporary file, which is renamed once it is complete."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            kept = np.lib.format.open_memmap(unfinished, mode="w+", dtype="<f8", shape=(len(x), self.features))
            hashed = hashlib.sha256(path.stem.encode())
            for rows, phi in self._map.chunks(x):
                kept[rows] = phi
                hashed.update(kept[rows].tobytes())
                yield rows, phi
            kept.flush()
            with unfinished.open("ab") as file:
                file.write(hashed.digest())
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


INPUT_BITS = 16
FREQUENCY_BITS = 12
TURN_BITS = 16
"""The cosine is tabulated at 2^16 angles of a full turn."""
WAVE_BITS = 24
LARGEST_WHOLE = 2.0**53 - 1.0
"""Largest exact sum; larger integers would be rounded in an order that depends on the machine."""


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

    def __call__(self, x: NDArray[Any]) -> Floats:
        """Return the inputs as rows; bytes are divided by 255."""
        samples = check_samples(x, self.shape)
        unit = 255.0 if samples.dtype == np.uint8 else 2.0**INPUT_BITS
        return scaled(whole_numbers(samples, INPUT_BITS), self.norm, unit=unit)


@dataclass(frozen=True)
class Projection(FeatureMap):
    """`features` random sums of the inputs with signs +1 and -1 from `seed`, divided by sqrt(features).

    By the Johnson-Lindenstrauss lemma, lengths are nearly preserved. A sample longer than `norm` is shortened to it.
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

    def constants(self) -> Iterator[bytes]:
        """Yield the signs."""
        yield self.signs.astype("i1").tobytes()

    def __call__(self, x: NDArray[Any]) -> Floats:
        """Return the projected inputs as rows; bytes are divided by 255."""
        samples = check_samples(x, self.shape)
        inputs = whole_numbers(samples, INPUT_BITS)
        _check_exact(float(np.max(np.abs(inputs).sum(axis=1), initial=0.0)), "the projection")
        unit = 255.0 if samples.dtype == np.uint8 else 2.0**INPUT_BITS
        return scaled(inputs @ self.signs, self.norm, unit=unit * math.sqrt(self.features))


@dataclass(frozen=True)
class RandomFourier(FeatureMap):
    """Cosine and sine of `features` / 2 random frequencies (Rahimi and Recht 2007): a Gaussian kernel approximation.

    The kernel has width `bandwidth`. Every sample has length `norm` up to 2^-22, since cos^2 + sin^2 = 1. Frequencies
    are w / (2 pi bandwidth) turns with w nearly Gaussian, rounded to integers; the phase is looked up modulo a turn.

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
    """Frequencies as integers."""
    wave: Floats = field(init=False, repr=False, compare=False)
    """The cosine at every tabulated angle."""

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
        # Machines may differ in the last bit of a cosine; rounded to 2^-24, cosines agree (tested at every angle).
        wave = np.cos(2.0 * math.pi * np.arange(2**TURN_BITS) / 2**TURN_BITS)
        rounded = np.ldexp(np.rint(np.ldexp(wave, WAVE_BITS)) + 0.0, -WAVE_BITS)  # + 0.0: no negative zero
        object.__setattr__(self, "wave", rounded * (1.0 - 2.0**-22))  # keeps rounded rows within the norm

    def constants(self) -> Iterator[bytes]:
        """Yield the frequencies and the cosine table."""
        yield self.turns.astype("<i8").tobytes()
        yield self.wave.astype("<f8").tobytes()

    def __call__(self, x: NDArray[Any]) -> Floats:
        """Return the cosines of all frequencies, then their sines."""
        samples = check_samples(x, self.shape)
        inputs = whole_numbers(samples / 255.0 if samples.dtype == np.uint8 else samples, INPUT_BITS)
        _check_exact(
            float(np.max(np.abs(inputs).sum(axis=1), initial=0.0)) * float(np.abs(self.turns).max()),
            "a phase of random Fourier features",
        )
        # In units of 2^-(INPUT_BITS + FREQUENCY_BITS) table steps; floor and remainder of integers are exact.
        phases = np.floor(np.ldexp(inputs @ self.turns, -INPUT_BITS - FREQUENCY_BITS)).astype(np.int64)
        places = np.concatenate([phases, phases - 2 ** (TURN_BITS - 2)], axis=1) % 2**TURN_BITS
        waves: Floats = self.wave[places]
        return waves * (self.norm * math.sqrt(2.0 / self.features))


def _check_exact(largest: float, what: str) -> None:
    """Refuse sums beyond `LARGEST_WHOLE`."""
    if largest > LARGEST_WHOLE:
        raise UnusableSamplesError(
            f"{what} would reach {largest:.3g}, beyond 2^53: scale the inputs down by a constant"
        )
