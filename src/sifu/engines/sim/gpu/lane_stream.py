"""What programs of lanes have in common, and the streams of rounds that lanes take from them."""

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
"""Correct predictions and the sum of losses of every client."""


BLOCK = 1024
"""Parameters that one program of a kernel over all of them looks at."""


@dataclass(frozen=True)
class ProgramPlan:
    """What a program runs: `lanes` lanes of at most `slots` clients each, `width` of them at a time.

    At most `chunk` rounds ahead, with batches of at most `batch`. `clipped` says whether whole updates are.
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
    """What runs lanes: the model after k rounds of lane l is history[k, l], in device order."""

    whole_lanes = False
    """Whether models are evaluated on whole lanes only."""

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
        """Take over the schedule of the next rounds."""

    def run(self, rounds: int) -> None:
        """`rounds` rounds from history[0]; afterwards history[k] is the model after k of them."""
        self._rounds.run(self._round, rounds)

    def local_steps(self, steps: int) -> None:
        """Only the local steps of round 0 of the schedule: `params` holds the local models afterwards."""
        self.counter.zero_()
        self._local_steps(steps)

    def local_models(self, at: int, lane: int) -> Tensor:
        """The local models (slots, size) of a lane after round `at`, if it was the last; empty slots hold anything."""
        return self.params[self._places[at, lane].clamp(min=0)]

    @abc.abstractmethod
    def evaluate(
        self, models: Tensor, rows: Tensor, firsts: Sequence[int], upload: Callable[[NDArray[Any]], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Whether each of `rows` (lanes, samples) is classified rightly by its lane's model, and its loss.

        `firsts` is the first row of each lane, by which lanes with the same data are found.
        """

    @abc.abstractmethod
    def _round(self) -> None:
        """The round that `counter` names."""

    @abc.abstractmethod
    def _local_steps(self, steps: int) -> None:
        """Hand the models out and train them by the schedule of the round that `counter` names."""

    def _clip_and_noise(self, norms: Tensor) -> None:
        """Clip updates of these norms (slots), and add noise to them."""
        from sifu.engines.sim.gpu import round_kernels

        round_kernels.clip_and_noise[(-(-self.size // BLOCK), self.width)](
            self.history, self.counter, self._order, self.params, self._real_entries, norms, self.clip, self.noise,
            self.noise_seeds, self.lanes, self.width, self.size, SLOTS=self.slots, BLOCK=BLOCK,
        )  # fmt: skip

    def _end_round(self, start: Tensor, mean: Tensor, drifts: Tensor) -> None:
        """Write the model after round `counter` and what was measured in it, and count it.

        `start` and `mean` (lanes, size) are the model that was handed out and the mean of the local ones, in float64;
        `drifts` (lanes, slots) the lengths of local models less their mean. Behind them come, for each lane, how far
        the mean went, how far the new model is from `origins`, and the length of the old one.
        """
        new = (start + self.server_rate * (mean - start)).to(self.history.dtype)
        ways = (mean - start, new.to(torch.float64) - self.origins, start)
        lengths = torch.cat([drifts, *(torch.linalg.vector_norm(way, dim=1, keepdim=True) for way in ways)], dim=1)
        self.measured.index_copy_(0, self.counter, lengths[None])
        self.counter.add_(1)
        self.history.index_copy_(0, self.counter, new[None])


class PackedProgram(Program):
    """A program that trains only slots that hold a client (`schedule.Packing`)."""

    def __init__(self, plan: ProgramPlan, like: Tensor, size: int) -> None:
        super().__init__(plan, like, size)
        shape = (plan.chunk, plan.training.steps, plan.width, plan.batch)
        self._rows = torch.full(shape, -1, dtype=torch.int32, device=self.device)

    def load(self, schedule: Schedule) -> None:
        """Take over the schedule of the next rounds."""
        self._load_packed(schedule, Packing.of(schedule.participants, self.width), schedule.rows.shape[0])

    def _load_packed(self, schedule: Schedule, packing: Packing, rounds: int) -> None:
        self._order[:rounds], self._places[:rounds] = packing.order, packing.places
        self._rows[:rounds], self.weights[:rounds] = packing.rows(schedule), schedule.weights


@dataclass(frozen=True)
class LaneSource:
    """What the lanes of a group share."""

    drawing: Drawing
    plan: ProgramPlan
    size: int
    entries: NDArray[np.int64]
    """Where each entry of a model's own vector lies in its `size` entries on the device."""
    make_program: Callable[[ProgramPlan], Program]


@dataclass(frozen=True)
class Chunk:
    """Rounds of a stream: their scalars and models, once `ready` is reached.

    `participants` and `measured` are (rounds, slots) and (rounds, slots + 3): drifts, then ||mean - theta||,
    ||next - origin|| and ||theta||. `drawn` is how many clients each round drew; more than slots were not all trained.
    `models` is (rounds, parameters), in the model's own order: on the host, or on the device for a stream whose models
    are seldom fetched. `tip`, the last of them, stays on the device, in its order; so do `updates`, those of the last
    round's participants if they are wanted. `evaluated` holds correct predictions and losses of every client after some
    of the rounds, counted from 1: those that the stop rule looks at, as far as accuracy was known when they were run.
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
        """How many there are."""
        return int(self.measured.shape[0])


@dataclass(eq=False)
class LaneStream:
    """Rounds that one lane takes in one after the other: `model` and `position` are where the next chunk begins."""

    lane: int
    model: Tensor
    origin: Tensor
    position: Position
    active: Tensor
    absent: Tensor
    clients: int
    """How many are active."""
    slots: int
    """Participants of a round at most."""
    wanted: RoundsWanted
    left: int
    single: bool = False
    """One round on its own, for which no one should have to wait for more."""
    models_stay: bool = False
    """Models stay on the device until they are fetched; otherwise all of them come to the host next to the rounds."""
    accuracy: float | None = None
    """The latest that the consumer has found: by it the device chooses which models to evaluate ahead."""
    chunks: deque[Chunk] = field(default_factory=deque)
    held: bool = False
    error: BaseException | None = None

    def wants(self, ahead: int) -> bool:
        """Whether the device may run (further) ahead, by `ahead` chunks at most, of the consumer."""
        return self.left > 0 and self.error is None and len(self.chunks) + self.held < ahead
