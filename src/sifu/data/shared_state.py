"""Variables that all copies of a module share, and a check that training leaves them unchanged.

A deep copy of a module shares class variables, module-level variables, default arguments and caches with the original
(docs/theory.md, section 6.6). A value kept there passes from one client to the next. The variables that the code of the
module names are read before training and compared afterwards.
"""

from __future__ import annotations

import contextvars
import functools
import hashlib
import os
import pickle
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from sifu.errors import InputError

INSTALLED = tuple({str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib", "platlib")})
"""Folders of installed packages. Their modules are not searched: they fill caches of their own while they work."""
_CODE = (FunctionType, MethodType, type, ModuleType, staticmethod, classmethod, property)
_CACHE = type(functools.lru_cache(lambda: None))


def shared_state(module: nn.Module) -> dict[str, str]:
    """Return a digest of each variable that the code of a module names and that its copies share.

    Args:
        module: A user's module.

    Returns:
        Digests by the name of the variable; variables that cannot be read are left out.
    """
    found: dict[str, str] = {}
    seen: set[int] = set()
    for part in module.modules():
        for name, value in _of_class(type(part), seen):
            found[name] = _digest(value)
        for hook in (*part.__dict__.values(), *_hooks(part)):
            for name, value in _of_code(hook, seen):
                found[name] = _digest(value)
    return {name: digest for name, digest in found.items() if digest}


def own_state(module: nn.Module) -> dict[str, str]:
    """Return a digest of each attribute of a module and its parts, and of variables in closures of its functions.

    Parameters and buffers are left out. The digest of a value that cannot be read is empty.
    """
    found = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                found[f"{path}.{name}".lstrip(".")] = _digest(value)
        for value in (*vars(part).values(), *_hooks(part)):
            function = getattr(value, "__func__", value)
            for cell, held in zip(*_closure(function), strict=True):
                found[f"{cell} of {function.__qualname__}"] = _digest(held)
    return found


def refuse_changed_state(before: Mapping[str, str], module: nn.Module) -> None:
    """Refuse a module that changed a variable that all clients share.

    Args:
        before: `shared_state` of the module before it was used.
        module: The module.

    Raises:
        InputError: If one of these variables has another value now, or was added.
    """
    now = shared_state(module)
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if changed:
        raise InputError(
            f"the module {type(module).__name__} changed {', '.join(changed[:3])} while it computed with a client's "
            "data: all clients share this variable, so it carries information between clients. Keep state in "
            "attributes of the module, which every client starts from afresh"
        )


def _closure(function: Any) -> tuple[Sequence[str], Sequence[Any]]:
    """Return the names and contents of a function's closure; empty for other values and unassigned variables."""
    if not isinstance(function, FunctionType) or not function.__closure__:
        return (), ()
    pairs = zip(function.__code__.co_freevars, function.__closure__, strict=True)
    held = {name: cell.cell_contents for name, cell in pairs if cell != CellType()}
    return tuple(held), tuple(held.values())


def _hooks(part: nn.Module) -> Iterator[Any]:
    """Yield the functions in a module's tables of hooks."""
    for value in vars(part).values():
        if isinstance(value, dict):
            yield from value.values()


def _of_class(owner: type, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the variables of a user's class and those that its methods name."""
    for base in owner.__mro__:
        if id(base) in seen or not _is_users(base.__module__):
            continue
        seen.add(id(base))
        for name, value in list(vars(base).items()):
            yield from _of_code(value, seen)
            if not name.startswith("__") and not isinstance(value, _CODE):
                yield f"{base.__qualname__}.{name}", value


def _of_code(value: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the variables that a function shares with its copies, and those of the code that it names."""
    value = getattr(value, "__func__", getattr(value, "fget", value))
    if isinstance(value, _CACHE):
        yield f"the cache of {value.__qualname__}", value
        value = value.__wrapped__
    if not isinstance(value, FunctionType) or id(value) in seen or not _is_users(value.__module__):
        return
    seen.add(id(value))
    yield f"the default arguments of {value.__qualname__}", (value.__defaults__, value.__kwdefaults__)
    yield (
        f"the attributes of {value.__qualname__}",
        {key: item for key, item in vars(value).items() if key != "__wrapped__"},
    )
    names = set(_names(value.__code__))
    if {"environ", "getenv", "putenv"} & names:
        yield "os.environ", dict(os.environ)
    for name in sorted(names & value.__globals__.keys()):
        named = value.__globals__[name]
        if isinstance(named, type):
            yield from _of_class(named, seen)
        elif isinstance(named, (FunctionType, _CACHE)):
            yield from _of_code(named, seen)
        elif not isinstance(named, _CODE):
            yield f"{value.__module__}.{name}", named
            yield from _of_class(type(named), seen)


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names in a code object and in the functions that it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_users(name: str | None) -> bool:
    """Return whether a module of Python is neither installed nor part of sifu."""
    if name is None or name.partition(".")[0] in ("sifu", "builtins", *sys.stdlib_module_names):
        return name == "__main__"
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is None or not str(Path(file).resolve()).startswith(INSTALLED)


_READERS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (threading.local, vars),
    (contextvars.ContextVar, lambda value: value.get(None)),
    ((weakref.WeakKeyDictionary, weakref.WeakValueDictionary), lambda value: list(value.values())),
    (weakref.WeakSet, list),
    (_CACHE, lambda value: value.cache_info().currsize),
)


def _digest(value: Any) -> str:
    """Return a digest of a value; an empty text if it cannot be read."""
    for kind, read in _READERS:
        if isinstance(value, kind):
            value = read(value)
            break
    try:
        return hashlib.sha256(pickle.dumps(value)).hexdigest()
    except Exception:  # pickle raises whatever the value's own methods raise
        return ""
