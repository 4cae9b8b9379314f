"""Cache of the features of whole clients, in files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sifu.data.feature_maps.feature_map import FeatureMap, Floats, in_chunks


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
