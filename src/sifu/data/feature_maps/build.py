"""From the words of a spec to a feature map, and from a client's samples to its statistics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sifu.data.feature_maps.base import FeatureMap, Floats, Progress
from sifu.data.feature_maps.convolutions import RandomConvolutions, options_for
from sifu.data.feature_maps.networks import NetworkFeatures
from sifu.data.feature_maps.tables import PlainInputs, Projection, RandomFourier
from sifu.errors import InputError
from sifu.theory.closed_form import FixedPoint, Statistics, Targets
from sifu.theory.closed_form.sums import statistics_of_chunks

KINDS = ("none", "random_convolutions", "random_fourier", "projection", "module", "pretrained")


def feature_map(kind: str, shape: tuple[int, ...], **options: Any) -> FeatureMap:
    """The map of a kind for samples of a `shape` (images: channels, height, width); options are those of its class.

    >>> feature_map("projection", (13,), features=4, seed=1).features
    4
    """
    try:
        match kind:
            case "none":
                return PlainInputs(shape, **options)
            case "projection":
                return Projection(shape, **options)
            case "random_fourier":
                return RandomFourier(shape, **options)
            case "random_convolutions":
                image = _image(shape)
                return RandomConvolutions(image, **(options_for(image) | options))
            case "module":
                return NetworkFeatures(shape=shape, **options)
            case "pretrained":
                from sifu.data.feature_maps.efficientnet import pretrained_efficientnet  # imports torch

                return pretrained_efficientnet(_image(shape), **options)
    except TypeError as error:
        raise InputError(f"features of kind {kind!r} do not take these options: {error}") from error
    raise InputError(f"features of kind {kind!r} are not known: write one of {', '.join(KINDS)}")


def fixed_point(features: FeatureMap, targets: Targets, *, feature_bits: int = 16, target_bits: int = 16) -> FixedPoint:
    """The fixed point in which features of this map and such targets are written."""
    return FixedPoint(
        features=features.features,
        outputs=targets.outputs,
        feature_bits=feature_bits,
        target_bits=target_bits,
        norm=features.norm,
        target_norm=targets.norm,
    )


def client_statistics(
    features: FeatureMap,
    targets: Targets,
    fixed: FixedPoint,
    x: NDArray[Any],
    y: NDArray[Any],
    progress: Progress | None = None,
) -> Statistics:
    """(G, H, n, q) of a client's samples, a chunk at a time; `progress(done, all)` after each.

    >>> import numpy as np
    >>> targets = Targets("classification", 2)
    >>> plain = feature_map("none", (1,))
    >>> data = client_statistics(plain, targets, fixed_point(plain, targets), np.array([[2.0]]), np.array([1]))
    >>> data.gram / 2**32
    array([[4., 2.],
           [2., 1.]])
    """
    if len(x) != len(y):
        raise InputError(f"{len(x)} samples have {len(y)} labels")
    encoded = targets.encode(np.asarray(y))

    def pieces() -> Iterator[tuple[Floats, Floats]]:
        for rows, phi in features.chunks(x, progress):
            yield phi, encoded[rows]

    return statistics_of_chunks(fixed, pieces())


def _image(shape: tuple[int, ...]) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise InputError(f"images have a shape (channels, height, width), found {shape}")
    return shape[0], shape[1], shape[2]
