"""Extension points: methods and spec keys that other packages provide through entry points.

A package declares its methods and keys in its pyproject.toml (docs/new-method.md):

    [project.entry-points."sifu.methods"]
    my_method = "my_package.my_method:MyMethod"

    [project.entry-points."sifu.spec_keys"]
    "server.clip" = "my_package.keys:CLIP"

A program that is not an installed package registers the same objects with `sifu.register` and `sifu.register_key`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from sifu.errors import InputError, MissingExtensionError

METHODS = "sifu.methods"
SPEC_KEYS = "sifu.spec_keys"
WHERE_BASELINES_ARE = "the SIFU paper's baselines are in sifu-paper: pip install ./paper in sifu's repository"


@dataclass(frozen=True)
class RoundExtras:
    """Optional steps of a round, which spec keys of extensions switch on.

    Attributes:
        update_clip: Bound on the norm of every client's update, or 0 for no bound.
        update_noise: Standard deviation of the noise added to every update, as a multiple of the bound, or 0 for no
            noise.
        updates_every: Interval, in rounds, at which clients' updates are stored, or 0 for never.
    """

    update_clip: float = 0.0
    update_noise: float = 0.0
    updates_every: int = 0


@dataclass(frozen=True)
class SpecKey:
    """Key that an extension adds to a section of the spec.

    Attributes:
        name: Section and key, "server.clip" for example.
        default: Default value, which switches the extension off; its type is the type of the key.
        comment: One line for readers of the spec.
        demands: Function that takes a spec and yields a pair for each condition on the value: whether the condition
            holds, and a description of valid values.
        sets: Field of `RoundExtras` that takes the value, or None if only the extension reads it.
    """

    name: str
    default: float | int
    comment: str
    demands: Callable[[Any], Iterable[tuple[bool, str]]] = lambda spec: ()
    sets: Literal["update_clip", "update_noise", "updates_every"] | None = None


_KEYS: dict[str, SpecKey] = {}


def register_key(key: SpecKey) -> None:
    """Add a spec key for this process; an entry point of the group `sifu.spec_keys` adds it for every process."""
    _KEYS[key.name] = key


def spec_key(name: str) -> SpecKey | None:
    """Return the extension's key of this name, or None if no installed package provides it."""
    if name not in _KEYS and (key := provided(SPEC_KEYS, name)) is not None:
        _KEYS[name] = key
    return _KEYS.get(name)


def required_key(name: str, value: Any) -> SpecKey:
    """Return the extension's key of this name, for a spec that sets it to `value`.

    Raises:
        MissingExtensionError: If no installed package provides the key.
    """
    key = spec_key(name)
    if key is None:
        raise MissingExtensionError(
            f"the spec has {name} = {value!r}, which needs a package that is not installed: install the one that "
            f"provides {name} ({WHERE_BASELINES_ARE})"
        )
    return key


@functools.cache
def _entries(group: str) -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=group) if not entry.value.startswith("sifu_paper.")}


def provided_names(group: str) -> tuple[str, ...]:
    """Return the names that installed packages provide in a group."""
    return tuple(_entries(group))


def provided(group: str, name: str) -> Any | None:
    """Load the object that an installed package provides under this name; return None if no package provides one."""
    entry = _entries(group).get(name)
    if entry is None:
        return None
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        package = entry.dist.name if entry.dist else entry.value
        raise InputError(f"{name} of the package {package} cannot be loaded: {error}") from error
