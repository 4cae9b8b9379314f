"""Variables that a module can change outside its copies, and a check that training leaves them unchanged.

A deep copy of a module and the original share class variables, module-level variables, default arguments, caches and
objects that cannot be copied (docs/theory.md, section 6.6). A value stored there would pass from one client to the
next. The original module is only copied, never run. Its attributes, and the variables that its code names, are read
before use and compared afterwards. A module with a variable that cannot be read is refused.

The check serves features, which must not depend on a client's other records, and rounds on a GPU. Rounds on the CPU
run in forked processes instead, which leave no state behind (`sifu.data.forked`).
"""

from __future__ import annotations

import contextvars
import copyreg
import functools
import gc
import hashlib
import importlib
import io
import logging
import mmap
import os
import pickle
import re
import sys
import threading
import weakref
from _abc import _get_dump  # type: ignore[import-not-found]
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import (
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    GeneratorType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    ModuleType,
    TracebackType,
)
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch.library import Library
from torch.optim import optimizer

from sifu.data.process_settings import settings
from sifu.data.users_code import OWN_PACKAGES, is_users, is_users_own, package_of
from sifu.errors import InputError

_CACHE = type(functools.lru_cache(lambda: None))
_ANY_VARIABLE = {"globals", "vars", "setattr", "modules", "import_module", "__import__", "__dict__", "eval", "exec"}
"""Names with which code can reach every variable of its file."""
_PLAIN = (bool, int, float, complex, str, bytes, bytearray, list, dict, set, tuple, deque, np.ndarray, torch.Tensor)
"""Types of variables in installed packages that are compared; objects and functions of the user are compared too."""
_OF_FILES = {"__builtins__", "__cached__", "__file__", "__loader__", "__name__", "__package__", "__path__", "__spec__"}
"""Names that Python itself sets in every file."""
_OF_CLASSES = {"__annotations__", "__dict__", "__module__", "__slotnames__", "__slots__", "__weakref__", "_abc_impl"}
"""Attributes of classes that Python itself sets, in part while a class is used."""
_OF_LOGGERS = vars(logging.Logger("")).keys() | {"manager", "parent"}
"""Attributes that every logger has."""
_NAME = re.compile(r"[^\W\d]\w*")
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def shared_state(module: nn.Module, *others: Any) -> dict[str, str]:
    """Return a digest of each attribute of a module, and of each variable that its code names.

    Args:
        module: A user's module; only copies of it are run.
        others: Other objects of the user that are used with the module, such as a loss.

    Returns:
        Digests by the name of the variable.

    Raises:
        InputError: If a variable of the user cannot be read.
    """
    OWN_PACKAGES.add(package_of(type(module).__module__))
    search = _Search()
    for path, part in module.named_modules():
        search.reach(type(part))
        held = {name: value for name, value in vars(part).items() if name != "_modules"}
        if not is_users(type(part).__module__):
            search.read(path or type(part).__name__, held, users=False)
            continue
        for name, value in held.items():
            search.read(f"{path}.{name}".lstrip("."), value)
    for value in (*others, *filter(is_users_own, _called_for_every_module())):
        search.read(getattr(value, "__qualname__", type(value).__qualname__), value)
    search.read("the settings of torch and numpy", settings(), users=False)
    search.follow()
    return search.found


def changed_state(before: Mapping[str, str], module: nn.Module, *others: Any) -> list[str]:
    """Return the names of variables that were changed, added or removed since `before`, an earlier `shared_state`."""
    now = shared_state(module, *others)
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def refuse_changed_state(before: Mapping[str, str], module: nn.Module, *others: Any) -> None:
    """Refuse a module that changed a variable that all clients share.

    Args:
        before: `shared_state` before the module was used.
        module: Module after its copies were used.
        others: The other objects passed to `shared_state`.

    Raises:
        InputError: If a variable was changed, added or removed.
    """
    changed = changed_state(before, module, *others)
    if changed:
        raise InputError(
            f"the module {type(module).__name__} changed {', '.join(changed[:3])} while it computed with a client's "
            "data: all clients share this variable, so it carries information between clients. Keep state in "
            "attributes of the module, which every client starts from afresh"
        )


def _called_for_every_module() -> Iterator[Any]:
    """Yield the functions that torch calls for every module and optimizer, and the functions of custom operators."""
    for file in (nn.modules.module, optimizer):
        for name, table in vars(file).items():
            if name.startswith("_global_") and isinstance(table, dict):
                yield from table.values()
    for operator in list(OPDEFS.values()):
        yield operator._init_fn


class _Search:
    """Search that records digests of variables, and follows the user's functions and classes reached through them."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self._waiting: list[Any] = []
        self._seen: dict[int, Any] = {}
        self._read: dict[tuple[str, int], Any] = {}
        self._tensors: dict[int, tuple[torch.Tensor, str]] = {}

    def read(self, name: str, value: Any, *, users: bool = True) -> None:
        """Record the digest of a variable, combined with earlier digests of the same name; queue the code it reaches.

        Raises:
            InputError: If `users` is True and the variable cannot be read.
        """
        if (name, id(value)) in self._read:
            return
        self._read[name, id(value)] = value
        written = io.BytesIO()
        reader = _Reader(written, self._tensors, self.reach)
        try:
            reader.dump(value)
        except Exception as error:  # nested too deeply, or changed by another thread while it was read
            reader.unread.append(f"{type(value).__qualname__} ({type(error).__name__})")
        if users and reader.unread:
            raise InputError(
                f"{name} holds an object that cannot be read, {reader.unread[0]}: it may carry information between "
                "clients. Remove it from the code of the module, or keep its values in attributes of the module"
            )
        self.found[name] = hashlib.sha256(self.found.get(name, "").encode() + written.getvalue()).hexdigest()

    def reach(self, code: Any) -> None:
        """Queue a user's function or class for `follow`, unless it was queued before."""
        if id(code) not in self._seen and is_users(code.__module__):
            self._seen[id(code)] = code
            self._waiting.append(code)

    def follow(self) -> None:
        """Search all queued code, and the code that it reaches."""
        while self._waiting:
            code = self._waiting.pop()
            if isinstance(code, type):
                self._search_class(code)
            else:
                self._search_function(code)

    def _search_class(self, owner: type) -> None:
        for base in (*owner.__mro__[1:], type(owner)):
            self.reach(base)
        said = [owner.__name__, owner.__bases__, vars(owner).get("__annotations__") or {}]
        if "_abc_impl" in vars(owner):
            said.append(sorted(str(each()) for each in _get_dump(owner)[0]))  # registered classes, not ABC's caches
        self.read(f"the name, bases and annotations of {owner.__qualname__}", said)
        for name, value in list(vars(owner).items()):
            if name not in _OF_CLASSES and not isinstance(value, GetSetDescriptorType | MemberDescriptorType):
                self.read(f"{owner.__qualname__}.{name}", value)

    def _search_function(self, function: FunctionType) -> None:
        self.read(f"the default arguments of {function.__qualname__}", (function.__defaults__, function.__kwdefaults__))
        attributes = {key: item for key, item in vars(function).items() if key != "__wrapped__"}
        attributes |= {"__doc__": function.__doc__, "__annotations__": function.__annotations__}
        attributes |= {"__name__": function.__name__, "__code__": _content(function.__code__)}
        self.read(f"the attributes of {function.__qualname__}", attributes)
        self._reach_value(getattr(function, "__wrapped__", None))
        for cell, held in _closure(function).items():
            self.read(f"{cell} of {function.__qualname__}", held)
        names = set(_names(function.__code__))
        if {"environ", "environb", "getenv", "putenv"} & names:
            importlib.import_module("torch._dynamo")  # sets a variable that the first optimizer would otherwise set
            self.read("os.environ", dict(os.environ))
        reached = function.__globals__ if _ANY_VARIABLE & names else names & function.__globals__.keys()
        for name in sorted(reached):
            if name not in _OF_FILES:
                self._read_variable(f"{function.__module__}.{name}", function.__globals__[name], names)
        if "ops" in names:  # for operators of torch, search the files that define custom ones
            for file in [vars(file) for name, file in list(sys.modules.items()) if is_users(name)]:
                if any(isinstance(value, Library | CustomOpDef) for value in file.values()):
                    for value in file.values():
                        self._reach_value(value)
        parents = ["", *_packages(function.__globals__.get("__package__") or "")]
        imported = {parent + name for parent in parents for name in names} & sys.modules.keys()
        for name in sorted(imported):  # the function itself may import these modules
            self._read_variable(name, sys.modules[name], names)

    def _read_variable(self, name: str, value: Any, names: set[str]) -> None:
        if isinstance(value, ModuleType):
            self._read_package(name, value, names, {id(value)})
        elif not isinstance(value, type | FunctionType):
            self.read(name, value)
        elif is_users(value.__module__):
            self.reach(value)
        else:
            self._read_package(name, value, names, {id(value)})

    def _reach_value(self, value: Any) -> None:
        if isinstance(value, type | FunctionType):
            self.reach(value)

    def _read_package(self, path: str, owner: Any, names: set[str], seen: set[int]) -> None:
        """Read the values stored under these `names` in a package, its modules, its classes and its functions."""
        users = isinstance(owner, ModuleType) and is_users(owner.__name__)
        for name in sorted(names & vars(owner).keys()):
            value = vars(owner)[name]
            if isinstance(value, ModuleType) or (isinstance(value, type | FunctionType) and not is_users_own(value)):
                if id(value) not in seen:
                    seen.add(id(value))
                    self._read_package(f"{path}.{name}", value, names, seen)
            elif users:
                self._read_variable(f"{path}.{name}", value, names)
            elif isinstance(value, _PLAIN) or is_users_own(value):
                self.read(f"{path}.{name}", value, users=False)


def _closure(function: FunctionType) -> dict[str, Any]:
    """Return the contents of a function's closure by name, without unassigned variables."""
    pairs = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in pairs if cell != CellType()}


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names in a code object and in functions it defines, including strings that could name a variable."""
    yield from code.co_names
    runs_text = bool({"eval", "exec"} & set(code.co_names))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, str) and (runs_text or _DOTTED.fullmatch(constant)):
            yield from (constant, *_NAME.findall(constant))


def _packages(package: str) -> Iterator[str]:
    """Yield the prefixes of relative imports inside a package.

    >>> list(_packages("a.b"))
    ['a.b.', 'a.']
    """
    while package:
        yield f"{package}."
        package = package.rpartition(".")[0]


def _content(code: CodeType) -> tuple[Any, ...]:
    """Return the instructions and constants of a code object."""
    constants = [_content(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return code.co_code, code.co_names, code.co_freevars, constants


def _logger_state(logger: logging.Logger) -> tuple[Any, ...]:
    """Return the settings of a logger, and the attributes that the user added."""
    added = {name: value for name, value in vars(logger).items() if name not in _OF_LOGGERS}
    return logger.level, logger.disabled, logger.propagate, logger.filters, len(logger.handlers), added


_READERS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (torch.Generator, lambda value: value.get_state()),
    (threading.local, vars),
    (contextvars.ContextVar, lambda value: value.get(None)),
    ((weakref.WeakKeyDictionary, weakref.WeakValueDictionary), lambda value: list(value.items())),
    (weakref.WeakSet, list),
    (weakref.ref, lambda value: value()),
    (_CACHE, lambda value: (value.cache_info().currsize, value.cache_info().misses, value.__wrapped__)),
    (staticmethod | classmethod, lambda value: value.__func__),
    (property, lambda value: (value.fget, value.fset, value.fdel)),
    (functools.cached_property, lambda value: value.func),
    (MappingProxyType, dict),
    (GeneratorType, lambda value: value.gi_frame and (value.gi_frame.f_lasti, gc.get_referents(value))),
    (CodeType, _content),
    (CellType, lambda value: None if value == CellType() else (value.cell_contents,)),
    (memoryview, bytes),
    (mmap.mmap, lambda value: value[:]),
    (type(threading.Lock()), lambda value: value.locked()),
    (type(threading.RLock()), repr),
    (logging.Logger, _logger_state),
    (io.TextIOWrapper, lambda value: value.buffer),
    ((io.BufferedReader, io.BufferedWriter, io.BufferedRandom), lambda value: value.raw),
)
"""Functions that return the contents of objects whose pickle fails or lacks their state."""
_OUTSIDE = (io.IOBase, FrameType, TracebackType)
"""Types of objects whose contents are not variables of the module. It is an assumption that files pass on no data."""


class _Reader(pickle.Pickler):
    """Pickler for digests: it reads every attribute of modules and of a user's objects, and accepts every type.

    Args:
        file: File that receives the bytes.
        tensors: Cache of tensors and their digests by `id`.
        reach: Function that receives the functions and classes among the values.
    """

    def __init__(
        self, file: io.BytesIO, tensors: dict[int, tuple[torch.Tensor, str]], reach: Callable[[Any], None]
    ) -> None:
        super().__init__(file, protocol=5)
        self._tensors, self._reach = tensors, reach
        self.unread: list[str] = []
        """Types of the objects whose contents were not read."""

    def reducer_override(self, value: Any) -> Any:
        """Return the representation of a value for the digest; it is never unpickled."""
        if value is str:
            return NotImplemented
        if isinstance(value, type | FunctionType | ModuleType):
            if not isinstance(value, ModuleType):
                self._reach(value)
            return str, (f"{getattr(value, '__module__', '')} {getattr(value, '__qualname__', value.__name__)}",)
        if isinstance(value, torch.Tensor):
            self._reach(type(value))
            return str, (self._digest(value),), (vars(value) if hasattr(value, "__dict__") else None)
        for kind, read in _READERS:
            if isinstance(value, kind):
                return str, (type(value).__qualname__,), read(value)
        owner = type(value)
        self._reach(owner)
        if isinstance(value, nn.Module) or is_users(owner.__module__):
            slots = {name: getattr(value, name, None) for base in owner.__mro__ for name in _slots(base)}
            return str, (owner.__qualname__,), (getattr(value, "__dict__", {}), slots, self._inherited(value))
        if owner in copyreg.dispatch_table:
            return NotImplemented
        try:
            written = value.__reduce_ex__(5)
        except Exception:  # connections, queues and other objects cannot be pickled
            written = owner.__qualname__
            if not isinstance(value, _OUTSIDE) and not owner.__module__.startswith("torch"):
                self.unread.append(f"{owner.__module__}.{owner.__qualname__}")
        return (str, (written,)) if isinstance(written, str) else written

    def _inherited(self, value: Any) -> Any:
        """Return the content that an object inherits from an installed base class, such as the items of a list."""
        if isinstance(value, nn.Module):
            return None
        if isinstance(value, list | tuple | set | frozenset):
            return list(value)
        if isinstance(value, dict):
            return dict(value)
        for base in type(value).__mro__:
            if base is object:
                return None
            for name in ("__reduce_ex__", "__reduce__", "__getstate__") if not is_users(base.__module__) else ():
                if name in vars(base):
                    written = getattr(base, name)(value, *((5,) if name == "__reduce_ex__" else ()))
                    return [list(part) if isinstance(part, Iterator) else part for part in written or ()]
        return None

    def _digest(self, tensor: torch.Tensor) -> str:
        """Return the digest of a tensor's type, shape, values and gradient."""
        if id(tensor) not in self._tensors:
            with torch._C.DisableTorchFunctionSubclass():  # reading must not run a user's code
                header = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad} "
                content = header.encode() + _values(tensor)
                if tensor.is_leaf and tensor.grad is not None:
                    content += self._digest(tensor.grad).encode()
            self._tensors[id(tensor)] = tensor, hashlib.sha256(content).hexdigest()
        return self._tensors[id(tensor)][1]


def _values(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's values, or b"" for a lazy tensor that is not initialised."""
    if nn.parameter.is_lazy(tensor):
        return b""
    plain = tensor.detach().cpu()
    if plain.layout != torch.strided:
        plain = plain.to_dense()
    if plain.is_quantized:
        plain = plain.int_repr()
    return plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _slots(owner: type) -> tuple[str, ...]:
    named = vars(owner).get("__slots__", ())
    return (named,) if isinstance(named, str) else tuple(named)
