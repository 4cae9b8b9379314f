"""Feature maps: public functions from one sample to k features of norm at most c, identified by a digest.

A map depends on no client's data, so a head on its features depends on a client only through the statistics that the
client sent. A map is `exact` if every machine computes the same bits: it uses only integers and operations that IEEE
754 rounds in one way. Its features then do not depend on batches, threads, libraries or a GPU, and statistics of the
same samples have the same digest everywhere. A map that uses a network is not exact: its bits depend on the kind of
machine, and proofs hold for the statistics that were sent.
"""

from __future__ import annotations

import abc
import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from sifu.errors import InputError
from sifu.theory.participation import base_key, scores

Floats = NDArray[np.float64]

CHUNK = 256
"""Number of samples mapped at a time, so that the features of a large data set need not fit in memory."""
SAME_FEATURES = 1e-3
"""Largest difference between computations of a feature, relative to the largest feature. Rounding stays far below."""

OUTSIDE_SETTINGS = {"features", "norm", "device"}
"""Fields that `settings` omits: `digest` adds the first two itself, and the device does not change the map."""


class FeatureMap(abc.ABC):
    """A public map from a sample to `features` values with a norm of at most `norm`."""

    kind: str
    features: int
    norm: float
    exact: bool
    known: bool = True
    """False for a user's module that is not known (`sifu.data.own_modules`)."""
    source: str = ""
    """Digest of the user's source file, or of the files of a Hugging Face model; empty if there is none."""
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]  # a map is a dataclass, or overrides `settings` or `digest`

    @abc.abstractmethod
    def __call__(self, x: NDArray[Any]) -> Floats:
        """Return the features of the samples, (n, k), without the constant feature for the bias."""

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
        """Yield the rows and the features of the samples, `CHUNK` samples at a time."""
        for rows in in_chunks(len(x)):
            yield rows, self(x[rows])


def in_chunks(samples: int) -> Iterator[slice]:
    """Return slices that cover `samples` rows, `CHUNK` rows at a time."""
    return (slice(start, min(start + CHUNK, samples)) for start in range(0, samples, CHUNK))


def check_norm(norm: float) -> None:
    """Refuse a norm bound c that is not positive and finite."""
    if not 0.0 < norm < math.inf:
        raise InputError(f"the length of a sample's features must be a positive number, found {norm}")


def scaled(rows: Floats, norm: float, unit: float) -> Floats:
    """Return integer rows divided by `unit`, shortened to the length `norm` if longer.

    The squared length is summed as an integer, so the order of summation does not matter. Zero rows stay zero.

    >>> scaled(np.array([[3.0, -4.0], [30.0, -40.0]]), 10.0, unit=1.0)
    array([[ 3., -4.],
           [ 6., -8.]])
    """
    lengths = np.sqrt(square_lengths(rows))
    factors = np.divide(norm, lengths, out=np.full_like(lengths, 1.0 / unit), where=lengths > 0.0)
    factors = np.minimum(factors, 1.0 / unit)
    return rows * factors[:, None]


def square_lengths(rows: Floats) -> Floats:
    """Return sum_j u_j^2 of each integer row, computed exactly and rounded once."""
    squares: Floats = np.einsum("ij,ij->i", rows, rows)
    for row in np.flatnonzero(squares >= 2.0**52):  # einsum may have rounded intermediate sums
        squares[row] = float(sum(int(value) ** 2 for value in rows[row]))
    return squares


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

    The name of a file identifies the map and the samples. The last 32 bytes of the file are the SHA-256 of its name and
    features, so a file that was damaged, or holds the features of another client or map, is computed again.
    """

    def __init__(self, computed: FeatureMap, folder: Path) -> None:
        self._map, self._folder = computed, folder
        self.kind, self.features = computed.kind, computed.features
        self.norm, self.exact = computed.norm, computed.exact
        self.known, self.source = computed.known, computed.source
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
        """Return the features in a file, or None if the file is missing or differs from the file that was written."""
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
