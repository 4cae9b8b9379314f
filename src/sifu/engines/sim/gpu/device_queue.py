"""Work of a device in the order it was queued, while the host continues; and work captured as one graph to replay.

Nothing that goes through here waits for the device: a copy from ordinary memory would, so everything is copied to or
from pinned memory. A caller that needs a result sleeps until the `Mark` behind it, without spinning. On a CPU work is
done at once.
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
"""A place in a queue: `query` says whether everything before it is done, `synchronize` waits until it is."""
DONE = SimpleNamespace(query=lambda: True, synchronize=lambda: None)
"""The mark of a CPU, where everything is done when it is handed in."""


class DeviceQueue:
    """A stream of a GPU; queues of one device run next to each other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def here(self) -> Iterator[None]:
        """What this thread asks the device for inside goes into this queue."""
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield

    def after(self, other: DeviceQueue) -> None:
        """What is handed in from now on waits for what `other` was handed in so far."""
        if self._stream is not None and other._stream is not None:
            self._stream.wait_stream(other._stream)

    def mark(self) -> Mark:
        """A mark behind everything handed in so far."""
        if self._stream is None:
            return DONE
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def synchronize(self) -> None:
        """Wait until everything handed in so far is done."""
        self.mark().synchronize()

    def upload(self, values: NDArray[np.generic]) -> Tensor:
        """A copy of `values` on the device; call inside `here`."""
        host = torch.from_numpy(np.ascontiguousarray(values))
        return host.clone() if self._stream is None else host.pin_memory().to(self._device, non_blocking=True)

    def download(self, values: Tensor) -> NDArray[Any]:
        """A copy of `values` that is there once a later mark is reached; call inside `here`."""
        if self._stream is None:
            return values.numpy().copy()
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        values.record_stream(self._stream)  # it may have been made in another queue, which must not reuse it yet
        return host.numpy()


_pauses = 0
_collects = False
_counting = threading.Lock()


@contextmanager
def without_collector() -> Iterator[None]:
    """Keep Python's collector from running, in any thread, until the last of those who ask for it is done.

    What it finds may hold a graph of an earlier program, and freeing a graph in a thread that captures another one ends
    the capture with an error.
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
    """Record `work`; it (or `first`, if that does) is run once before, to compile what it needs.

    Threads of other lanes may use the device meanwhile, so only this thread's calls are held to the rules of capture.
    It is recorded in a separate stream: torch's default one is shared by all graphs, and with it cuBLAS's workspace, in
    which graphs replayed next to each other could overwrite each other's sums.
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
"""Rounds that one graph does where there are as many: the host has less to do."""


class CapturedRounds:
    """Rounds that move a device counter and write history[counter]: run one by one, on a GPU by replaying graphs.

    `one_round` is handed to every call and not kept: it is a method of the owner of this object, and the two would keep
    each other, with their graphs, until a collection.
    """

    def __init__(self, counter: torch.Tensor, history: torch.Tensor) -> None:
        self._counter, self._history = counter, history
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def run(self, one_round: Callable[[], None], rounds: int) -> None:
        """`rounds` rounds from history[0]; afterwards history[k] is the model after k of them."""
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
