"""Engine of one run in a group of lanes; it has the methods of the embedded engine, and the group runs its rounds."""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sifu.core.engine import Evaluation, Position
from sifu.core.layout import Vector
from sifu.core.round_stream import RoundsWanted, StreamedRound, is_evaluated
from sifu.engines.sim.gpu.device_engine import DeviceEngine
from sifu.engines.sim.gpu.device_queue import DeviceQueue
from sifu.engines.sim.simulator import SimulatedFederation
from sifu.errors import RoundRejectedError
from sifu.theory.participation import ClientIndices
from sifu.theory.rounding import UNIT_ROUNDOFF, enlargement
from sifu_kernels import NAME, TF32
from sifu_kernels.lane_group import LaneGroup
from sifu_kernels.lane_stream import Chunk, Evaluated, LaneStream
from sifu_kernels.schedule import slots_for


class LaneEngine(DeviceEngine):
    """Engine of one lane of a group.

    Call `close` when the run is done, so that other lanes do not wait for it.
    """

    def __init__(self, federation: SimulatedFederation, group: LaneGroup, lane: int) -> None:
        super().__init__(federation)
        self._group, self._lane = group, lane
        # Use a separate queue, so that work of this lane does not wait for rounds that the group computes in advance.
        self._queue = DeviceQueue(group.device)
        self.facts = replace(federation.facts, dtype=TF32, trainer=NAME)
        self._places, self._entries = group.source.entries, group.entries
        self._samples = np.array([client.samples for client in federation.clients], dtype=np.int64)

    def close(self) -> None:
        """Remove this lane from the group."""
        self._group.close(self._lane)

    def _stream(
        self,
        models: Sequence[Vector],
        position: Position,
        groups: Sequence[ClientIndices],
        wanted: RoundsWanted,
        *,
        models_stay: bool = False,
    ) -> Generator[list[StreamedRound]]:
        """Yield lists of rounds computed in chunks; every group is a lane of the program."""
        origin = self._upload(wanted.origin, "float64")
        # Groups usually start from the same model, which is reordered and uploaded once.
        different = {id(model): model for model in models}
        starts = {key: self._upload(model) for key, model in different.items()}
        streams = [
            LaneStream(
                self._lane,
                starts[id(model)],
                origin,
                position,
                self._upload_mask(members),
                len(members),
                slots_for(self.facts.participation, len(members)),
                wanted,
                wanted.stop.max_rounds - position.round,
                models_stay,
            )
            for model, members in zip(models, groups, strict=True)
        ]
        self._group.open(streams)
        try:
            while (chunks := self._group.take(streams)) is not None:
                together = [
                    self._rounds(stream, chunk, members)
                    for stream, chunk, members in zip(streams, chunks, groups, strict=True)
                ]
                yield from map(list, zip(*together, strict=True))
        finally:
            self._group.end(streams)

    def _upload(self, model: Vector, dtype: str = "") -> Tensor:
        """Upload a model in device order, converted to `dtype` if given."""
        with self._group.queue.here():
            return self._group.queue.upload(self._in_device_order(model).astype(dtype or self.layout.dtype))

    def _upload_mask(self, clients: ClientIndices) -> Tensor:
        """Upload a mask over all clients that is True for `clients`."""
        mask = np.zeros(self._samples.size, dtype=bool)
        mask[clients] = True
        with self._group.queue.here():
            return self._group.queue.upload(mask)

    def evaluate(self, model: Vector, clients: ClientIndices) -> Evaluation:
        """Evaluate `model` on the data of each of `clients`."""
        with self._queue.here():
            start = self._queue.upload(self._in_device_order(model))
        return self._evaluation(self._group.evaluate(self._queue, self._lane, start), np.asarray(clients))

    def _evaluation(self, evaluated: Evaluated, clients: ClientIndices) -> Evaluation:
        return Evaluation(clients, self._samples[clients], evaluated[0][clients], evaluated[1][clients])

    def _rounds(self, stream: LaneStream, chunk: Chunk, active: ClientIndices) -> Iterator[StreamedRound]:
        """Yield the rounds of a chunk, with all norms rounded up."""
        wanted = stream.wanted
        slots, size = chunk.participants.shape[1], self.layout.size
        real = chunk.participants >= 0
        counts = real.sum(axis=1)
        drifts = np.where(real, chunk.measured[:, :slots], 0.0)
        shifts, distances, lengths = chunk.measured[:, slots:].T
        finite = np.isfinite(drifts).all(axis=1) & np.isfinite(shifts) & np.isfinite(distances)
        with np.errstate(invalid="ignore"):
            errors = (counts + 2) * UNIT_ROUNDOFF * (lengths + shifts + drifts.max(axis=1, initial=0.0)) * 1.01
            drifts = np.where(drifts > 0.0, drifts * enlargement(size) + errors[:, None], 0.0)
            shifts = np.where(counts > 0, shifts * enlargement(size) + errors, 0.0)
        samples = self._samples[np.where(real, chunk.participants, 0)]
        full = counts == slots
        looked_at = active if wanted.evaluated is None else wanted.evaluated
        for ahead, (ok, whole, drawn, shift, distance, length) in enumerate(
            zip(
                finite.tolist(), full.tolist(), chunk.drawn.tolist(), shifts.tolist(), distances.tolist(),
                (lengths * enlargement(size)).tolist(), strict=True,
            )
        ):  # fmt: skip
            at = chunk.start + ahead
            self._check(at, ok, drawn, slots)
            mine = slice(None) if whole else real[ahead]
            participants = chunk.participants[ahead, mine]
            evaluation = None
            if len(looked_at) and is_evaluated(wanted.stop, at + 1):
                evaluated, clients = chunk.evaluated.get(ahead + 1), np.asarray(looked_at)
                if evaluated is None:  # the device did not evaluate this model in advance
                    evaluation = self.evaluate(self._model_of(chunk, ahead), clients)
                else:
                    evaluation = self._evaluation(evaluated, clients)
            yield StreamedRound(
                participants,
                samples[ahead, mine],
                drifts[ahead, mine],
                shift,
                self._federation.rounding_allowance(length, participants),
                distance,
                functools.partial(self._model_of, chunk, ahead),
                evaluation,
            )

    def _model_of(self, chunk: Chunk, ahead: int) -> Vector:
        """Return the model after a round of a chunk."""
        model = chunk.models[ahead]
        if isinstance(model, np.ndarray):
            # Copy, so that the chunk can be freed; `bytearray` does not release the interpreter's lock.
            return np.frombuffer(bytearray(model), dtype=model.dtype)
        with self._queue.here():
            fetched: Vector = model.index_select(0, self._entries).cpu().numpy()
        return fetched

    def _check(self, at: int, finite: bool, drawn: int, slots: int) -> None:
        """Refuse the round that starts at `at` if it has too many participants or its model is not finite."""
        if drawn > slots:
            raise RoundRejectedError(
                f"{drawn} clients were drawn for a round that has room for {slots}; the last good state stays. "
                "Take part with a fixed number of clients instead"
            )
        if not finite:
            raise RoundRejectedError(
                f"round {at + 1} made a model with NaN or Inf and was rejected: lower local.rate "
                f"({self.facts.local_rate:g}); the last good state stays"
            )

    def _in_device_order(self, model: NDArray[np.floating]) -> NDArray[np.floating]:
        flat = np.zeros(self._group.size, dtype=self.layout.dtype)
        flat[self._places] = model
        return flat
