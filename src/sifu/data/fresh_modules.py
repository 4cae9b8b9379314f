"""Fresh copies of a torch module, and fixed states of the random generators of this process.

A module may keep state: a step counter, a memory bank, a running maximum in a gradient hook. Every client therefore
starts with a copy of the original module, with random generators seeded by its position in the run, and with the
original settings of the process. State in attributes of the module, its functions and its hooks then cannot pass from
one client to the next (docs/theory.md, section 6.6); `shared_state` and `forked` are for state in other places.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from types import CellType, FunctionType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from sifu.data.process_settings import kept_settings
from sifu.errors import InputError

AnyModule = TypeVar("AnyModule", bound=nn.Module)
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


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


def fresh_copy(module: AnyModule) -> AnyModule:
    """Return a deep copy of a module, including the closures of its functions and hooks.

    Class variables and module-level variables are shared with every copy, because `copy.deepcopy` copies neither
    classes nor Python modules.

    Raises:
        InputError: If a part of the module cannot be copied.
    """
    memo: dict[int, Any] = {}
    with _refused_copies(f"module {type(module).__name__}"):
        copied = copy.deepcopy(module, memo)
        for part in copied.modules():
            _renew_functions(vars(part), memo)
    return copied


def fresh_loss(loss: Loss) -> Loss:
    """Return a copy of a loss, which may be a module, a function with its closure, or any other object.

    Raises:
        InputError: If a part of the loss cannot be copied.
    """
    if isinstance(loss, nn.Module):
        return fresh_copy(loss)
    with _refused_copies("loss"):
        copied: Loss = _copied(loss, {})
    return copied


@contextmanager
def _refused_copies(what: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, RuntimeError, copy.Error) as error:
        raise InputError(
            f"the {what} cannot be copied ({type(error).__name__}: {error}), but every client needs a fresh copy: "
            "remove the attributes and variables that do not support copying"
        ) from error


def _renew_functions(holder: MutableMapping[Any, Any], memo: dict[int, Any]) -> None:
    """Replace the functions among the values of `holder`, and of its mappings, by copies."""
    for name, value in holder.items():
        if isinstance(value, FunctionType):
            holder[name] = _copied_function(value, memo)
        elif isinstance(value, MutableMapping) and any(isinstance(each, FunctionType) for each in value.values()):
            _renew_functions(value, memo)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy of any object, including the closure of a function."""
    return _copied_function(value, memo) if isinstance(value, FunctionType) else copy.deepcopy(value, memo)


def _copied_function(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    """Return a function with the same code and copies of its closure, defaults and attributes."""
    if id(function) in memo:
        copied: FunctionType = memo[id(function)]
        return copied
    cells = []
    for cell in function.__closure__ or ():
        if id(cell) not in memo:
            memo[id(cell)] = CellType()
            if cell != CellType():  # a variable that is not assigned yet has an empty cell
                memo[id(cell)].cell_contents = _copied(cell.cell_contents, memo)
        cells.append(memo[id(cell)])
    defaults = copy.deepcopy(function.__defaults__, memo)
    copied = FunctionType(
        function.__code__, function.__globals__, function.__name__, defaults, tuple(cells) if cells else None
    )
    memo[id(function)] = copied
    copied.__kwdefaults__ = copy.deepcopy(function.__kwdefaults__, memo)
    copied.__dict__.update(copy.deepcopy(function.__dict__, memo))
    copied.__qualname__, copied.__module__ = function.__qualname__, function.__module__
    return copied


@contextmanager
def fixed_generators(seed: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed the torch, numpy and Python generators for the block; restore them and the process settings afterwards."""
    place = torch.device(device)
    numpy_state, python_state = np.random.get_state(), random.getstate()  # noqa: NPY002
    with kept_settings(), torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
        if torch.accelerator.is_available():
            torch.manual_seed(seed)
        else:  # same state; torch.manual_seed would format a stack trace for each missing kind of device
            torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(numpy_state)  # noqa: NPY002
            random.setstate(python_state)


@contextmanager
def fixed_algorithms() -> Iterator[None]:
    """Restrict cuDNN, within the block, to deterministic algorithms that are chosen by shapes alone."""
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before
