"""Engine whose rounds run on a GPU in captured graphs, for rounds of all clients and of groups.

It draws the same participants and batches as the embedded engine. The mean of a round is summed in float64 in the order
of its participants. The next round is submitted before the results of a round are read, so the device never waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sifu.core.engine import Evaluation, Position
from sifu.core.layout import Vector
from sifu.core.replies import ReplyRules
from sifu.core.round import RoundSetup, draw
from sifu.core.round_stream import RoundsWanted, StreamedRound, is_evaluated
from sifu.engines.sim.embedded_clients import check_clients
from sifu.engines.sim.gpu.branches import CHUNK, FILLED, Branches
from sifu.engines.sim.gpu.device_engine import NONE, DeviceEngine
from sifu.engines.sim.gpu.device_queue import DeviceQueue, Mark
from sifu.engines.sim.local_training import draw_batches
from sifu.engines.sim.models import LinearModel
from sifu.engines.sim.simulator import SimulatedFederation
from sifu.engines.sim.trainers import OWN
from sifu.errors import InputError, RoundRejectedError
from sifu.theory.arrays import Array
from sifu.theory.participation import ClientIndices, Places
from sifu.theory.rounding import UNIT_ROUNDOFF, enlargement

AHEAD = 2
"""Number of rounds that are submitted before the results of the first of them are read."""
MEASURED = 32
"""Number of local models that are converted to float64 at a time to measure their distances."""


@dataclass(frozen=True)
class _Submitted:
    """A round of one group: its participants, and results that are valid once `ready` is reached.

    `measured` holds the drifts, ||mean - theta||, ||next - origin|| and ||theta||. `model` is the next model, on the
    host if it was asked for there.
    """

    position: Position
    participants: ClientIndices
    measured: NDArray[np.float64]
    model: NDArray[Any] | Tensor
    evaluated: tuple[NDArray[Any], NDArray[Any]] | None
    ready: Mark


class GraphEngine(DeviceEngine):
    """Engine of a federation on a device; the model is one that `is_captured` accepts."""

    def __init__(self, federation: SimulatedFederation, device: str) -> None:
        facts, model, plan = federation.facts, federation.model, federation.plan
        if federation.reply_rules != ReplyRules():
            raise InputError(
                "a GPU checks no single replies: leave server.rejected and server.update_bound out, or use device cpu"
            )
        super().__init__(federation)
        self._plan, self.facts = plan, replace(facts, trainer=OWN)
        checked = check_clients(
            federation.given, model.objective, plan.outputs, plan.dtype, flat=isinstance(model, LinearModel)
        )
        samples, targets = (np.concatenate([getattr(client, name) for client in checked]) for name in ("x", "y"))
        with torch.no_grad():
            outputs = model.build(plan.dtype)(torch.from_numpy(samples[:1])).flatten(1).shape[1]
        encoded = model.objective.encode(torch.from_numpy(targets), outputs, getattr(torch, plan.dtype))
        self._sizes, self._firsts = plan.samples, np.cumsum(plan.samples) - plan.samples
        self._queue = DeviceQueue(torch.device(device))
        with self._queue.here():
            uploaded = self._queue.upload(samples), self._queue.upload(encoded.numpy())
            count = len(checked) if facts.participation.kind != "fixed" else facts.participation.count
            self._branches = Branches(model, plan.dtype, plan.training, *uploaded, count)
        self._repeats = False
        self._chunks_of: tuple[bytes, Tensor, Tensor, Array] | None = None
        """Clients that were evaluated most recently, and the rows, masks and owners of their chunks."""

    def evaluate(self, model: Vector, clients: ClientIndices) -> Evaluation:
        """Evaluate `model` on the data of each of `clients`."""
        with self._queue.here():
            found = self._score(self._queue.upload(self.layout.own_copy(model)), clients)
        self._queue.synchronize()
        return self._evaluation(found, clients)

    # -- rounds --------------------------------------------------------------------------------------------------

    def _stream(
        self,
        models: Sequence[Vector],
        position: Position,
        groups: Sequence[ClientIndices],
        wanted: RoundsWanted,
        *,
        models_stay: bool = False,
    ) -> Generator[list[StreamedRound]]:
        """Yield lists of rounds, one round per group from the group's own model."""
        members = [np.sort(np.asarray(group, dtype=np.int64)) for group in groups]
        places = [Places.of(group, self._plan.numbers[group]) for group in members]
        with self._queue.here():
            different = {id(model): self._queue.upload(self.layout.own_copy(model)) for model in models}
            origin = self._queue.upload(wanted.origin)
        tips, at = [different[id(model)] for model in models], position.round
        looked_at = [group if wanted.evaluated is None else wanted.evaluated for group in groups]
        drawing = self.facts.participation, self._federation.participation_key
        waiting: deque[list[_Submitted]] = deque()
        while True:
            while at < wanted.stop.max_rounds and len(waiting) < AHEAD:
                here = Position(position.branch, at)
                drawn = [draw(*drawing, RoundSetup(np.zeros(0), here, group)) for group in places]
                looks = [clients if is_evaluated(wanted.stop, at + 1) else NONE for clients in looked_at]
                with self._queue.here():
                    tips, submitted = self._submit(tips, here, drawn, origin, looks, models_stay)
                waiting.append(submitted)
                at += 1
            if not waiting:
                return
            yield [
                self._finished(submitted, clients)
                for submitted, clients in zip(waiting.popleft(), looked_at, strict=True)
            ]

    def _submit(
        self,
        tips: Sequence[Tensor],
        position: Position,
        drawn: Sequence[ClientIndices],
        origin: Tensor,
        looks: Sequence[ClientIndices],
        models_stay: bool,
    ) -> tuple[list[Tensor], list[_Submitted]]:
        """Submit one round of every group; return the next models on the device, and the rounds."""
        starts = [tip for tip, who in zip(tips, drawn, strict=True) for _ in who]
        together = np.concatenate([NONE, *drawn])
        local = self._train(starts, position, together)
        results, nexts, first = [], [], 0
        for tip, who, clients in zip(tips, drawn, looks, strict=True):
            model, measured = self._average(tip, local[first : first + len(who)], who, origin)
            evaluated = self._score(model, clients) if len(clients) else None
            kept = model if models_stay else self._queue.download(model)
            results.append((who, self._queue.download(measured), kept, evaluated))
            nexts.append(model)
            first += len(who)
        ready = self._queue.mark()
        return nexts, [_Submitted(position, *result, ready) for result in results]

    def _average(
        self, start: Tensor, local: Tensor, participants: ClientIndices, origin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the next model, and the lengths of `_Submitted.measured`."""
        exact = start.to(torch.float64)
        mean = torch.zeros_like(exact) if len(participants) else exact
        weights = self._sizes[participants] / self._sizes[participants].sum()
        for row, weight in zip(local, weights.tolist(), strict=True):
            mean.add_(row, alpha=weight)
        shift = mean - exact
        model = (exact + shift).to(start.dtype)
        away = [torch.linalg.vector_norm(part.to(torch.float64) - mean, dim=1) for part in torch.split(local, MEASURED)]
        ways = (shift, model.to(torch.float64) - origin, exact)
        return model, torch.cat([*away, torch.stack([torch.linalg.vector_norm(way) for way in ways])])

    def _finished(self, done: _Submitted, clients: ClientIndices) -> StreamedRound:
        """Return a round once its results are there, with all norms rounded up."""
        done.ready.synchronize()
        who, size, at = done.participants, self.layout.size, done.position.round
        drifts, (shift, distance, length) = done.measured[: len(who)], done.measured[len(who) :].tolist()
        if not np.isfinite(done.measured).all():
            raise RoundRejectedError(
                f"round {at + 1} made a model with NaN or Inf and was rejected: lower local.rate "
                f"({self.facts.local_rate:g}); the last good state stays"
            )
        error = (len(who) + 2) * UNIT_ROUNDOFF * (length + shift + drifts.max(initial=0.0)) * 1.01
        return StreamedRound(
            who,
            self._sizes[who],
            np.where(drifts > 0.0, drifts * enlargement(size) + error, 0.0),
            shift * enlargement(size) + error if len(who) else 0.0,
            self._federation.rounding_allowance(length * enlargement(size), who),
            distance,
            partial(self._fetched, done.model),
            None if done.evaluated is None else self._evaluation(done.evaluated, clients),
        )

    def _fetched(self, model: NDArray[Any] | Tensor) -> Vector:
        if isinstance(model, np.ndarray):
            return model.copy()
        with self._queue.here():
            fetched: Vector = model.cpu().numpy().copy()
        return fetched

    # -- local training ------------------------------------------------------------------------------------------

    def _train(self, starts: Sequence[Tensor], position: Position, clients: ClientIndices) -> Tensor:
        """Return the models (clients, parameters) after local training; each client starts from its own of `starts`."""
        dtype = getattr(torch, self.layout.dtype)
        local = torch.empty((len(clients), self.layout.size), dtype=dtype, device=self._queue.device)
        if not len(clients):
            return local
        if not self._repeats:
            self._check_repeats(starts, position, clients)
        widths = self._widths(clients)
        for width in np.unique(widths).tolist():
            chosen = np.flatnonzero(widths == width)
            rows, shares = map(self._queue.upload, self._batches(position, clients[chosen], width))
            whole = chosen.size == len(clients)
            into = local if whole else torch.empty_like(local[: chosen.size])
            rates = self._queue.upload(self._plan.rates[clients[chosen]])
            self._branches.train([starts[place] for place in chosen.tolist()], rates, rows, shares, into)
            if not whole:
                local[self._queue.upload(chosen)] = into
        return local

    def _widths(self, clients: ClientIndices) -> NDArray[np.int64]:
        """Return the number of rows of each client's batches: that of the plan, or for whole data its own, rounded up.

        >>> [max(FILLED, 1 << (samples - 1).bit_length()) for samples in (3, 32, 33, 100)]
        [32, 32, 64, 128]
        """
        size = self._plan.training.batch_size
        own = [size or max(FILLED, 1 << (samples - 1).bit_length()) for samples in self._sizes[clients].tolist()]
        return np.array(own, dtype=np.int64)

    def _batches(
        self, position: Position, clients: ClientIndices, width: int
    ) -> tuple[NDArray[np.int64], NDArray[np.floating]]:
        """Return the rows and weights of each step (clients, steps, width), filled up with each client's first row."""
        training, plan = self._plan.training, self._plan
        drawn = draw_batches(
            training.batch_size, self._sizes[clients], plan.seed, position, plan.numbers[clients], training.steps
        )
        rows = np.zeros((len(clients), training.steps, width), dtype=np.int64)
        shares = np.zeros(rows.shape, dtype=self.layout.dtype)
        used = drawn.rows.shape[2]
        rows[:, :, :used] = drawn.rows.transpose(1, 0, 2)
        shares[:, :, :used] = (drawn.real / drawn.counts[..., None]).transpose(1, 0, 2)
        return rows + self._firsts[clients][:, None, None], shares

    def _check_repeats(self, starts: Sequence[Tensor], position: Position, clients: ClientIndices) -> None:
        """Train some clients again in other branches and beside others; refuse other bits."""
        self._repeats = True  # before the trainings below
        some = slice(None, 3)
        first = self._train(starts[some], position, clients[some])
        again = self._train(starts[some][::-1], position, clients[some][::-1]).flip(0)
        if not torch.allclose(first, again, rtol=0.0, atol=0.0, equal_nan=True):
            self._repeats = False
            raise InputError(
                "the GPU gave other bits when a client's local training was repeated (up to "
                f"{float((first - again).abs().max()):.3g} away), so nothing there can be exact: use device cpu"
            )

    # -- evaluation ----------------------------------------------------------------------------------------------

    def _score(self, model: Tensor, clients: ClientIndices) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the evaluation of each chunk of the clients, valid once a later mark is reached."""
        rows, real, _ = self._chunks(clients)
        hits, losses = self._branches.evaluate(model, rows, real)
        return self._queue.download(hits), self._queue.download(losses)

    def _evaluation(self, found: tuple[NDArray[Any], NDArray[Any]], clients: ClientIndices) -> Evaluation:
        chosen, owners = np.asarray(clients, dtype=np.int64), self._chunks(clients)[2]
        hits, losses = (np.bincount(owners, weights=part, minlength=chosen.size) for part in found)
        return Evaluation(chosen.copy(), self._sizes[chosen], hits.astype(np.int64), losses.astype(np.float64))

    def _chunks(self, clients: ClientIndices) -> tuple[Tensor, Tensor, Array]:
        """Return the rows of the chunks of some clients, whether each row counts, and the place of each chunk's client.

        Rows that do not count repeat the first row of the chunk.
        """
        chosen = np.asarray(clients, dtype=np.int64)
        if self._chunks_of is None or self._chunks_of[0] != chosen.tobytes():
            counts = -(-self._sizes[chosen] // CHUNK)
            owners = np.repeat(np.arange(chosen.size), counts)
            places = (np.arange(owners.size) - np.repeat(np.cumsum(counts) - counts, counts)) * CHUNK
            inside = places[:, None] + np.arange(CHUNK)
            real = inside < self._sizes[chosen][owners][:, None]
            rows = self._firsts[chosen][owners][:, None] + np.where(real, inside, places[:, None])
            with self._queue.here():
                self._chunks_of = chosen.tobytes(), self._queue.upload(rows), self._queue.upload(real), owners
        return self._chunks_of[1:]
