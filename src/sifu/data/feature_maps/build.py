"""Construction of feature maps from the section `[features]` of a spec."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sifu.core.allowed_code import demand_consent
from sifu.core.spec import IMAGE_FEATURES
from sifu.core.spec.sections import FeaturesSpec
from sifu.data.feature_maps.convolutions import LARGE_IMAGES, LARGEST_SIDE, RandomConvolutions
from sifu.data.feature_maps.feature_map import FeatureMap, PlainInputs, Projection, RandomFourier
from sifu.errors import InputError
from sifu.theory.closed_form import FixedPoint, Targets

if TYPE_CHECKING:  # importing it imports torch, which commands that only read a run do not need
    from sifu.data.feature_maps.tuned_networks import TunedFeatures

KINDS = ("none", "random_convolutions", "random_fourier", "projection", "module", "pretrained", "transformers")
IMAGE_KINDS = ("random_convolutions", "pretrained")
ROW_MAPS = {"none": PlainInputs, "projection": Projection, "random_fourier": RandomFourier}


def feature_map(kind: str, shape: tuple[int, ...], **options: Any) -> FeatureMap:
    """Return the feature map of a kind for samples of one shape.

    Args:
        kind: One of `KINDS`.
        shape: Shape of a sample; (channels, height, width) for images.
        **options: Options of the map's class.

    Raises:
        InputError: If the kind is unknown, or does not accept the shape or the options.

    >>> feature_map("projection", (13,), features=4, seed=1).features
    4
    """
    if kind not in KINDS:
        raise InputError(f"features of kind {kind!r} are unknown: write one of {', '.join(KINDS)}")
    if kind in IMAGE_KINDS and len(shape) != 3:
        raise InputError(f"images must have a shape (channels, height, width), found {shape}")
    if kind == "random_convolutions" and max(shape[1:]) > LARGEST_SIDE:
        options = LARGE_IMAGES | options
    make: Callable[..., FeatureMap] = ROW_MAPS.get(kind, RandomConvolutions)
    if kind == "transformers":
        from sifu.data.feature_maps.transformer_networks import transformer_features

        make = transformer_features
    if kind in ("module", "pretrained"):
        from sifu.data.feature_maps import fixed_networks

        make = fixed_networks.NetworkFeatures if kind == "module" else fixed_networks.pretrained_efficientnet
    try:
        return make(shape=shape, **options)
    except TypeError as error:
        raise InputError(f"features of kind {kind!r} do not accept these options: {error}") from error


def fixed_point(features: FeatureMap, targets: Targets, *, feature_bits: int = 16, target_bits: int = 16) -> FixedPoint:
    """Return the fixed-point format for features of this map and these targets."""
    return FixedPoint(
        features=features.features,
        outputs=targets.outputs,
        feature_bits=feature_bits,
        target_bits=target_bits,
        norm=features.norm,
        target_norm=targets.norm,
    )


USUAL_COUNT = 512
"""Default number of features of random_fourier and projection."""


def specified_map(features: FeaturesSpec, shape: tuple[int, ...]) -> FeatureMap:
    """Return the feature map that a section `[features]` specifies.

    The section may come from another machine. A module that it names runs only if this process allowed it. Nothing is
    written to disk, except that a model on the Hugging Face hub may be downloaded.

    >>> specified_map(FeaturesSpec(kind="projection"), (13,)).features
    512
    """
    options: dict[str, Any] = {"norm": features.norm}
    if features.kind == "module":
        options["module"], options["source"] = module_of(features.module)
    elif features.kind != "none":
        options["seed"] = features.seed
    if features.kind in ("random_fourier", "projection"):
        options["features"] = features.count or USUAL_COUNT
    if features.kind == "random_fourier":
        options["bandwidth"] = features.bandwidth
    if features.kind in IMAGE_FEATURES and len(shape) == 2:  # images of one channel, without an axis for it
        shape = (1, *shape)
    if features.kind == "pretrained":
        from sifu.data.feature_maps.fixed_networks import DEEP_BLOCKS, USUAL_SIDE

        options |= {"size": features.size or USUAL_SIDE, "mirror": features.mirror, "count": features.count}
        options["blocks"] = _blocks(features, DEEP_BLOCKS)
    if features.kind == "transformers":
        reading = ("model", "layers", "size", "mirror", "count")
        options |= {name: getattr(features, name) for name in reading}
    if features.kind == "module":
        options["module"] = _read_deeply(features, options["module"], shape)
    return feature_map(features.kind, shape, **options)


def _blocks(features: FeaturesSpec, deep: int) -> int:
    """Return how many blocks before the last layer `features.layers` selects; the word "deep" means `deep` blocks."""
    words = {"last": 0, "deep": deep}
    return words[features.layers] if isinstance(features.layers, str) else features.layers


def _read_deeply(features: FeaturesSpec, module: Any, shape: tuple[int, ...]) -> Any:
    """Return the user's module unchanged, or a `DeepNetwork` over it if the section asks for blocks or a projection."""
    from sifu.data.feature_maps.deep_network import Backbone, blocks_of, deep_network

    blocks = _blocks(features, blocks_of(module, shape) if isinstance(module, Backbone) else 0)
    if not blocks and not features.count:
        return module
    return deep_network(module, shape, blocks, count=features.count, seed=features.seed)


def tuned_map(features: FeaturesSpec, public: FeatureMap, outputs: int, count: int, stretch: float) -> TunedFeatures:
    """Return the map for `count` groups that tune the network of `public`, in the state before any group has tuned."""
    from sifu.data.feature_maps.fixed_networks import NetworkFeatures
    from sifu.data.feature_maps.tuned_networks import TunedFeatures

    assert isinstance(public, NetworkFeatures)
    return TunedFeatures(public, features, outputs, count, stretch)


def texts_as_tokens(x: Any, features: FeaturesSpec) -> Any:
    """Return texts as rows of token ids for the model of a section `[features]`, and any other input unchanged.

    Texts are a list of strings, or an array or series of them.
    """
    if features.kind != "transformers":
        return x
    if getattr(getattr(x, "dtype", None), "kind", "") in ("U", "T", "O"):
        x = list(x)
    if isinstance(x, str) or not isinstance(x, Sequence) or not any(isinstance(text, str) for text in x):
        return x
    from sifu.data.feature_maps.transformer_networks import tokenised

    return tokenised(features.model, x, features.size)


def module_of(name: str) -> tuple[Any, str]:
    """Return the module that the named function makes, and the digest of its source file.

    The file is searched on Python's path and in the current folder. Nothing is imported without consent.
    """
    import torch

    package, _, function = name.partition(":")
    if not package or not function:
        raise InputError(f"module {name!r}: write package.file:function, for example backbone:make")
    demand_consent(name)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        file = importlib.import_module(package)
        factory = getattr(file, function)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"module {name!r} cannot be found: {error}") from error
    except Exception as error:
        raise InputError(f"module {name!r}: importing it failed: {type(error).__name__}: {error}") from error
    try:
        module = factory()
    except Exception as error:
        raise InputError(f"module {name!r} failed: {type(error).__name__}: {error}") from error
    if not isinstance(module, torch.nn.Module):
        raise InputError(f"module {name!r} returned {type(module).__name__}, not a torch.nn.Module")
    text = Path(inspect.getsourcefile(file) or "").read_bytes()
    return module, hashlib.sha256(text).hexdigest()
