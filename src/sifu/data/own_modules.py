"""A user's own modules: the rule for the premise `module`, copies for the clients, and seeded random generators.

A module is known if it consists of layers of public libraries only. The operator may declare that any other module
computes from its inputs and parameters alone (docs/theory.md, section 6.6).
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from sifu.errors import InputError
from sifu.theory.facts import MODULE_DECLARED, MODULE_NOT_DECLARED

T = TypeVar("T")
LIBRARIES = ("torch.nn.", "torchvision.", "timm.", "transformers.", "sifu.")
"""Prefixes of the Python modules whose classes are known; remote code of transformers has another prefix."""
GENERATORS = 2**32
"""Number of seeds of numpy's generator."""


def is_known(module: nn.Module) -> bool:
    """Return whether all parts of a module are classes of `LIBRARIES`, without hooks or callables of the user.

    >>> is_known(nn.Sequential(nn.Linear(4, 3), nn.Tanh()))
    True
    """
    return not _hooks_of(vars(torch.nn.modules.module)) and all(_is_known_part(part) for part in module.modules())


def _is_known_part(part: nn.Module) -> bool:
    held = vars(part)
    callables = [type(part), *filter(callable, held.values())]
    tensors = filter(torch.is_tensor, (*part.parameters(recurse=False), *part.buffers(recurse=False), *held.values()))
    plain = all(type(each) in (torch.Tensor, nn.Parameter) and not each._backward_hooks for each in tensors)
    return plain and "forward" not in held and not _hooks_of(held) and all(map(_is_from_library, callables))


def _hooks_of(held: dict[str, Any]) -> list[Any]:
    return [value for name, value in held.items() if name.endswith("_hooks") and value]


def _is_from_library(called: Any) -> bool:
    """Return whether a class or function, and everything that it is bound to, is what a library defines by its name."""
    if isinstance(called, functools.partial):
        bound = filter(callable, (*called.args, *called.keywords.values()))
        return all(map(_is_from_library, (called.func, *bound)))
    if isinstance(called, MethodType):
        return _is_from_library(called.__self__) and _is_from_library(called.__func__)
    builtin = isinstance(called, BuiltinFunctionType)
    named = called if builtin or isinstance(called, FunctionType | type) else type(called)
    found: Any = sys.modules.get(str(named.__module__))
    for name in "" if builtin else named.__qualname__.split("."):
        found = getattr(found, name, None)
    return f"{named.__module__}.".startswith("torch." if builtin else LIBRARIES) and (builtin or found is named)


def _unwrapped(function: Any) -> Any:
    return _unwrapped(function.func) if isinstance(function, functools.partial) else function


def declared(*named: tuple[str, str]) -> str:
    """Return `TrainingFacts.module` for functions that the operator declares, given their names and files' digests."""
    return MODULE_DECLARED + " and ".join(f"{name} (SHA-256 of its file {digest})" for name, digest in named)


def declared_function(function: Any) -> tuple[str, str]:
    """Return the name of a function, class or loss, and the SHA-256 of its file.

    Raises:
        InputError: If it is not defined in a file.
    """
    found = _unwrapped(function)
    named = found if isinstance(found, FunctionType | type) else type(found)
    name = f"{named.__module__}:{named.__qualname__}"
    try:
        content = Path(inspect.getsourcefile(named) or "").read_bytes()
    except (OSError, TypeError) as error:
        raise InputError(
            f"model.module_is_pure declares {name}, whose file cannot be read: define it in a file, which "
            "certificates name by its digest"
        ) from error
    return name, hashlib.sha256(content).hexdigest()


def combined(*facts: str) -> str:
    """Return `TrainingFacts.module` for a run with several modules, from the value of each.

    >>> combined("", "known"), combined("known", "not declared")
    ('known', 'not declared')
    """
    if MODULE_NOT_DECLARED in facts:
        return MODULE_NOT_DECLARED
    named = [fact.removeprefix(MODULE_DECLARED) for fact in facts if fact.startswith(MODULE_DECLARED)]
    return MODULE_DECLARED + " and ".join(named) if named else max(facts, default="")


def check_trainable(module: nn.Module) -> None:
    """Refuse to train a module that is compiled to TorchScript, or whose parameters have no shape yet."""
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise InputError(
            f"{type(module).__name__} is compiled to TorchScript and cannot be trained: pass the original torch module"
        )
    tensors = (*module.named_parameters(), *module.named_buffers())
    lazy = [name for name, tensor in tensors if nn.parameter.is_lazy(tensor)]
    if lazy:
        raise InputError(
            f"parameter {lazy[0]} has no shape before the first sample: state the number of inputs, for example "
            "nn.Linear(4, 3) instead of nn.LazyLinear(3)"
        )


def fresh_copy(value: T) -> T:
    """Return a deep copy of a module or a loss, or raise `InputError` if it cannot be copied."""
    try:
        return copy.deepcopy(value)
    except (TypeError, RuntimeError, copy.Error) as error:
        raise InputError(
            f"{type(value).__name__} cannot be copied ({type(error).__name__}: {error}), but every client needs a "
            "fresh copy: remove the attributes that do not support copying"
        ) from error


@contextmanager
def fixed_generators(seed: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed the generators of torch, numpy and Python inside the block, and restore them afterwards."""
    place = torch.device(device)
    numpy_state, python_state = np.random.get_state(), random.getstate()  # noqa: NPY002
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
        if torch.accelerator.is_available():
            torch.manual_seed(seed)
        else:  # same state; torch.manual_seed would format a stack trace for each missing kind of device
            torch.default_generator.manual_seed(seed)
        np.random.seed(seed % GENERATORS)  # noqa: NPY002
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(numpy_state)  # noqa: NPY002
            random.setstate(python_state)


@contextmanager
def fixed_algorithms() -> Iterator[None]:
    """Use one thread, and only deterministic algorithms of cuDNN that are chosen by shapes alone, inside the block."""
    cudnn, threads = torch.backends.cudnn, torch.get_num_threads()
    before = cudnn.deterministic, cudnn.benchmark
    cudnn.deterministic, cudnn.benchmark = True, False
    torch.set_num_threads(1)
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before
        torch.set_num_threads(threads)


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
