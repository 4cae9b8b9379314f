"""Process-wide settings that affect later code: settings of torch, numpy and `decimal`, and the working folder.

A module may change such a setting while it computes with a client's data. `kept_settings` undoes this, so every client
starts with the settings of the process (docs/theory.md, section 6.6).
"""

from __future__ import annotations

import decimal
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch._tensor_str import PRINT_OPTS


def _flushes_denormals() -> bool:
    return not np.float32(1e-39) * np.float32(1.0)


def _default_device() -> str | None:
    device = str(torch.get_default_device())
    return None if device == "cpu" else device


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # the working directory was deleted
        return "/"


def _matmul_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # backends have different precisions: `fp32_precisions` reads each of them
        return None


def _set_matmul_precision(held: str | None) -> None:
    if held is not None:
        torch.set_float32_matmul_precision(held)


def _allows_tf32() -> bool | None:
    try:
        return _CUDNN.allow_tf32
    except RuntimeError:
        return None


def _set_tf32(held: bool | None) -> None:
    if held is not None:
        _CUDNN.allow_tf32 = held


def fp32_precisions() -> tuple[str, ...]:
    """Return the precision of float32 products of each backend, or an empty tuple before torch 2.9."""
    return tuple(torch._C._get_fp32_precision_getter(*place) for place in _PRECISIONS)


def set_fp32_precisions(held: tuple[str, ...]) -> None:
    """Restore an earlier result of `fp32_precisions`."""
    for place, now, precision in zip(_PRECISIONS, fp32_precisions(), held, strict=True):
        if now != precision:
            torch._C._set_fp32_precision_setter(*place, precision)


def _function_modes() -> int:
    return torch._C._len_torch_function_stack()


def _leave_function_modes(held: int) -> None:
    while torch._C._len_torch_function_stack() > held:
        torch._C._pop_torch_function_stack()


_PRECISIONS: tuple[tuple[str, str], ...] = (
    ("generic", "all"),
    *((backend, operator) for backend in ("cuda", "mkldnn") for operator in ("all", "matmul", "conv", "rnn")),
)
if not hasattr(torch._C, "_get_fp32_precision_getter"):
    _PRECISIONS = ()
_MEMORY: Any = torch.utils.deterministic
_CUDA, _MKLDNN, _CUDNN = torch.backends.cuda, torch.backends.mkldnn, torch.backends.cudnn
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (_default_device, torch.set_default_device),
    (torch.get_num_threads, torch.set_num_threads),
    (_matmul_precision, _set_matmul_precision),
    (_allows_tf32, _set_tf32),
    (fp32_precisions, set_fp32_precisions),
    (_flushes_denormals, torch.set_flush_denormal),
    (_deterministic, lambda held: torch.use_deterministic_algorithms(held[0], warn_only=held[1])),
    (torch.is_grad_enabled, torch._C._set_grad_enabled),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (lambda: torch.is_autocast_enabled("cpu"), lambda held: torch.set_autocast_enabled("cpu", held)),
    (lambda: torch.get_autocast_dtype("cpu"), lambda held: torch.set_autocast_dtype("cpu", held)),
    (lambda: torch.is_autocast_enabled("cuda"), lambda held: torch.set_autocast_enabled("cuda", held)),
    (_CUDA.flash_sdp_enabled, _CUDA.enable_flash_sdp),
    (_CUDA.mem_efficient_sdp_enabled, _CUDA.enable_mem_efficient_sdp),
    (_CUDA.math_sdp_enabled, _CUDA.enable_math_sdp),
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    (lambda: _MKLDNN.enabled, lambda held: setattr(_MKLDNN, "enabled", held)),
    (lambda: _MKLDNN.deterministic, lambda held: setattr(_MKLDNN, "deterministic", held)),
    (lambda: _CUDNN.enabled, lambda held: setattr(_CUDNN, "enabled", held)),
    (lambda: _CUDNN.benchmark, lambda held: setattr(_CUDNN, "benchmark", held)),
    (lambda: _CUDNN.deterministic, lambda held: setattr(_CUDNN, "deterministic", held)),
    (np.geterr, lambda held: np.seterr(**held)),
    (np.get_printoptions, lambda held: np.set_printoptions(**held)),
    (np.geterrcall, np.seterrcall),
    (np.getbufsize, np.setbufsize),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (lambda: torch.get_autocast_dtype("cuda"), lambda held: torch.set_autocast_dtype("cuda", held)),
    (lambda: _MEMORY.fill_uninitialized_memory, lambda held: setattr(_MEMORY, "fill_uninitialized_memory", held)),
    (lambda: vars(PRINT_OPTS).copy(), lambda held: vars(PRINT_OPTS).update(held)),
    (lambda: decimal.getcontext().__reduce__()[1], lambda held: decimal.setcontext(decimal.Context(*held))),
    (_folder, os.chdir),
    (torch._C._get_nnpack_enabled, torch._C._set_nnpack_enabled),
    (lambda: torch.backends.quantized.engine, lambda held: setattr(torch.backends.quantized, "engine", held)),
    (_function_modes, _leave_function_modes),
)
"""Pairs of functions: the first reads a setting, the second changes it."""


def settings() -> tuple[Any, ...]:
    """Return the value of every setting."""
    return tuple(read() for read, _ in _SETTINGS)


def restore(held: tuple[Any, ...]) -> None:
    """Change the settings that differ from `held`, an earlier result of `settings`."""
    for (read, write), before in zip(_SETTINGS, held, strict=True):
        if read() != before:
            write(before)


@contextmanager
def kept_settings() -> Iterator[None]:
    """Restore, after the block, the settings that the block changed."""
    before = settings()
    try:
        yield
    finally:
        restore(before)
