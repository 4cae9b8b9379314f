"""Construction of feature maps from the section `[features]` of a spec."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sifu.core.allowed_code import demand_consent
from sifu.core.spec import Spec
from sifu.core.spec.sections import PRETRAINED, FeaturesSpec
from sifu.data.feature_maps.feature_map import FeatureMap
from sifu.data.feature_maps.row_maps import PlainInputs, RandomFourier
from sifu.errors import InputError
from sifu.theory.closed_form import FixedPoint, Targets
from sifu.theory.facts import MODULE_DECLARED, MODULE_KNOWN, MODULE_NOT_DECLARED


def fixed_point(features: FeatureMap, targets: Targets) -> FixedPoint:
    """Return the fixed-point format for features of this map and these targets."""
    return FixedPoint(features.features, targets.outputs, norm=features.norm, target_norm=targets.norm)


USUAL_COUNT = 512
"""Default number of features of random_fourier."""


def specified_map(features: FeaturesSpec, shape: tuple[int, ...]) -> FeatureMap:
    """Return the feature map that a section `[features]` specifies, for samples of one shape.

    The section may come from another machine, so a module that it names runs only if this process allowed it. Nothing
    is written to disk, except that a model on the Hugging Face hub may be downloaded.

    >>> specified_map(FeaturesSpec(kind="random_fourier"), (13,)).features
    512
    """
    kind, seed, norm = features.kind, features.seed, features.norm
    if kind == "none":
        return PlainInputs(shape, norm)
    if kind == "random_fourier":
        return RandomFourier(shape, features.count or USUAL_COUNT, features.bandwidth, seed, norm)
    if kind == "module":
        from sifu.data.feature_maps.fixed_networks import NetworkFeatures

        module, source = module_of(features.module)
        return NetworkFeatures(_with_deep_network(features, module, shape), shape, norm=norm, source=source)
    if len(shape) == 2:  # grey images have no axis for channels
        shape = (1, *shape)
    options: dict[str, Any] = {"shape": shape, "seed": seed, "norm": norm}
    if kind == "transformers":
        from sifu.data.feature_maps.transformer_networks import transformer_features

        reading = ("model", "layers", "size", "count")
        return transformer_features(**options, **{name: getattr(features, name) for name in reading})
    if len(shape) != 3:
        raise InputError(f"images must have a shape (channels, height, width), found {shape}")
    from sifu.data.feature_maps.efficientnet import DEEP_BLOCKS, SIDE, pretrained_efficientnet

    options |= {"model": features.model or PRETRAINED[0], "size": features.size or SIDE, "count": features.count}
    return pretrained_efficientnet(**options, blocks=_blocks(features, DEEP_BLOCKS))


def _blocks(features: FeaturesSpec, deep: int) -> int:
    """Return the number of blocks before the last layer that `features.layers` selects; "deep" means `deep` blocks."""
    words = {"last": 0, "deep": deep}
    return words[features.layers] if isinstance(features.layers, str) else features.layers


def _with_deep_network(features: FeaturesSpec, module: Any, shape: tuple[int, ...]) -> Any:
    """Return the user's module unchanged, or a `DeepNetwork` over it if the section asks for blocks or a projection."""
    from sifu.data.feature_maps.deep_network import Backbone, blocks_of, deep_network

    blocks = _blocks(features, blocks_of(module, shape) if isinstance(module, Backbone) else 0)
    if not blocks and not features.count:
        return module
    return deep_network(module, shape, blocks, count=features.count, seed=features.seed)


def module_of_features(features: FeatureMap, spec: Spec) -> str:
    """Return `TrainingFacts.module` for the operator's module that computes features, or "" if there is none."""
    if features.kind != "module":
        return ""
    if features.known:
        return MODULE_KNOWN
    if not spec.model.module_is_pure:
        return MODULE_NOT_DECLARED
    return f"{MODULE_DECLARED}{spec.features.module} (SHA-256 of its file {features.source})"


def texts_as_tokens(x: Any, features: FeaturesSpec) -> Any:
    """Return texts as rows of token ids for the model of a section `[features]`, and any other input unchanged.

    Texts are a list, an array or a series of strings.
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
    """Return the module that the named function makes, and the SHA-256 of its source file.

    The file is searched on Python's path and in the current folder. It is imported only with the operator's consent.
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
