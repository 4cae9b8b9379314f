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
from types import CellType, CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._library.custom_ops import OPDEFS

from sifu.errors import InputError

INSTALLED = tuple({str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib", "platlib")})
"""Folders of installed packages. Their modules are not searched, because they fill their own caches during use."""
_CODE = (FunctionType, MethodType, type, ModuleType, staticmethod, classmethod, property)
_CACHE = type(functools.lru_cache(lambda: None))
_ANY_VARIABLE = {"globals", "vars", "setattr", "modules", "import_module", "__import__", "__dict__"}
"""Names by which code can reach every variable of its file."""
_SETTERS = {
    "set_default_dtype", "set_default_device", "set_default_tensor_type", "set_float32_matmul_precision",
    "set_flush_denormal", "use_deterministic_algorithms", "backends", "seterr", "set_printoptions",
}  # fmt: skip
"""Names by which code changes settings of torch and numpy for the whole process."""
_DEPTH = 8


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
        for hook in (*part.__dict__.values(), *_hooks(part)):  # skip closures: copying a module copies them
            for name, value in _of_code(hook, seen, closure=False):
                found[name] = _digest(value)
    for everywhere in _of_all_modules():
        for name, value in _of_code(everywhere, seen):
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
        module: Module after its use.

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


def _of_all_modules() -> Iterator[Any]:
    """Yield the functions that torch calls for every module, and those of custom operators."""
    for name, table in vars(nn.modules.module).items():
        if name.startswith("_global_") and isinstance(table, dict):
            yield from table.values()
    for operator in list(OPDEFS.values()):
        yield operator._init_fn


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


def _of_code(value: Any, seen: set[int], closure: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield the variables that a function shares with its copies, and those of the code that it names.

    Args:
        value: A function, or anything else, which has none.
        seen: Functions and classes that were searched, by `id`; it is extended.
        closure: True if the function's own closure is also shared.
    """
    value = getattr(value, "__func__", getattr(value, "fget", value))
    if isinstance(value, functools.partial):
        yield (
            f"the arguments of a partial {getattr(value.func, '__qualname__', 'function')}",
            (value.args, value.keywords),
        )
        value = value.func
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
    if _SETTERS & names:
        yield "the settings of torch and numpy", _settings()
    for cell, held in zip(*_closure(value), strict=True) if closure else ():
        yield from _of_variable(f"{cell} of {value.__qualname__}", held, names, seen)
    reached = value.__globals__ if _ANY_VARIABLE & names else names & value.__globals__.keys()
    for name in sorted(reached):
        if not name.startswith("__"):
            yield from _of_variable(f"{value.__module__}.{name}", value.__globals__[name], names, seen)
    for name in sorted(names & sys.modules.keys()):  # imported inside the function
        yield from _of_variable(name, sys.modules[name], names, seen)


def _of_variable(name: str, value: Any, names: set[str], seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield a variable that code names, or the shared variables of the class, function or module that it refers to."""
    if isinstance(value, ModuleType):
        yield from _attributes(name, value, names, {id(value)})
    elif isinstance(value, type):
        yield from _of_class(value, seen)
    elif isinstance(value, (FunctionType, functools.partial, _CACHE)):
        yield from _of_code(value, seen)
    elif not isinstance(value, _CODE):
        yield name, value
        yield from _of_class(type(value), seen)


def _attributes(path: str, owner: Any, names: set[str], seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the values stored under these `names` in a package, its modules and its classes."""
    for name in sorted(names & vars(owner).keys()):
        value = vars(owner)[name]
        if isinstance(value, ModuleType | type):
            if id(value) not in seen:
                seen.add(id(value))
                yield from _attributes(f"{path}.{name}", value, names, seen)
        elif isinstance(value, bool | int | float | complex | str | bytes | list | dict | set | tuple | torch.Tensor):
            yield f"{path}.{name}", value


def _settings() -> tuple[Any, ...]:
    """Return settings of torch and numpy that change what later code computes."""
    backends = torch.backends
    return (
        str(torch.get_default_dtype()),
        str(torch.get_default_device()),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        float(torch.full((1,), 1e-39, dtype=torch.float32) * 1.0),
        (backends.mkldnn.enabled, backends.cudnn.enabled, backends.cuda.matmul.allow_tf32),
        sorted(np.geterr().items()),
    )


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names in a code object and in the functions that it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_users(name: str | None) -> bool:
    """Return whether a Python module is the user's own: neither installed nor part of sifu."""
    if name is None or name.partition(".")[0] in ("sifu", "builtins", *sys.stdlib_module_names):
        return name == "__main__"
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is None or not _is_installed(file)


@functools.cache  # called for every function in reach after every local training
def _is_installed(file: str) -> bool:
    return str(Path(file).resolve()).startswith(INSTALLED)


_READERS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (threading.local, vars),
    (contextvars.ContextVar, lambda value: value.get(None)),
    ((weakref.WeakKeyDictionary, weakref.WeakValueDictionary), lambda value: list(value.values())),
    (weakref.WeakSet, list),
    (_CACHE, lambda value: value.cache_info().currsize),
)


def _digest(value: Any, depth: int = _DEPTH) -> str:
    """Return a digest of a value, or of those of its parts that can be read; an empty text if there are none."""
    for kind, read in _READERS:
        if isinstance(value, kind):
            value = read(value)
            break
    try:
        return hashlib.sha256(pickle.dumps(value)).hexdigest()
    except Exception:  # pickle raises whatever the value's own methods raise
        parts = _parts(value) if depth else None
        if parts is None:
            return ""
        readable = {name: _digest(part, depth - 1) for name, part in parts.items()}
        return hashlib.sha256(repr(sorted(readable.items())).encode()).hexdigest()


def _parts(value: Any) -> dict[str, Any] | None:
    """Return the user's parts of a value that cannot be read as a whole; None if it has no such parts."""
    if isinstance(value, GeneratorType):
        frame = value.gi_frame
        return {} if frame is None else {"place": frame.f_lasti} | frame.f_locals
    if isinstance(value, Mapping):
        return {repr(key): part for key, part in value.items()}
    if isinstance(value, list | tuple):
        return {str(number): part for number, part in enumerate(value)}
    if not isinstance(value, _CODE) and _is_users(type(value).__module__):
        slots = {name: getattr(value, name, None) for name in getattr(type(value), "__slots__", ())}
        return slots | getattr(value, "__dict__", {})
    return None
