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

Mark = torch.cuda.Event | SimpleNamespace
"""Position in a queue: `query` returns whether all earlier work is done, `synchronize` waits for it."""
DONE = SimpleNamespace(query=lambda: True, synchronize=lambda: None)
"""Mark of a CPU, where all submitted work is already done."""


class DeviceQueue:
    """Stream of a GPU; the queues of one device run in parallel."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
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
        return host.clone() if self._stream is None else host.pin_memory().to(self._device, non_blocking=True)

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


def capture(
    device: torch.device, work: Callable[[], None], first: Callable[[], None] | None = None
) -> torch.cuda.CUDAGraph:
    """Record `work` as a graph and return the graph.

    Threads of other lanes may use the device meanwhile, so capture errors are restricted to this thread's calls. The
    graph is recorded in a separate stream. Torch's default stream is shared by all graphs, together with cuBLAS's
    workspace, in which graphs that run in parallel could overwrite each other's sums.

    Args:
        device: The GPU.
        work: Function that submits the work.
        first: Function that runs once before the capture, to compile kernels, by default `work`.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        (first or work)()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with without_collector(), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        work()
    return graph


SEVERAL = 5
"""Number of rounds per graph if enough rounds are left; fewer launches reduce the work of the host."""


class CapturedRounds:
    """Runner of rounds that increment a device counter and write history[counter]; on a GPU it replays graphs.

    `one_round` is passed to every call and not stored. It is a method of the object that owns this runner. Storing it
    would create a reference cycle, which would keep both objects and their graphs alive until a garbage collection.
    """

    def __init__(self, counter: torch.Tensor, history: torch.Tensor) -> None:
        self._counter, self._history = counter, history
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def run(self, one_round: Callable[[], None], rounds: int) -> None:
        """Run `rounds` rounds from history[0]; afterwards history[k] is the model after k rounds."""
        if self._counter.device.type != "cuda":
            self._counter.zero_()
            for _ in range(rounds):
                one_round()
            return
        several, single = divmod(rounds, SEVERAL)
        wanted = ((SEVERAL, several), (1, single))
        for length, times in wanted:
            if times and length not in self._graphs:
                self._capture(one_round, length)
        self._counter.zero_()
        for length, times in wanted:
            for _ in range(times):
                self._graphs[length].replay()

    def _capture(self, one_round: Callable[[], None], length: int) -> None:
        saved = self._history[:2].clone()
        self._counter.zero_()

        def work() -> None:
            for _ in range(length):
                one_round()

        self._graphs[length] = capture(self._counter.device, work, one_round)
        self._history[:2] = saved
