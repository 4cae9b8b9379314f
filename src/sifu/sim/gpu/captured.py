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


class CapturedRounds:
    """Rounds that move a device counter and write history[counter]: run one by one, on a GPU by replaying one graph."""

    def __init__(self, one_round: Callable[[], None], counter: torch.Tensor, history: torch.Tensor) -> None:
        self._one_round, self._counter, self._history = one_round, counter, history
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self, rounds: int) -> None:
        """`rounds` rounds from history[0]; afterwards history[k] is the model after k of them."""
        if self._counter.device.type == "cuda" and self._graph is None:
            saved = self._history[:2].clone()
            self._counter.zero_()
            self._graph = capture(self._counter.device, self._one_round)
            self._history[:2] = saved
        self._counter.zero_()
        for _ in range(rounds):
            if self._graph is None:
                self._one_round()
            else:
                self._graph.replay()
