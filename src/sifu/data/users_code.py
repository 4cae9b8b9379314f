"""Rule that tells a user's own code from installed libraries; only the user's code is searched for shared state."""

from __future__ import annotations

import functools
import re
import sys
import sysconfig
from pathlib import Path
from types import FunctionType
from typing import Any

from sifu.core.allowed_code import allowed_code

INSTALLED = tuple({str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib", "platlib")})
"""Folders of installed packages. Their modules are not searched, because they fill their own caches during use."""
_LIBRARIES = {"builtins", "sifu", "timm", "torch", "torchvision", "transformers"}
"""Packages that are never the user's own."""
OWN_PACKAGES: set[str] = set()
"""Packages that define the class of a user's module; their code counts as the user's own, even if installed."""


@functools.cache
def _is_installed(file: str) -> bool:
    return any(Path(file).resolve().is_relative_to(folder) for folder in INSTALLED)


def is_users(name: Any) -> bool:
    """Return whether a Python module of this name is the user's own.

    An installed Python module counts as the user's own only if its package defines the class of a user's module, or a
    function that the user allowed.
    """
    if not isinstance(name, str):
        return False
    package, file = package_of(name), getattr(sys.modules.get(name), "__file__", None)
    if package in _LIBRARIES or name.startswith("_cython_"):
        return False
    if file is None:
        return name == "__main__" or package not in sys.stdlib_module_names
    return not _is_installed(file) or package in OWN_PACKAGES or package in map(package_of, allowed_code())


def package_of(name: str) -> str:
    """Return the top-level package in the name of a module, or of a function as in `allow_code`."""
    return re.split("[.:]", name)[0]


def is_users_own(value: Any) -> bool:
    """Return whether a function, or the class of any other object, belongs to the user and not to torch."""
    function = getattr(value, "func", getattr(value, "__func__", value))
    return is_users(function.__module__ if isinstance(function, FunctionType) else type(function).__module__)
