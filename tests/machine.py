"""Conditions of equal bits besides the code: a key of this machine, and one thread."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from threadpoolctl import threadpool_info, threadpool_limits


def machine_key() -> str:
    """Return what digests depend on: processor, instruction sets of torch and BLAS, torch and numpy."""
    blas = sorted({str(library.get("architecture", library["internal_api"])) for library in threadpool_info()
                   if library["user_api"] == "blas"})  # fmt: skip
    capability = torch.backends.cpu.get_cpu_capability()
    parts = (platform.machine(), capability, "+".join(blas), f"torch {torch.__version__}", f"numpy {np.__version__}")
    return ", ".join(parts)


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit the threads to one, because sums are split by threads and their bits depend on the number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before)
