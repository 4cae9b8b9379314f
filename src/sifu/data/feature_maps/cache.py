"""Features kept in a folder, so that they are computed once for the same samples.

A file is named after the map's digest and the samples' digest, and holds float64: statistics of kept features have the
same bits as those of fresh ones. It is written and read a block at a time, so 100,000 samples need no more memory than
a few hundred. The folder belongs to the clients' side, like their data: it holds features of everyone, and no request
erases anything of it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sifu.data.feature_maps.feature_map import CHUNK, FeatureMap, Floats, Progress


class CachedFeatures(FeatureMap):
    """A map whose features of whole clients (`chunks`) are kept in `folder`; otherwise it is the map it was made of."""

    def __init__(self, computed: FeatureMap, folder: Path) -> None:
        self._map, self._folder = computed, folder
        self.kind, self.features, self.norm, self.exact = (
            computed.kind,
            computed.features,
            computed.norm,
            computed.exact,
        )
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

    def chunks(self, x: NDArray[Any], progress: Progress | None = None) -> Iterator[tuple[slice, Floats]]:
        """Features a block at a time: read where they are kept, and kept where they are not."""
        path, shape = self.path_of(x), (len(x), self.features)
        try:
            kept = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError):
            kept = None
        if kept is None or kept.shape != shape or kept.dtype != np.dtype("<f8"):
            yield from self._computed(x, path, progress)
            return
        for start in range(0, len(x), CHUNK):
            rows = slice(start, min(start + CHUNK, len(x)))
            yield rows, np.array(kept[rows])
            if progress is not None:
                progress(rows.stop, len(x))

    def path_of(self, x: NDArray[Any]) -> Path:
        """Where the features of these samples are kept."""
        hashed = hashlib.sha256(f"{self._digest} {x.dtype.str} {x.shape}\n".encode())
        for start in range(0, len(x), CHUNK):
            hashed.update(np.ascontiguousarray(x[start : start + CHUNK]).tobytes())
        return self._folder / f"{hashed.hexdigest()}.npy"

    def _computed(self, x: NDArray[Any], path: Path, progress: Progress | None) -> Iterator[tuple[slice, Floats]]:
        """Compute, and give the file its name when it is whole."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            kept = np.lib.format.open_memmap(unfinished, mode="w+", dtype="<f8", shape=(len(x), self.features))
            for rows, phi in self._map.chunks(x, progress):
                kept[rows] = phi
                yield rows, phi
            kept.flush()
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
