"""The public feature map of a spec, and clients with features in the place of their samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sifu.core.spec import RIDGE, Spec
from sifu.core.spec.sections import FeaturesSpec
from sifu.data.client_data import ClientData
from sifu.data.dataset import row_digests
from sifu.theory.arrays import Array

if TYPE_CHECKING:
    from sifu.data.feature_maps import FeatureMap


@dataclass(frozen=True)
class FeatureData(ClientData):
    """A client whose `x` are features of the map with this digest, and digests of the samples they were made from."""

    features: str = ""
    features_declared: bool = False
    mapped_from: Array | None = None


def map_of(spec: Spec, clients: Sequence[Any]) -> FeatureMap | None:
    """The feature map of a spec for clients with such samples; None where a linear model takes them as they are."""
    if spec.features.kind == "none" and spec.model.kind != RIDGE:
        return None
    return map_for(spec.features, tuple(np.shape(clients[0].x)[1:]))


def map_for(features: FeaturesSpec, shape: tuple[int, ...]) -> FeatureMap:
    """The map of a section `[features]` for samples of a shape, with the cache that it names."""
    from sifu.data.feature_maps import CachedFeatures
    from sifu.data.feature_maps.build import specified_map

    mapping = specified_map(features, shape)
    return CachedFeatures(mapping, Path(features.cache)) if features.cache else mapping


def with_features(spec: Spec, clients: Sequence[Any]) -> tuple[Any, ...]:
    """The clients of a run that trains on features, each mapped once; a closed-form head maps them on its own."""
    if spec.model.kind == RIDGE or spec.features.kind == "none":
        return tuple(clients)
    if all(isinstance(client, FeatureData) for client in clients):
        return tuple(clients)
    features = map_of(spec, clients)
    assert features is not None  # the kind is not none
    digest, declared = features.digest(), features.is_declared
    mapped = []
    for client in clients:
        x = np.asarray(client.x)
        rows = np.concatenate([phi for _, phi in features.chunks(x)]).astype(spec.model.dtype)
        ids = getattr(client, "ids", None)
        mapped.append(FeatureData(client.name, rows, client.y, digest, declared, row_digests(x), ids=ids))
    return tuple(mapped)
