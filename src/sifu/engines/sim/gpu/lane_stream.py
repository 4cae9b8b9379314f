"""The server's step at the end of a round of all lanes, and the lengths that are kept of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sifu.core.engine import Position
from sifu.core.spec import StopSpec
from sifu.engines.sim.gpu.device_queue import Mark
from sifu.engines.sim.gpu.schedule import Drawing, Schedule


def end_round(
    history: Tensor,
    measured: Tensor,
    counter: Tensor,
    *,
    start: Tensor,
    mean: Tensor,
    drifts: Tensor,
    origins: Tensor,
    server_rate: float,
) -> None:
    """Write the model after round `counter` and what was measured in it, and count it.

    `start` and `mean` (lanes, size) are the model that was handed out and the mean of the local ones, in float64;
    `drifts` (lanes, slots) the lengths of local models less their mean. Behind them come, for each lane, how far the
    mean went, how far the new model is from `origins`, and the length of the old one.
    """
    new = (start + server_rate * (mean - start)).to(history.dtype)
    lengths = torch.cat(
        [
            drifts,
            torch.linalg.vector_norm(mean - start, dim=1, keepdim=True),
            torch.linalg.vector_norm(new.to(torch.float64) - origins, dim=1, keepdim=True),
            torch.linalg.vector_norm(start, dim=1, keepdim=True),
        ],
        dim=1,
    )
    measured.index_copy_(0, counter, lengths[None])
    counter.add_(1)
    history.index_copy_(0, counter, new[None])


Evaluated = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Correct predictions and the sum of losses of every client."""


class Program(Protocol):
    """What runs lanes: the model after k rounds of lane l is history[k, l], in device order."""

    width: int
    whole_lanes: bool
    """Whether models are evaluated on whole lanes only."""
    history: Tensor
    origins: Tensor
    measured: Tensor
    params: Tensor
    clip: Tensor
    noise: Tensor
    noise_seeds: Tensor

    def load(self, schedule: Schedule) -> None: ...
    def run(self, rounds: int) -> None: ...
    def local_steps(self, steps: int) -> None: ...
    def local_models(self, at: int, lane: int) -> Tensor: ...
    def evaluate(
        self, models: Tensor, rows: Tensor, firsts: Sequence[int], upload: Callable[[NDArray[Any]], Tensor]
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class LaneSource:
    """What the lanes of a group share."""

    drawing: Drawing
    size: int
    entries: NDArray[np.int64]
    """Where each entry of a model's own vector lies in its `size` entries on the device."""
    make_program: Callable[[int, int, int, int], Program]
    """From lanes, rounds ahead, slots of a lane and how many of all lanes' slots are filled at most."""


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
    stop: StopSpec
    left: int
    want_updates: Callable[[int], bool]
    single: bool = False
    """One round on its own, for which no one should have to wait for more."""
    models_stay: bool = False
    """Models stay on the device until they are fetched; otherwise all of them come to the host next to the rounds."""
    looked_at: NDArray[np.int64] | None = None
    """Clients that models are evaluated on; None for all."""
    accuracy: float | None = None
    """The latest that the consumer has found: by it the device chooses which models to evaluate ahead."""
    chunks: deque[Chunk] = field(default_factory=deque)
    held: bool = False
    error: BaseException | None = None

    def wants(self, ahead: int) -> bool:
        """Whether the device may run (further) ahead, by `ahead` chunks at most, of the consumer."""
        return self.left > 0 and self.error is None and len(self.chunks) + self.held < ahead
