"""Process-wide settings that affect later code: settings of torch, numpy and decimals, and the working folder.

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
    except OSError:  # it was deleted
        return "/"


_MEMORY: Any = torch.utils.deterministic
_CUDA, _MKLDNN, _CUDNN = torch.backends.cuda, torch.backends.mkldnn, torch.backends.cudnn
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (_default_device, torch.set_default_device),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
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
    (lambda: _CUDNN.allow_tf32, lambda held: setattr(_CUDNN, "allow_tf32", held)),
    (lambda: _MEMORY.fill_uninitialized_memory, lambda held: setattr(_MEMORY, "fill_uninitialized_memory", held)),
    (lambda: vars(PRINT_OPTS).copy(), lambda held: vars(PRINT_OPTS).update(held)),
    (lambda: decimal.getcontext().__reduce__()[1], lambda held: decimal.setcontext(decimal.Context(*held))),
    (_folder, os.chdir),
)
"""Pairs of functions: the first reads a setting, the second changes it."""


def settings() -> tuple[Any, ...]:
    """Return the value of every setting."""
    return tuple(read() for read, _ in _SETTINGS)


@contextmanager
def kept_settings() -> Iterator[None]:
    """Restore the settings that the block changes."""
    before = settings()
    try:
        yield
    finally:
        for (read, write), held in zip(_SETTINGS, before, strict=True):
            if read() != held:
                write(held)
