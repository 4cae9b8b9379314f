"""The feature map that a spec describes, for samples of a shape: the same wherever it is drawn."""

from __future__ import annotations

from typing import Any

from sifu.core.spec import IMAGE_FEATURES
from sifu.core.spec.sections import FeaturesSpec
from sifu.data.feature_maps.base import FeatureMap
from sifu.data.feature_maps.build import feature_map
from sifu.errors import InputError

USUAL_COUNT = 512
"""How many features random_fourier and projection have unless the spec says otherwise."""


def specified_map(features: FeaturesSpec, shape: tuple[int, ...]) -> FeatureMap:
    """The map of a section `[features]`, which may come from another machine: nothing that it names is run or written.

    >>> specified_map(FeaturesSpec(kind="projection"), (13,)).features
    512
    """
    if features.kind == "module":
        raise InputError(
            f"features.module = {features.module!r} is a program: it runs where operator and clients are one, "
            "and never because a server says so. On Flower let clients map their samples before they hand them over"
        )
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
