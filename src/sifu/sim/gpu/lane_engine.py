"""One run's engine in a group of lanes: the same protocol as the embedded one, rounds from the group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sifu.core.engine import ClientProfile, Evaluation, Position, RoundResult, TrainingFacts
from sifu.core.errors import InputError, RoundRejectedError
from sifu.core.layout import ModelLayout, Vector
from sifu.core.participation import ClientIndices
from sifu.core.spec import StopSpec
from sifu.core.streaming import RoundsWanted, StreamedRound, is_evaluated
from sifu.core.upward import UNIT_ROUNDOFF, enlargement
from sifu.sim.engine import SimulatedFederation
from sifu.sim.gpu.lane_group import Chunk, Job, LaneGroup

NEVER = StopSpec(target=0.0, min_rounds=0, max_rounds=2**62, evaluate_every=2**62)
"""A stop rule that looks at nothing."""


class LaneEngine:
    """A lane of a group. `close` it when its run is done, so that the others do not wait for it."""

    def __init__(
        self,
        federation: SimulatedFederation,
        group: LaneGroup,
        lane: int,
        entries: NDArray[np.int64],
        outside: tuple[str, ...] = (),
    ) -> None:
        self._federation, self._group, self._lane = federation, group, lane
        # What this device does otherwise than the embedded engine stands in every certificate.
        self._facts = replace(federation.facts, outside=(*federation.facts.outside, *outside))
        self._entries = torch.from_numpy(entries).to(group.device)
        self._samples = np.array([one.samples for one in federation.clients], dtype=np.int64)

    @property
    def layout(self) -> ModelLayout:
        """Names and shapes of the parameters."""
        return self._federation.layout

    @property
    def clients(self) -> tuple[ClientProfile, ...]:
        """Every known client."""
        return self._federation.clients

    @property
    def facts(self) -> TrainingFacts:
        """What every round does, on this device."""
        return self._facts

    def initial_model(self, branch: int) -> Vector:
        """A fresh model, the same as the embedded engine's."""
        return self._federation.initial_model(branch)

    def close(self) -> None:
        """The group goes on without this lane."""
        self._group.close(self._lane)

    def run_round(
        self,
        model: Vector,
        position: Position,
        active: ClientIndices,
        *,
        want_gram: bool = False,
        want_updates: bool = False,
        absent: ClientIndices | None = None,
    ) -> RoundResult:
        """One round by itself."""
        if want_gram:
            raise InputError("lanes keep no Gram matrices: set keep.gram_clients = 0, or use the embedded engine")
        device_model = self._to_device(model)
        job = self._job(device_model, device_model, position, active, absent, NEVER, 1, want_updates)
        self._group.submit(job)
        chunk = self._group.wait(job)
        scalars = self._scalars(chunk, 0, position.round)
        updates = None
        if want_updates and chunk.updates is not None:
            updates = self._from_device(chunk.updates)[: scalars[0].size]
        return RoundResult(self._from_device(chunk.models[1]), *scalars[:5], None, updates)

    def run_rounds(
        self, model: Vector, position: Position, active: ClientIndices, wanted: RoundsWanted
    ) -> Iterator[StreamedRound]:
        """Rounds from the group, a chunk at a time."""
        if wanted.want_gram:
            raise InputError("lanes keep no Gram matrices: set keep.gram_clients = 0, or use the embedded engine")
        current, origin = self._to_device(model), self._to_device(wanted.origin)
        ahead: Job | None = self._next(current, origin, position, active, wanted)
        while ahead is not None:
            job = ahead
            chunk = self._group.wait(job)
            rounds = chunk.measured.shape[0]
            after = Position(position.branch, job.position.round + rounds)
            # A lane by itself runs on while its rounds are looked at; together, waiting for each other costs less
            # than rounds that nobody takes.
            lone = self._group.lone
            if lone:
                ahead = self._next(chunk.models[rounds], origin, after, active, wanted)
            for done in range(rounds):
                yield self._streamed(chunk, done, job.position.round, active, wanted)
            if not lone:
                ahead = self._next(chunk.models[rounds], origin, after, active, wanted)

    def _next(
        self, model: Tensor, origin: Tensor, position: Position, active: ClientIndices, wanted: RoundsWanted
    ) -> Job | None:
        """Hand in the next rounds, if there are any."""
        left = wanted.stop.max_rounds - position.round
        if left <= 0:
            return None
        job = self._job(model, origin, position, active, None, wanted.stop, left, wanted.wants_updates)
        self._group.submit(job)
        return job

    def local_updates(
        self, model: Vector, position: Position, clients: ClientIndices, steps: int
    ) -> NDArray[np.floating]:
        """theta_i - model of each client after its first `steps` local steps of this position."""
        found = self._group.local_updates(self._lane, self._to_device(model), position, np.asarray(clients), steps)
        return self._from_device(found)

    def evaluate(self, model: Vector, clients: ClientIndices) -> Evaluation:
        """How `model` does on the data of each of `clients`."""
        return self._evaluation(self._group.evaluate(self._lane, self._to_device(model)), np.asarray(clients))

    def _evaluation(self, found: tuple[NDArray[np.int64], NDArray[np.float64]], clients: ClientIndices) -> Evaluation:
        return Evaluation(clients, self._samples[clients], found[0][clients], found[1][clients])

    def _job(
        self,
        model: Tensor,
        origin: Tensor,
        position: Position,
        active: ClientIndices,
        absent: ClientIndices | None,
        stop: StopSpec,
        most: int,
        wants_updates: object,
    ) -> Job:
        taking, missing = (np.zeros(self._samples.size, dtype=bool) for _ in range(2))
        taking[active] = True
        if absent is not None:
            missing[absent] = True
        wants = wants_updates if callable(wants_updates) else lambda _: bool(wants_updates)
        return Job(self._lane, model, origin.to(torch.float64), position, taking, missing, stop, most, wants)

    def _streamed(
        self, chunk: Chunk, ahead: int, start: int, active: ClientIndices, wanted: RoundsWanted
    ) -> StreamedRound:
        participants, samples, drifts, shift, rounding, distance = self._scalars(chunk, ahead, start + ahead)
        evaluation = None
        if is_evaluated(wanted.stop, start + ahead + 1):
            evaluation = self._evaluation(chunk.evaluated[ahead + 1], np.asarray(active))
        updates = None
        if wanted.wants_updates(start + ahead) and chunk.updates is not None:
            updates = self._from_device(chunk.updates)[: participants.size]
        return StreamedRound(
            participants, samples, drifts, shift, rounding, distance,
            lambda: self._from_device(chunk.models[ahead + 1]), evaluation, None, updates,
        )  # fmt: skip

    def _scalars(
        self, chunk: Chunk, ahead: int, at: int
    ) -> tuple[ClientIndices, NDArray[np.int64], NDArray[np.float64], float, float, float]:
        """Participants, samples, drifts, shift, rounding allowance and distance, norms rounded up."""
        slots = chunk.participants.shape[1]
        real = chunk.participants[ahead] >= 0
        participants = chunk.participants[ahead][real]
        drifts, shift, distance, length = (
            chunk.measured[ahead][:slots][real],
            *(float(one) for one in chunk.measured[ahead][slots:]),
        )
        if not (np.isfinite(drifts).all() and np.isfinite(shift) and np.isfinite(distance)):
            raise RoundRejectedError(
                f"round {at + 1} made a model with NaN or Inf and was rejected: lower local.rate "
                f"({self.facts.local_rate:g}); the last good state stays"
            )
        size = self.layout.size
        error = (participants.size + 2) * UNIT_ROUNDOFF * (length + shift + float(drifts.max(initial=0.0))) * 1.01
        drifts = np.where(drifts > 0.0, drifts * enlargement(size) + error, 0.0) if participants.size else drifts
        if participants.size == 0:
            shift = 0.0
        else:
            shift = shift * enlargement(size) + error
        rounding = self._federation.rounding_allowance(length * enlargement(size), participants)
        return participants, self._samples[participants], drifts, shift, rounding, distance

    def _to_device(self, model: NDArray[np.floating]) -> Tensor:
        dtype = torch.float64 if self.layout.dtype == "float64" else torch.float32
        flat = torch.zeros(self._group.size, dtype=dtype, device=self._group.device)
        flat[self._entries] = torch.from_numpy(np.array(model, dtype=self.layout.dtype)).to(self._group.device)
        return flat

    def _from_device(self, model: Tensor) -> NDArray[np.floating]:
        found: NDArray[np.floating] = model[..., self._entries].cpu().numpy()
        return found
