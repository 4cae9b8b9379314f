"""Work of a GPU as one captured graph: recorded once, then replayed with a single call."""

from __future__ import annotations

from collections.abc import Callable

import torch


def capture(device: torch.device, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Record `work`, which is run once before to compile what it needs, and leaves its results where it put them.

    Threads of other lanes may use the device meanwhile, so only this thread's calls are held to the rules of capture.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return graph


SEVERAL = 10
"""Rounds that one graph does where there are as many: the host has less to do."""


class CapturedRounds:
    """Rounds that move a device counter and write history[counter]: run one by one, on a GPU by replaying graphs."""

    def __init__(self, one_round: Callable[[], None], counter: torch.Tensor, history: torch.Tensor) -> None:
        self._one_round, self._counter, self._history = one_round, counter, history
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def run(self, rounds: int) -> None:
        """`rounds` rounds from history[0]; afterwards history[k] is the model after k of them."""
        if self._counter.device.type != "cuda":
            self._counter.zero_()
            for _ in range(rounds):
                self._one_round()
            return
        several, single = divmod(rounds, SEVERAL)
        wanted = ((SEVERAL, several), (1, single))
        for length, times in wanted:
            if times and length not in self._graphs:
                self._capture(length)
        self._counter.zero_()
        for length, times in wanted:
            for _ in range(times):
                self._graphs[length].replay()

    def _capture(self, length: int) -> None:
        saved = self._history[: length + 1].clone()
        self._counter.zero_()

        def work() -> None:
            for _ in range(length):
                self._one_round()

        self._graphs[length] = capture(self._counter.device, work)
        self._history[: length + 1] = saved
