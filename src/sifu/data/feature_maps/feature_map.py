"""What a feature map is: a public function of one sample, known by its digest, that gives k numbers of norm at most c.

Nothing of a client's data shapes a map, so a head on its features owes a client only what the client sent. A map is
`exact` where every machine computes the same bits: it works on whole numbers and on operations that IEEE 754 rounds in
one way only. Then features do not depend on batches, threads, libraries or a GPU, and statistics of the same samples
have the same digest anywhere. A map through a network is not exact: its bits are those of one kind of machine, and what
is proven is proven of the statistics that were sent.
"""

from __future__ import annotations

import abc
import hashlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sifu.errors import InputError, UnusableSamplesError
from sifu.theory.participation import base_key, scores

Floats = NDArray[np.float64]

CHUNK = 256
"""This many samples are mapped at once: features of 100,000 samples need never be in memory together."""
LARGEST_INPUT = 2.0**400
"""Beyond it the squared length of a sample may not be a float64 any more."""


class FeatureMap(abc.ABC):
    """A public map from samples to `features` numbers of norm at most `norm`."""

    kind: str
    features: int
    norm: float
    exact: bool

    @abc.abstractmethod
    def __call__(self, x: NDArray[Any]) -> Floats:
        """The features of each sample, (n, k), without the constant."""

    @abc.abstractmethod
    def constants(self) -> Iterator[bytes]:
        """Everything drawn or loaded that the features depend on, as bytes for the digest."""

    @abc.abstractmethod
    def settings(self) -> dict[str, Any]:
        """Everything that was chosen: numbers and words."""

    def on(self, device: str) -> FeatureMap:
        """The same map computed on a device (cpu, cuda), where that makes a difference."""
        return self

    def digest(self) -> str:
        """SHA-256 of the settings (JSON, sorted keys) and of the constants: two maps are one map if they agree."""
        settings = {"kind": self.kind, "features": self.features, "norm": self.norm, **self.settings()}
        hashed = hashlib.sha256(f"sifu features 1 {json.dumps(settings, sort_keys=True)}\n".encode())
        for piece in self.constants():
            hashed.update(piece)
        return hashed.hexdigest()

    @property
    def is_declared(self) -> bool:
        """Whether the operator must declare that the map is public: a seed says it on its own, a network does not."""
        return self.kind in ("module", "pretrained")

    def chunks(self, x: NDArray[Any]) -> Iterator[tuple[slice, Floats]]:
        """Features of many samples, `CHUNK` at a time, with their rows."""
        for start in range(0, len(x), CHUNK):
            rows = slice(start, min(start + CHUNK, len(x)))
            yield rows, self(x[rows])


def check_norm(norm: float) -> float:
    """The largest length c of a sample's features."""
    if not 0.0 < norm < math.inf:
        raise InputError(f"the length of a sample's features must be a positive number, found {norm}")
    return float(norm)


def check_samples(x: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Samples of the shape that the map was made for, all of them finite and at most `LARGEST_INPUT`."""
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
    """Rows of whole numbers as features of length `norm`, or, with a unit, rows / unit where that is not longer.

    The squared length is summed as an integer, so it has no order of summation. Zero rows stay zero.

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
    """sum_j u_j^2 of rows of whole numbers, exactly and then rounded once."""
    squares = np.einsum("ij,ij->i", rows, rows)
    for row in np.flatnonzero(squares >= 2.0**52):  # the sum may have been rounded on the way
        squares[row] = float(sum(int(value) ** 2 for value in rows[row]))
    return squares


def whole_numbers(x: NDArray[Any], bits: int) -> Floats:
    """Flat samples in units of 2^-bits, bytes as they are."""
    rows = np.asarray(x, dtype=np.float64).reshape(len(x), math.prod(x.shape[1:]))
    return rows if np.asarray(x).dtype == np.uint8 else np.rint(np.ldexp(rows, bits))


def drawn_normals(seed: int, purpose: str, count: int) -> Floats:
    """Nearly Gaussian numbers of mean 0 and variance 1, the same on every machine: sums of twelve 16-bit draws.

    >>> drawn_normals(0, "filters", 3).round(3)
    array([ 0.491,  0.052, -2.191])
    """
    words = scores(base_key(seed, purpose), np.arange(3 * count)).reshape(count, 3)
    total = np.zeros(count, dtype=np.int64)
    for shift in (0, 16, 32, 48):
        total += ((words >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64).sum(axis=1)
    return (total - 6 * 65535) / 65536.0


class CachedFeatures(FeatureMap):
    """A map whose features of whole clients (`chunks`) are kept in `folder`; otherwise it is the map it was made of."""

    def __init__(self, computed: FeatureMap, folder: Path) -> None:
        self._map, self._folder = computed, folder
        self.kind, self.features = computed.kind, computed.features
        self.norm, self.exact = computed.norm, computed.exact
        self._digest = computed.digest()

    def __call__(self, x: NDArray[Any]) -> Floats:
        """As computed."""
        return self._map(x)

    def on(self, device: str) -> CachedFeatures:
        """Computed on another device, kept in the same folder."""
        return CachedFeatures(self._map.on(device), self._folder)

    def constants(self) -> Iterator[bytes]:
        """Those of the map."""
        return self._map.constants()

    def settings(self) -> dict[str, Any]:
        """Those of the map."""
        return self._map.settings()

    def digest(self) -> str:
        """That of the map: where features are kept changes nothing about them."""
        return self._map.digest()

    def chunks(self, x: NDArray[Any]) -> Iterator[tuple[slice, Floats]]:
        """Features a block at a time: read where they are kept, and kept where they are not."""
        path, shape = self.path_of(x), (len(x), self.features)
        try:
            kept = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError):
            kept = None
        if kept is None or kept.shape != shape or kept.dtype != np.dtype("<f8"):
            yield from self._computed(x, path)
            return
        for start in range(0, len(x), CHUNK):
            rows = slice(start, min(start + CHUNK, len(x)))
            yield rows, np.array(kept[rows])

    def path_of(self, x: NDArray[Any]) -> Path:
        """Where the features of these samples are kept."""
        hashed = hashlib.sha256(f"{self._digest} {x.dtype.str} {x.shape}\n".encode())
        for start in range(0, len(x), CHUNK):
            hashed.update(np.ascontiguousarray(x[start : start + CHUNK]).tobytes())
        return self._folder / f"{hashed.hexdigest()}.npy"

    def _computed(self, x: NDArray[Any], path: Path) -> Iterator[tuple[slice, Floats]]:
        """Compute, and give the file its name when it is whole."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            kept = np.lib.format.open_memmap(unfinished, mode="w+", dtype="<f8", shape=(len(x), self.features))
            for rows, phi in self._map.chunks(x):
                kept[rows] = phi
                yield rows, phi
            kept.flush()
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
