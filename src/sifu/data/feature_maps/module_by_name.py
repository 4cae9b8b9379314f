"""A torch module of the user's, by the name of the function that makes it: package.file:function."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import sys
from pathlib import Path
from typing import Any

from sifu.core.allowed_code import demand_consent
from sifu.data.feature_maps.networks import NetworkFeatures
from sifu.errors import InputError


def named_module_features(name: str, shape: tuple[int, ...], norm: float) -> NetworkFeatures:
    """Features through the module that the function returns; its weights and the text of its file are in the digest."""
    module, source = module_of(name)
    return NetworkFeatures(module, shape, norm=norm, source=source)


def module_of(name: str) -> tuple[Any, str]:
    """The module that the function returns, and the digest of its file's text.

    The file is looked for where Python looks, and in the current folder; nothing is imported without consent.
    """
    import torch

    package, _, function = name.partition(":")
    if not package or not function:
        raise InputError(f"features.module = {name!r}: write package.file:function, for example trunk:make")
    demand_consent(name)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        file = importlib.import_module(package)
        factory = getattr(file, function)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"features.module = {name!r} cannot be found: {error}") from error
    except Exception as error:
        raise InputError(f"features.module = {name!r}: importing it failed: {type(error).__name__}: {error}") from error
    try:
        module = factory()
    except Exception as error:
        raise InputError(f"features.module = {name!r} failed: {type(error).__name__}: {error}") from error
    if not isinstance(module, torch.nn.Module):
        raise InputError(f"features.module = {name!r} returned {type(module).__name__}, not a torch.nn.Module")
    text = Path(inspect.getsourcefile(file) or "").read_bytes()
    return module, hashlib.sha256(text).hexdigest()
