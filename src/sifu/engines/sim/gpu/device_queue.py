"""Asynchronous queues of device work, and graphs that capture such work and replay it.

Only `synchronize` waits for the device. A copy from ordinary memory would wait as well, so all copies use pinned
memory. A caller that needs a result sleeps until the queue reaches the `Mark` after the work for this result. On a CPU
all work is done immediately.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sifu.errors import InputError

Mark = torch.cuda.Event | SimpleNamespace
"""Position in a queue: `query` returns whether all earlier work is done, `synchronize` waits for it."""
DONE = SimpleNamespace(query=lambda: True, synchronize=lambda: None)
"""Mark of a CPU, where all submitted work is already done."""


class DeviceQueue:
    """Stream of a GPU; the queues of one device run in parallel."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def here(self) -> Iterator[None]:
        """Submit the device work of this thread to this queue while the context is active."""
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield

    def after(self, other: DeviceQueue) -> None:
        """Make later work wait for all work submitted to `other` so far."""
        if self._stream is not None and other._stream is not None:
            self._stream.wait_stream(other._stream)

    def mark(self) -> Mark:
        """Return a mark after all work submitted so far."""
        if self._stream is None:
            return DONE
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def synchronize(self) -> None:
        """Wait until all work submitted so far is done."""
        self.mark().synchronize()

    def upload(self, values: NDArray[np.generic]) -> Tensor:
        """Return a copy of `values` on the device; call this inside `here`."""
        host = torch.from_numpy(np.ascontiguousarray(values))
        return host.clone() if self._stream is None else host.pin_memory().to(self.device, non_blocking=True)

    def download(self, values: Tensor) -> NDArray[Any]:
        """Return a copy of `values` that is valid once a later mark is reached; call this inside `here`."""
        if self._stream is None:
            return values.numpy().copy()
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        values.record_stream(self._stream)  # keeps other queues from reusing the memory too early
        return host.numpy()


_pauses = 0
_collects = False
_counting = threading.Lock()


@contextmanager
def without_collector() -> Iterator[None]:
    """Disable Python's garbage collector in all threads until the last active context ends.

    A collection may free a graph of an earlier program. If a thread frees a graph while it captures another graph, the
    capture aborts with an error.
    """
    global _pauses, _collects
    with _counting:
        if _pauses == 0:
            _collects = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _counting:
            _pauses -= 1
            if _pauses == 0 and _collects:
                gc.enable()


@contextmanager
def _fixed_kernels(device: torch.device) -> Iterator[None]:
    """Choose kernels by shapes alone inside the block, with products in full precision.

    Raises:
        InputError: If the device has too little memory. A library may catch such an error and choose another algorithm,
            so errors that the allocator counted are refused as well.
    """
    products, failed = torch.get_float32_matmul_precision(), torch.cuda.memory_stats(device).get("num_ooms", 0)
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            yield
    except RuntimeError as error:
        if torch.cuda.memory_stats(device).get("num_ooms", 0) == failed:
            raise
        raise InputError(_FULL) from error
    finally:
        torch.set_float32_matmul_precision(products)
    if torch.cuda.memory_stats(device).get("num_ooms", 0) != failed:
        raise InputError(_FULL)


_FULL = "the GPU has too little free memory for this run: free some, or use --device cpu"


def capture(
    device: torch.device, work: Callable[[], None], first: Callable[[], None] | None = None, pool: Any = None
) -> torch.cuda.CUDAGraph:
    """Record `work` as a graph and return the graph.

    Threads of other lanes may use the device meanwhile, so capture errors are restricted to this thread's calls. The
    graph is recorded in a separate stream. Torch's default stream is shared by all graphs, together with cuBLAS's
    workspace, in which graphs that run in parallel could overwrite each other's sums. `first`, by default `work`, runs
    once before the capture, to choose kernels and workspaces. Graphs that never run in parallel may share the `pool` of
    memory.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with _fixed_kernels(device):
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            (first or work)()
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with without_collector(), torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            work()
    return graph
