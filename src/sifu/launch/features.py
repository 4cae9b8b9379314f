"""The public feature map of a spec, and clients with features in the place of their samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sifu.core.spec import IMAGE_FEATURES, RIDGE, Spec
from sifu.data.federation import ClientData

if TYPE_CHECKING:
    from sifu.data.feature_maps import FeatureMap

USUAL_COUNT = 512
"""How many features random_fourier and projection have unless the spec says otherwise."""


@dataclass(frozen=True)
class FeatureData(ClientData):
    """A client whose `x` are features of the map with this digest."""

    features: str = ""
    features_declared: bool = False


def map_of(spec: Spec, clients: Sequence[Any]) -> FeatureMap | None:
    """The feature map of a spec for clients with such samples; None where a linear model takes them as they are."""
    features, shape = spec.features, tuple(np.shape(clients[0].x)[1:])
    if features.kind == "none" and spec.model.kind != RIDGE:
        return None
    from sifu.data.feature_maps import feature_map

    options: dict[str, Any] = {"norm": features.norm}
    if features.kind not in ("none", "pretrained"):
        options["seed"] = features.seed
    if features.kind in ("random_fourier", "projection"):
        options["features"] = features.count or USUAL_COUNT
    if features.kind == "random_fourier":
        options["bandwidth"] = features.bandwidth
    if features.kind in IMAGE_FEATURES and len(shape) == 2:  # images of one channel, without an axis for it
        shape = (1, *shape)
    return feature_map(features.kind, shape, **options)


def is_declared(features: FeatureMap) -> bool:
    """Whether the operator must declare that the map is public: a seed says it by itself, a network does not."""
    return features.kind in ("module", "pretrained")


def with_features(spec: Spec, clients: Sequence[Any]) -> tuple[Any, ...]:
    """The clients of a run that trains on features, each mapped once; a closed-form head maps them by itself."""
    if spec.model.kind == RIDGE or spec.features.kind == "none":
        return tuple(clients)
    if all(isinstance(client, FeatureData) for client in clients):
        return tuple(clients)
    features = map_of(spec, clients)
    assert features is not None  # the kind is not none
    digest, declared = features.digest(), is_declared(features)
    mapped = []
    for client in clients:
        rows = np.concatenate([phi for _, phi in features.chunks(np.asarray(client.x))])
        mapped.append(FeatureData(client.name, rows.astype(spec.model.dtype), client.y, digest, declared))
    return tuple(mapped)
