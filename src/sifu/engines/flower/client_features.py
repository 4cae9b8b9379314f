"""Features of a client's samples, computed once and cached in a folder per client.

A node starts a process for every message, and features of images take far longer than a local step on them. What is
kept is named by the map, the samples and the number format, so other samples never get these features.
"""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import numpy as np

from sifu.data.feature_maps import FeatureMap
from sifu.store.files import write_atomically
from sifu.theory.arrays import Array


def cached_features(features: FeatureMap, x: Array, dtype: str, cache: str | Path | None) -> Array:
    """The features of `x`, from the folder `cache` if they are there; without a folder they are computed."""
    if cache is None:
        return _computed(features, x, dtype)
    named = f"{features.digest()} {dtype} {x.dtype} {x.shape}\n".encode()
    name = hashlib.sha256(named + hashlib.sha256(np.ascontiguousarray(x).data).digest()).hexdigest()
    path = Path(cache) / f"features-{name[:32]}.npy"
    if not path.exists():
        rows, content = _computed(features, x, dtype), io.BytesIO()
        np.save(content, rows)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content.getvalue())
        return rows
    return np.asarray(np.load(path, allow_pickle=False))


def _computed(features: FeatureMap, x: Array, dtype: str) -> Array:
    return np.concatenate([phi for _, phi in features.chunks(x)]).astype(dtype)
