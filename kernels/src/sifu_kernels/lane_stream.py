"""Streams of rounds that lanes read from a program."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sifu.core.engine import Position
from sifu.core.round_stream import RoundsWanted
from sifu.engines.sim.gpu.device_queue import Mark, capture
from sifu.engines.sim.local_training import LocalTraining
from sifu_kernels.schedule import Drawing

Evaluated = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Number of correct predictions and summed loss of every client, as two arrays."""


@dataclass(frozen=True)
class ProgramPlan:
    """Dimensions of a program: `lanes` lanes of at most `slots` clients each, of which at most `width` train at a time.

    A program runs at most `chunk` rounds ahead, with batches of at most `batch` samples.
    """

    training: LocalTraining
    batch: int
    lanes: int = 1
    slots: int = 1
    chunk: int = 1
    width: int = 1


@dataclass(frozen=True)
class LaneSource:
    """Configuration shared by the lanes of a group."""

    drawing: Drawing
    plan: ProgramPlan
    size: int
    entries: NDArray[np.int64]
    """Position on the device of each entry of a model's own vector."""
    make_program: Callable[[ProgramPlan], Any]
    """Function that makes a `ConvProgram`."""


@dataclass(frozen=True)
class Chunk:
    """Rounds of a stream: their measurements and models, valid once `ready` is reached.

    `participants` and `measured` have shapes (rounds, slots) and (rounds, slots + 3); a row of `measured` holds the
    drifts, then ||mean - theta||, ||next - origin|| and ||theta||. `drawn` is the number of clients each round drew; if
    it exceeds the number of slots, some clients were not trained. `models` (rounds, parameters) is on the host in the
    model's own order, or, for a stream that rarely reads its models, on the device in device order. `tip` is the last
    model, on the device and in device order. `evaluated` maps a round, counted from 1, to the evaluation of every
    client; it contains the rounds that the stop rule needs.
    """

    start: int
    participants: NDArray[np.int64]
    drawn: NDArray[np.int64]
    measured: NDArray[np.float64]
    models: NDArray[np.floating] | Tensor
    tip: Tensor
    evaluated: dict[int, Evaluated]
    ready: Mark

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return int(self.measured.shape[0])


@dataclass(eq=False)
class LaneStream:
    """Queue of consecutive rounds of one lane; the next chunk starts from `model` at `position`."""

    lane: int
    model: Tensor
    origin: Tensor
    position: Position
    active: Tensor
    clients: int
    """Number of active clients."""
    slots: int
    """Number of slots for the participants of a round (`slots_for`)."""
    wanted: RoundsWanted
    left: int
    models_stay: bool = False
    """True if models stay on the device until they are read; otherwise all models of a chunk are copied to the host."""
    chunks: deque[Chunk] = field(default_factory=deque)
    held: bool = False
    error: BaseException | None = None

    def wants(self, ahead: int) -> bool:
        """Return whether to compute another chunk, so that at most `ahead` chunks wait for the consumer."""
        return self.left > 0 and self.error is None and len(self.chunks) + self.held < ahead


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
