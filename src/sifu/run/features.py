"""Feature maps of a run, and clients with features instead of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, is_dataclass, replace
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

    For a user's module, the client also keeps the samples and the map: see `mapped_again`.
    """

    features: str = ""
    features_declared: bool = False
    mapped_from: Array | None = None
    sample_shape: tuple[int, ...] = ()
    samples_of: Array | None = field(default=None, repr=False)
    mapping: FeatureMap | None = field(default=None, repr=False)


def with_samples(client: Any, chosen: Array, name: str) -> Any:
    """Return a client called `name` with only the `chosen` samples, without their identities."""
    kept: dict[str, Any] = {"name": name, "x": np.asarray(client.x)[chosen], "y": np.asarray(client.y)[chosen]}
    if isinstance(client, FeatureData) and client.mapped_from is not None:
        kept["mapped_from"] = client.mapped_from[chosen]
    if isinstance(client, FeatureData) and client.samples_of is not None:
        kept["samples_of"] = client.samples_of[chosen]
    if isinstance(client, ClientData):
        kept["ids"] = None
    is_data = is_dataclass(client) and not isinstance(client, type)
    return replace(client, **kept) if is_data else ClientData(**kept)


def mapped_again(client: Any) -> Any:
    """Return a client with the features that a user's module gives for its samples now, other clients unchanged.

    A module may give a sample other features next to certain other samples. After records were forgotten, features
    that it computed next to them must therefore not be used.
    """
    if not isinstance(client, FeatureData) or client.mapping is None or client.samples_of is None:
        return client
    return replace(client, x=_features(client.mapping, client.samples_of, client.x.dtype))


def _features(mapping: FeatureMap, x: Array, dtype: Any) -> Array:
    return np.concatenate([phi for _, phi in mapping.chunks(x)]).astype(dtype)


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
    features = map_of(spec, clients)
    assert features is not None  # this regime always has a feature map
    if device != "cpu":
        features = features.on(device)
    digest, declared, users = features.digest(), features.is_declared, features.kind == "module"
    mapped = []
    for client in clients:
        x, ids = np.asarray(client.x), getattr(client, "ids", None)
        rows, again = _features(features, x, spec.model.dtype), (x, features) if users else (None, None)
        declared_map = digest, declared, row_digests(x), x.shape[1:]
        mapped.append(FeatureData(client.name, rows, client.y, *declared_map, *again, ids=ids))
    return tuple(mapped)
