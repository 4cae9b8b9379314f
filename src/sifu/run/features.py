"""Feature maps of a run, and clients with features instead of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sifu.core.spec import Spec
from sifu.core.spec.sections import FeaturesSpec
from sifu.data.client_data import ClientData
from sifu.data.dataset import row_digests
from sifu.theory.arrays import Array

if TYPE_CHECKING:
    from sifu.data.feature_maps import FeatureMap


@dataclass(frozen=True)
class FeatureData(ClientData):
    """Client with features instead of samples, the digest of their feature map, and digests of the original samples.

    `module` is the value of `TrainingFacts.module` for a module of the operator that computed the features.
    """

    features: str = ""
    features_declared: bool = False
    mapped_from: Array | None = None
    sample_shape: tuple[int, ...] = ()
    module: str = ""


def with_samples(client: Any, chosen: Array, name: str) -> Any:
    """Return a client called `name` with only the `chosen` samples, without their identities."""
    kept: dict[str, Any] = {"name": name, "x": np.asarray(client.x)[chosen], "y": np.asarray(client.y)[chosen]}
    if isinstance(client, FeatureData) and client.mapped_from is not None:
        kept["mapped_from"] = client.mapped_from[chosen]
    if isinstance(client, ClientData):
        kept["ids"] = None
    is_data = is_dataclass(client) and not isinstance(client, type)
    return replace(client, **kept) if is_data else ClientData(**kept)


def map_of(spec: Spec, clients: Sequence[Any]) -> FeatureMap | None:
    """Return the spec's feature map for samples of the clients' shape, or None if the run uses no feature map."""
    if not spec.regime.maps_samples:
        return None
    return map_for(spec.features, tuple(np.shape(clients[0].x)[1:]))


def map_for(features: FeaturesSpec, shape: tuple[int, ...]) -> FeatureMap:
    """Return the feature map that a section `[features]` describes, for samples of one shape, with its cache."""
    from sifu.data.feature_maps import CachedFeatures
    from sifu.data.feature_maps.build import specified_map

    mapping = specified_map(features, shape)
    return CachedFeatures(mapping, Path(features.cache)) if features.cache else mapping


def with_features(spec: Spec, clients: Sequence[Any], device: str = "cpu") -> tuple[Any, ...]:
    """Return the clients with features instead of samples, if the run trains on features.

    A closed-form head maps the samples itself, so its clients are returned unchanged.
    """
    if not spec.regime.maps_before_training:
        return tuple(clients)
    if all(isinstance(client, FeatureData) for client in clients):
        return tuple(clients)
    from sifu.data.feature_maps.build import module_of_features

    features = map_of(spec, clients)
    assert features is not None  # this regime always has a feature map
    if device != "cpu":
        features = features.on(device)
    digest, declared, module = features.digest(), features.is_declared, module_of_features(features, spec)
    mapped = []
    for client in clients:
        x, ids = np.asarray(client.x), getattr(client, "ids", None)
        rows = np.concatenate([phi for _, phi in features.chunks(x)]).astype(spec.model.dtype)
        origin = digest, declared, row_digests(x), x.shape[1:], module
        mapped.append(FeatureData(client.name, rows, client.y, *origin, ids=ids))
    return tuple(mapped)
