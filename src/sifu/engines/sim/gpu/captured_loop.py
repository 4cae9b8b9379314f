"""Plain loop on one device, for networks too large to be mapped over models; samples and models stay on the device.

Samples are copied to the device once, a client's step is one captured graph, and the means of groups are computed on
the device. A step with a small batch leaves most of a GPU idle, so clients are distributed over a few lanes: copies of
the network, each with its own queue. On a CPU, or if capture fails, the same steps run without a graph.

A client's model depends only on its own samples, the starting model and the plan. Batches are padded with the client's
own samples, with weight zero, to the plan's batch size (whole data: to a multiple of `FILLED`). Means are summed in
the order of clients, regardless of their lanes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor, nn

from sifu.core.engine import Position
from sifu.core.layout import Vector
from sifu.data.fresh_modules import fixed_algorithms, fixed_generators, fresh_copy
from sifu.engines.sim.embedded_clients import CheckedClient, Objective
from sifu.engines.sim.gpu.device_queue import DeviceQueue, capture
from sifu.engines.sim.gpu.module_program import products_in
from sifu.engines.sim.local_training import LocalTraining, TrainingPlan
from sifu.engines.sim.models import ModuleModel
from sifu.engines.sim.plain_loop import LoopTrainer, refuse_another_result
from sifu.errors import InputError
from sifu.theory.arrays import Array, Integers
from sifu.theory.participation import ClientIndices

LANES = 3
"""Maximum number of clients that train concurrently; more were no faster on an H200."""
PRECISIONS = ("float32", "tf32", "bfloat16")
FILLED = 32
"""Multiple to which batches of a client's whole data are padded, because a graph has a fixed batch size."""
MOST_GRAPHS = 8
"""Maximum number of batch sizes that a lane captures; others run without a graph."""
DRAWN = 4
"""Number of artificial samples, which are used for warm-up steps and captures."""
WARM_UPS = 3
"""Number of steps before a capture, in which libraries select and load their kernels."""
SAME_STEP = 1e-2
"""Tolerance between a replayed step and the same step without a graph, relative to the largest change."""
RESULT_BYTES = 2**32
"""Maximum size of local models kept on the device until they are summed."""


class CapturedLoop(LoopTrainer):
    """Variant of `LoopTrainer` whose samples and models stay on a device.

    `why_uncaptured` is the reason why steps run without graphs; it is empty if graphs are replayed, and None before the
    first training. Until then, this process computes no gradients and can still be forked (`sifu.data.forked`).
    """

    forks = False

    def __init__(
        self,
        model: ModuleModel,
        clients: Sequence[CheckedClient],
        plan: TrainingPlan,
        device: str,
        precision: str = "float32",
        lanes: int = LANES,
    ) -> None:
        if precision not in PRECISIONS:
            raise InputError(f"a network is tuned in {', '.join(PRECISIONS)} on a GPU, found precision {precision!r}")
        self._precision, self._objective = precision, model.objective
        self._lanes: list[_Lane] = []
        super().__init__(model, clients, plan, device)
        self._queue = DeviceQueue(self._device)
        self._sizes, self._firsts = plan.samples, np.cumsum(plan.samples) - plan.samples
        self._encoded = model.objective.encode(self._targets, self._score_width, self._samples.dtype)
        self.why_uncaptured: str | None = None
        self._lane_count, size = lanes, sum(parameter.numel() for parameter in self._pristine.parameters())
        rows = max(lanes, RESULT_BYTES // (size * self._samples.element_size()))
        self._results = torch.zeros((min(rows, len(self._sizes)), size), dtype=self._samples.dtype, device=self._device)
        self._queue.synchronize()

    def _put_samples(self, clients: Sequence[CheckedClient]) -> list[tuple[Tensor, Tensor]]:
        """Copy all samples and targets to the device and return views of each client's part.

        `DRAWN` artificial samples follow them: warm-ups use these, because any state that a module keeps from a warm-up
        is part of every replay of the graph. Their values are 0 and 1, which are also ids of tokens.
        """
        sizes = [client.samples for client in clients]
        drawn = np.random.default_rng(0).integers(0, 2, (DRAWN, *clients[0].x.shape[1:])).astype(clients[0].x.dtype)
        none = np.zeros((DRAWN, *clients[0].y.shape[1:]), dtype=clients[0].y.dtype)
        samples, targets = [client.x for client in clients], [client.y for client in clients]
        self._samples = torch.from_numpy(np.concatenate([*samples, drawn])).to(self._device)
        self._targets = torch.from_numpy(np.concatenate([*targets, none])).to(self._device)
        parts = torch.split(self._samples, [*sizes, DRAWN]), torch.split(self._targets, [*sizes, DRAWN])
        return list(zip(*parts, strict=True))[:-1]

    def _first_batch(self) -> tuple[Tensor, Tensor]:
        """Return a batch of the size that training steps use, because libraries compile kernels for each size."""
        x, y = self._data[0]
        rows = torch.arange(self._training.batch_size or FILLED, device=self._device) % min(2, len(x))
        return x[rows], y[rows]

    @property
    def largest_sample(self) -> float:
        """Largest absolute value in all samples."""
        return float(self._samples[:-DRAWN].abs().max())

    def on_device(self, model: Vector) -> Tensor:
        """Return a copy of a model on the device."""
        with self._queue.here():
            return self._queue.upload(model)

    def to_host(self, vector: Tensor) -> Vector:
        """Return a copy of a model on the host."""
        with self._queue.here():
            model: Vector = vector.cpu().numpy().copy()
        return model

    def means(
        self, starts: Sequence[Tensor], position: Position, groups: Sequence[ClientIndices]
    ) -> tuple[list[Tensor], bool]:
        """Train each group for one round and return the mean models, and whether all values are finite."""
        jobs = [(group, int(client)) for group, members in enumerate(groups) for client in members]
        with self._queue.here():
            sums = [torch.zeros(start.numel(), dtype=torch.float64, device=self._device) for start in starts]
        begun, first = [(starts[group], client) for group, client in jobs], None
        self.check_repeats(np.array([client for _, client in jobs]))
        for places in self._train_together(begun, position, self._training.steps):
            first = self._copied(0) if first is None else first
            with self._queue.here():
                for row, place in enumerate(places):
                    group, client = jobs[place]
                    share = self._sizes[client] / self._sizes[groups[group]].sum()
                    sums[group].add_(self._results[row], alpha=float(share))
        with self._queue.here():
            means = [total.to(start.dtype) for total, start in zip(sums, starts, strict=True)]
            finite = bool(torch.stack([torch.isfinite(mean).all() for mean in means]).all())
        if first is not None:
            self._repeat_in_every_lane(first, begun[0], position, self._training.steps)
        return means, finite

    def _repeat_in_every_lane(self, first: Tensor, job: tuple[Tensor, int], position: Position, steps: int) -> None:
        """Repeat a job with result `first`, and the first compared client, in every lane; refuse different results."""
        compared = next(iter(self._compared))
        start, at = self.on_device(self._compared_from()), Position(0, 0)
        for expected, again, place, count in (
            (first, job, position, steps),
            (self._compared[compared], (start, compared), at, self._training.steps),
        ):
            for places in self._train_together([again] * max(1, len(self._lanes)), place, count):
                self._queue.synchronize()
                for row in range(len(places)):
                    refuse_another_result(expected, self._results[row])

    def _train_client(
        self, start: Vector, position: Position, client: int, steps: int, data: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Return the client's model; `data` must be None, because steps read only the samples stored on the device."""
        (_,) = self._train_together([(self.on_device(start), client)], position, steps)
        result = self._copied(0)
        self._queue.synchronize()
        return result

    def _copied(self, row: int) -> Tensor:
        """Return a copy of a result; lanes wait for the queue, so they overwrite the result only after the copy."""
        with self._queue.here():
            return self._results[row].clone()

    def _train_on_other_labels(self, client: int) -> None:
        """Train on the artificial samples in every lane; `client` is ignored."""
        start = self.on_device(self._compared_from())
        for lane in self._lanes:
            lane.queue.after(self._queue)
            with fixed_generators(0, self._device), lane.queue.here(), self._settings():
                lane.train_on_drawn(start, self._training.batch_size or FILLED, captured=not self.why_uncaptured)
            self._queue.after(lane.queue)

    def _train_together(self, jobs: Sequence[tuple[Tensor, int]], position: Position, steps: int) -> Iterator[range]:
        """Train jobs and yield their positions, as many at a time as fit into `_results`.

        A job is a starting model and a client. Its model is a row of `_results` once the queue has been processed.
        """
        for first in range(0, len(jobs), len(self._results)):
            places = range(first, min(first + len(self._results), len(jobs)))
            self._make_lanes(len(places))
            for lane in self._lanes:
                lane.queue.after(self._queue)
            for row, place in enumerate(places):
                lane, (start, client) = self._lanes[row % len(self._lanes)], jobs[place]
                batches = self._filled(client, self._plan.batches(position, client, steps))
                with self._keyed(position, client), lane.queue.here(), self._settings():
                    chosen, shares = map(lane.queue.upload, batches)
                    lane.train(start, chosen, shares, self._results[row], captured=not self.why_uncaptured)
            for lane in self._lanes:
                self._queue.after(lane.queue)
            self._wait()
            yield places

    def _filled(self, client: int, batches: Sequence[Integers]) -> tuple[Integers, Array]:
        """Return the sample rows and weights of each step; padding repeats the client's first sample with weight 0."""
        most = max(len(batch) for batch in batches)
        width = self._training.batch_size or -(-most // FILLED) * FILLED
        chosen = np.full((len(batches), width), self._firsts[client], dtype=np.int64)
        shares = np.zeros((len(batches), width), dtype=str(self._samples.dtype).removeprefix("torch."))
        for step, batch in enumerate(batches):
            chosen[step, : len(batch)] += batch
            shares[step, : len(batch)] = 1.0 / len(batch)
        return chosen, shares

    def _make_lanes(self, count: int) -> None:
        """Make up to `count` lanes while half of the device's memory is free, as a graph never releases its memory."""
        width = self._training.batch_size
        if self.why_uncaptured is None:
            self.why_uncaptured = self._why_never_captured()
        while len(self._lanes) < min(count, self._lane_count):
            if self._device.type == "cuda" and self._lanes:
                free, whole = torch.cuda.mem_get_info(self._device)
                if free < whole // 2:
                    self._lane_count = len(self._lanes)
                    return
            self._queue.synchronize()
            with self._settings():
                lane = _Lane(self._pristine, self._samples, self._encoded, self._objective, self._training)
                if width is not None and not self.why_uncaptured:
                    self.why_uncaptured = lane.capture(width)
            self._wait()  # the lane was made in torch's default stream
            self._lanes.append(lane)

    def _wait(self) -> None:
        """Wait for all work on the device; without this, graphs gave wrong results on a device shared by processes."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _why_never_captured(self) -> str:
        """Return why the module's steps cannot be captured, or "" if no reason is known before the first capture."""
        if self._device.type != "cuda":
            return "graphs are for GPUs"
        start, results = self.on_device(self._compared_from()), []
        self._queue.synchronize()
        for seed in (0, 1):
            lane = _Lane(self._pristine, self._samples, self._encoded, self._objective, self._training)
            with fixed_generators(seed, self._device), self._settings():
                lane.train_on_drawn(start, self._training.batch_size or FILLED, captured=False)
            results.append(lane.flat)
        torch.cuda.synchronize(self._device)
        return "" if torch.equal(*results) else "the network draws at random"

    @contextmanager
    def _settings(self) -> Iterator[None]:
        """Set the precision of products, and select algorithms that give the same bits every time."""
        rough = self._precision == "bfloat16"
        # Do not cache casts of weights: a graph would replay the products without the casts.
        cast = torch.autocast(self._device.type, torch.bfloat16, cache_enabled=False) if rough else nullcontext()
        with fixed_algorithms(), products_in(self._precision), cast:
            yield

    @contextmanager
    def _keyed(self, position: Position, client: int) -> Iterator[None]:
        """Seed all generators by position and client if steps run without graphs and may draw random numbers."""
        if not self.why_uncaptured:
            yield
            return
        with fixed_generators(self._plan.layer_seed(position, client), self._device):
            yield


class _Copy:
    """Fresh copy of a network whose parameters are views of a flat vector."""

    def __init__(self, pristine: nn.Module, flat: Tensor) -> None:
        self.network = fresh_copy(pristine).train()
        self.parameters = list(self.network.parameters())
        sizes = [parameter.numel() for parameter in self.parameters]
        for parameter, part in zip(self.parameters, torch.split(flat, sizes), strict=True):
            parameter.data = part.view(parameter.shape)


class _Lane:
    """Network that trains one client at a time: the copy used by the graphs, or without graphs one copy per client."""

    def __init__(
        self,
        pristine: nn.Module,
        samples: Tensor,
        encoded: Tensor,
        objective: Objective,
        training: LocalTraining,
    ) -> None:
        self._pristine = pristine
        self._samples, self._encoded, self._objective, self._training = samples, encoded, objective, training
        self.flat = torch.cat([parameter.detach().reshape(-1) for parameter in pristine.parameters()])
        self._velocity = torch.zeros_like(self.flat)
        self._in_graphs = _Copy(pristine, self.flat)
        self._batches: dict[int, tuple[Tensor, Tensor]] = {}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.queue = DeviceQueue(samples.device)

    def train(self, start: Tensor, chosen: Tensor, shares: Tensor, result: Tensor, *, captured: bool) -> None:
        """Take one step for each row of `chosen` from `start` and write the model into `result`.

        Call this inside the lane's queue.
        """
        width = chosen.shape[1]
        if captured and width not in self._graphs and len(self._graphs) < MOST_GRAPHS:
            self.queue.synchronize()
            self.capture(width)
        graph = self._graphs.get(width) if captured else None
        self._begin(start)
        own_chosen, own_shares = self._batch(width)
        own = self._in_graphs if graph is not None else _Copy(self._pristine, self.flat)
        for rows, weights in zip(chosen, shares, strict=True):
            own_chosen.copy_(rows)
            own_shares.copy_(weights)
            if graph is not None:
                graph.replay()
            else:
                self._step(own, own_chosen, own_shares)
        result.copy_(self.flat)

    def train_on_drawn(self, start: Tensor, width: int, *, captured: bool) -> None:
        """Take two steps on the artificial samples; call this inside the lane's queue."""
        chosen, shares = self._batch(width)
        self._choose_drawn(chosen, shares)
        self.train(
            start, chosen.clone().expand(2, -1), shares.clone().expand(2, -1), self.flat.clone(), captured=captured
        )

    def _choose_drawn(self, chosen: Tensor, shares: Tensor) -> None:
        chosen.copy_(len(self._samples) - 1 - torch.arange(len(chosen), device=chosen.device) % DRAWN)
        shares.fill_(1.0 / len(chosen))

    def capture(self, width: int) -> str:
        """Capture the graph of a step with batches of this width; return the reason if it fails, or an empty string."""
        if width in self._graphs:
            return ""
        chosen, shares = self._batch(width)
        self._choose_drawn(chosen, shares)
        begun, own = self.flat.clone(), self._in_graphs

        def warm_up() -> None:
            for _ in range(WARM_UPS):
                self._step(own, chosen, shares)

        torch.cuda.synchronize(self.flat.device)
        try:
            with fixed_generators(0, self.flat.device):
                graph = capture(self.flat.device, lambda: self._step(own, chosen, shares), warm_up)
            moves = []
            for step in (graph.replay, lambda: self._step(_Copy(self._pristine, self.flat), chosen, shares)):
                self._begin(begun)
                step()
                moves.append(self.flat - begun)
            torch.cuda.synchronize(self.flat.device)
        except RuntimeError as error:
            return str(error).splitlines()[0]
        finally:
            self._begin(begun)
        away = float((moves[0] - moves[1]).abs().max() / moves[1].abs().max().clamp(min=1e-30))
        if not away <= SAME_STEP:
            return f"a replayed step is {away:.2g} off the same step of a fresh copy without a graph"
        self._graphs[width] = graph
        return ""

    def _begin(self, start: Tensor) -> None:
        self.flat.copy_(start)
        self._velocity.zero_()
        for buffer, first in zip(self._in_graphs.network.buffers(), self._pristine.buffers(), strict=True):
            buffer.copy_(first)

    def _batch(self, width: int) -> tuple[Tensor, Tensor]:
        """Return the buffers from which a step reads its rows and their weights."""
        if width not in self._batches:
            chosen = torch.zeros(width, dtype=torch.int64, device=self.flat.device)
            self._batches[width] = chosen, torch.zeros(width, dtype=self.flat.dtype, device=self.flat.device)
        return self._batches[width]

    def _step(self, own: _Copy, chosen: Tensor, shares: Tensor) -> None:
        samples = self._samples.index_select(0, chosen)
        if samples.is_cuda and samples.ndim == 4:  # convolutions are up to twice as fast with channels last
            samples = samples.contiguous(memory_format=torch.channels_last)
        scores = own.network(samples).flatten(1).to(self.flat.dtype)
        losses = self._objective.row_loss(scores, self._encoded.index_select(0, chosen))
        parts = torch.autograd.grad((losses * shares).sum(), own.parameters, allow_unused=True, materialize_grads=True)
        gradient = torch.cat([part.reshape(-1) for part in parts])
        self._training.clip_gradient(gradient)
        with torch.no_grad():
            self._training.descend_in_place(self.flat, gradient, self._velocity, step=1)
