"""Base class of GPU programs that train several lanes, and the streams of rounds that lanes read from them."""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sifu.core.engine import Position
from sifu.core.round_stream import RoundsWanted
from sifu.engines.sim.gpu.device_queue import CapturedRounds, Mark
from sifu.engines.sim.gpu.schedule import Drawing, Packing, Schedule
from sifu.engines.sim.local_training import LocalTraining

Evaluated = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Number of correct predictions and summed loss of every client, as two arrays."""


BLOCK = 1024
"""Number of parameters that one program of an elementwise kernel processes."""


@dataclass(frozen=True)
class ProgramPlan:
    """Dimensions of a program: `lanes` lanes of at most `slots` clients each, of which at most `width` train at a time.

    A program runs at most `chunk` rounds ahead, with batches of at most `batch` samples. `clipped` is True if whole
    updates are clipped.
    """

    training: LocalTraining
    batch: int
    server_rate: float = 1.0
    clipped: bool = False
    lanes: int = 1
    slots: int = 1
    chunk: int = 1
    width: int = 1


class Program(abc.ABC):
    """Program that trains several lanes. `history[k, l]` is the model of lane l after k rounds, in device order."""

    whole_lanes = False
    """True if a model can be evaluated only on all clients of its lane, not on some of them."""

    def __init__(self, plan: ProgramPlan, like: Tensor, size: int) -> None:
        self.training, self.server_rate, self.clipped = plan.training, plan.server_rate, plan.clipped
        lanes, slots, chunk, width = plan.lanes, plan.slots, plan.chunk, plan.width
        self.size, self.lanes, self.slots, self.width = size, lanes, slots, width
        self.device, self._dtype = like.device, like.dtype
        self.history = self._zeros(chunk + 1, lanes, size)
        self.origins = self._zeros(lanes, size, kind=torch.float64)
        self.params = self._zeros(width, size)
        self.counter = self._zeros(1, kind=torch.int64)
        self.measured = self._zeros(chunk, lanes, slots + 3, kind=torch.float64)
        self.clip, self.noise = self._zeros(lanes, kind=torch.float64), self._zeros(lanes, kind=torch.float64)
        self.noise_seeds = self._zeros(chunk, lanes * slots, kind=torch.int64)
        self._order = self._zeros(chunk, width, kind=torch.int64)
        self._places = self._zeros(chunk, lanes, slots, kind=torch.int64).sub_(1)
        self.weights = self._zeros(chunk, lanes, slots, kind=torch.float64)
        self._real_entries = torch.ones(size, dtype=like.dtype, device=self.device)
        self._rounds = CapturedRounds(self.counter, self.history)

    def _zeros(self, *shape: int, kind: torch.dtype | None = None) -> Tensor:
        return torch.zeros(shape, dtype=kind or self._dtype, device=self.device)

    @abc.abstractmethod
    def load(self, schedule: Schedule) -> None:
        """Load the schedule of the next rounds."""

    def run(self, rounds: int) -> None:
        """Run `rounds` rounds from `history[0]`; afterwards `history[k]` is the model after k rounds."""
        self._rounds.run(self._round, rounds)

    def local_steps(self, steps: int) -> None:
        """Run only the local steps of round 0 of the schedule; `params` then holds the local models."""
        self.counter.zero_()
        self._local_steps(steps)

    def local_models(self, at: int, lane: int) -> Tensor:
        """Return the local models (slots, size) of a lane after round `at`, which must be the last round that was run.

        Rows of empty slots are undefined.
        """
        return self.params[self._places[at, lane].clamp(min=0)]

    @abc.abstractmethod
    def evaluate(
        self, models: Tensor, rows: Tensor, firsts: Sequence[int], upload: Callable[[NDArray[Any]], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Evaluate each lane's model on its samples.

        Args:
            models: One model per lane.
            rows: Sample indices (lanes, samples).
            firsts: First sample index of each lane, which identifies lanes with the same data.
            upload: Function that copies an array to the device.

        Returns:
            For each sample, 1 if it is classified correctly and 0 otherwise, and its loss.
        """

    @abc.abstractmethod
    def _round(self) -> None:
        """Run the round that `counter` selects."""

    @abc.abstractmethod
    def _local_steps(self, steps: int) -> None:
        """Distribute the models and train them by the schedule of the round that `counter` selects."""

    def _clip_and_noise(self, norms: Tensor) -> None:
        """Clip the updates, given the norm of each, and add noise to them."""
        from sifu.engines.sim.gpu import round_kernels

        round_kernels.clip_and_noise[(-(-self.size // BLOCK), self.width)](
            self.history, self.counter, self._order, self.params, self._real_entries, norms, self.clip, self.noise,
            self.noise_seeds, self.lanes, self.width, self.size, SLOTS=self.slots, BLOCK=BLOCK,
        )  # fmt: skip

    def _end_round(self, start: Tensor, mean: Tensor, drifts: Tensor) -> None:
        """Write the model and the measurements of round `counter`, and increment the counter.

        `start` and `mean` (lanes, size) are the distributed model and the mean of the local models, in float64.
        `drifts` (lanes, slots) are the distances of the local models from their mean. The measurements of a lane are
        its drifts, followed by the distance from `start` to `mean`, the distance of the new model from `origins`, and
        the norm of `start`.
        """
        new = (start + self.server_rate * (mean - start)).to(self.history.dtype)
        ways = (mean - start, new.to(torch.float64) - self.origins, start)
        lengths = torch.cat([drifts, *(torch.linalg.vector_norm(way, dim=1, keepdim=True) for way in ways)], dim=1)
        self.measured.index_copy_(0, self.counter, lengths[None])
        self.counter.add_(1)
        self.history.index_copy_(0, self.counter, new[None])


class PackedProgram(Program):
    """Program that trains only the slots that hold a client (`schedule.Packing`)."""

    def __init__(self, plan: ProgramPlan, like: Tensor, size: int) -> None:
        super().__init__(plan, like, size)
        shape = (plan.chunk, plan.training.steps, plan.width, plan.batch)
        self._rows = torch.full(shape, -1, dtype=torch.int32, device=self.device)

    def load(self, schedule: Schedule) -> None:
        """Load the schedule of the next rounds."""
        self._load_packed(schedule, Packing.of(schedule.participants, self.width), schedule.rows.shape[0])

    def _load_packed(self, schedule: Schedule, packing: Packing, rounds: int) -> None:
        self._order[:rounds], self._places[:rounds] = packing.order, packing.places
        self._rows[:rounds], self.weights[:rounds] = packing.rows(schedule), schedule.weights


@dataclass(frozen=True)
class LaneSource:
    """Configuration shared by the lanes of a group."""

    drawing: Drawing
    plan: ProgramPlan
    size: int
    entries: NDArray[np.int64]
    """Position on the device of each entry of a model's own vector."""
    make_program: Callable[[ProgramPlan], Program]


@dataclass(frozen=True)
class Chunk:
    """Rounds of a stream: their measurements and models, valid once `ready` is reached.

    `participants` and `measured` have shapes (rounds, slots) and (rounds, slots + 3); a row of `measured` holds the
    drifts, then ||mean - theta||, ||next - origin|| and ||theta||. `drawn` is the number of clients each round drew; if
    it exceeds the number of slots, some clients were not trained. `models` (rounds, parameters) is on the host in the
    model's own order, or, for a stream that rarely reads its models, on the device in device order. `tip` is the last
    model, on the device and in device order. `updates` are the updates of the last round's participants, also on the
    device, if requested. `evaluated` maps a round, counted from 1, to the evaluation of every client; it contains the
    rounds that the stop rule needs, as far as the accuracy was known when they ran.
    """

    start: int
    participants: NDArray[np.int64]
    drawn: NDArray[np.int64]
    measured: NDArray[np.float64]
    models: NDArray[np.floating] | Tensor
    tip: Tensor
    evaluated: dict[int, Evaluated]
    updates: Tensor | None
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
    absent: Tensor
    clients: int
    """Number of active clients."""
    slots: int
    """Number of slots for the participants of a round (`slots_for`)."""
    wanted: RoundsWanted
    left: int
    single: bool = False
    """True for a stream of one round, which should not wait for other rounds."""
    models_stay: bool = False
    """True if models stay on the device until they are read; otherwise all models of a chunk are copied to the host."""
    accuracy: float | None = None
    """Latest accuracy known to the consumer; the device uses it to choose the models to evaluate in advance."""
    chunks: deque[Chunk] = field(default_factory=deque)
    held: bool = False
    error: BaseException | None = None

    def wants(self, ahead: int) -> bool:
        """Return whether to compute another chunk, so that at most `ahead` chunks wait for the consumer."""
        return self.left > 0 and self.error is None and len(self.chunks) + self.held < ahead
