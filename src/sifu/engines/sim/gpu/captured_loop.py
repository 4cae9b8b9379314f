"""The plain loop on one device, for networks too large to be mapped over models: everything stays there.

Samples are put on the device once, a client's step is one captured graph, and means of groups are made where the models
are. A step of a small batch leaves most of a GPU idle, so clients take turns in a few lanes: copies of the network,
each with its own queue. On a CPU, and where capture fails, the same steps run one by one.

What becomes of a client's model follows from its own samples, from the model it begins with and from the plan: batches
are filled up with its own samples, which count for nothing, to the plan's batch size (whole data: to a multiple of
`FILLED`), and means are added up in the order of clients, whatever lane they had.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from sifu.core.engine import Position
from sifu.core.layout import Vector
from sifu.engines.sim.embedded_clients import CheckedClient, Objective
from sifu.engines.sim.gpu.device_queue import DeviceQueue, capture
from sifu.engines.sim.gpu.module_program import products_in
from sifu.engines.sim.local_training import LocalTraining, TrainingPlan
from sifu.engines.sim.models import ModuleModel
from sifu.engines.sim.plain_loop import PROBED_APART, LoopTrainer, refuse_other_outputs
from sifu.errors import InputError
from sifu.theory.arrays import Array, Integers
from sifu.theory.participation import ClientIndices

LANES = 3
"""Clients at work at the same time, where memory allows; more were no faster on an H200."""
PRECISIONS = ("float32", "tf32", "bfloat16")
FILLED = 32
"""Whole data are filled up to a multiple of this: a graph has one size of batch."""
MOST_GRAPHS = 8
"""Sizes of batches that a lane captures; others run uncaptured."""
WARM_UPS = 3
"""Steps before a capture, in which libraries choose and load what they need."""
SAME_STEP = 1e-2
"""A replayed step moves parameters as a step does that runs one by one, relative to the largest move."""
RESULT_BYTES = 2**32
"""Of local models that wait on the device to be added up."""


class CapturedLoop(LoopTrainer):
    """A `LoopTrainer` whose samples and models stay on a device.

    `why_uncaptured` says why steps run one by one; it is empty where graphs are replayed.
    """

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
        with torch.no_grad():
            width = self._module(self._samples[:1]).shape[1]
        self._encoded = model.objective.encode(self._targets, width, self._samples.dtype)
        self.why_uncaptured = self._why_never_captured()
        self._lane_count, size = lanes, sum(parameter.numel() for parameter in self._module.parameters())
        rows = max(lanes, RESULT_BYTES // (size * self._samples.element_size()))
        self._results = torch.zeros((min(rows, len(self._sizes)), size), dtype=self._samples.dtype, device=self._device)
        self._queue.synchronize()

    def _put_samples(self, clients: Sequence[CheckedClient]) -> list[tuple[Tensor, Tensor]]:
        """Views of all samples and of all targets, which lie on the device one client after the other."""
        sizes = [client.samples for client in clients]
        self._samples = torch.cat([torch.tensor(client.x) for client in clients]).to(self._device)
        self._targets = torch.cat([torch.tensor(client.y) for client in clients]).to(self._device)
        return list(zip(torch.split(self._samples, sizes), torch.split(self._targets, sizes), strict=True))

    def train(
        self, start: Vector, position: Position, participants: ClientIndices, steps: int
    ) -> Iterator[tuple[slice, Tensor]]:
        """The local models after `steps` steps, client by client."""
        vector = self.on_device(start)
        for places in self._train_together([(vector, int(client)) for client in participants], position, steps):
            self._queue.synchronize()
            for row, place in enumerate(places):
                yield slice(place, place + 1), self._results[row : row + 1].cpu()
        self._check_memory()

    @property
    def largest_sample(self) -> float:
        """The largest number in all samples, without its sign."""
        return float(self._samples.abs().max())

    def on_device(self, model: Vector) -> Tensor:
        """A copy of a model on the device."""
        with self._queue.here():
            return self._queue.upload(model)

    def to_host(self, vector: Tensor) -> Vector:
        """A copy of a model from the device."""
        with self._queue.here():
            model: Vector = vector.cpu().numpy().copy()
        return model

    def means(
        self, starts: Sequence[Tensor], position: Position, groups: Sequence[ClientIndices]
    ) -> tuple[list[Tensor], bool]:
        """The mean model of each group after a round from its own model, and whether all numbers are finite."""
        jobs = [(group, int(client)) for group, members in enumerate(groups) for client in members]
        with self._queue.here():
            sums = [torch.zeros(start.numel(), dtype=torch.float64, device=self._device) for start in starts]
        begun = [(starts[group], client) for group, client in jobs]
        for places in self._train_together(begun, position, self._training.steps):
            with self._queue.here():
                for row, place in enumerate(places):
                    group, client = jobs[place]
                    share = self._sizes[client] / self._sizes[groups[group]].sum()
                    sums[group].add_(self._results[row], alpha=float(share))
        with self._queue.here():
            means = [total.to(start.dtype) for total, start in zip(sums, starts, strict=True)]
            finite = bool(torch.stack([torch.isfinite(mean).all() for mean in means]).all())
        self._check_memory()
        return means, finite

    def _train_together(self, jobs: Sequence[tuple[Tensor, int]], position: Position, steps: int) -> Iterator[range]:
        """Places of `jobs`, each the model to begin with and the client, as many as there is room for.

        Their models are rows of `_results` once the queue has got so far.
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
            yield places

    def _filled(self, client: int, batches: Sequence[Integers]) -> tuple[Integers, Array]:
        """Rows of all samples for each step, and what each counts for: the last ones are the client's first, for 0."""
        most = max(len(batch) for batch in batches)
        width = self._training.batch_size or -(-most // FILLED) * FILLED
        chosen = np.full((len(batches), width), self._firsts[client], dtype=np.int64)
        shares = np.zeros((len(batches), width), dtype=str(self._samples.dtype).removeprefix("torch."))
        for step, batch in enumerate(batches):
            chosen[step, : len(batch)] += batch
            shares[step, : len(batch)] = 1.0 / len(batch)
        return chosen, shares

    def _make_lanes(self, count: int) -> None:
        """More lanes, as long as half of the device's memory is free: a graph keeps what its step needs for good."""
        width = self._training.batch_size
        while len(self._lanes) < min(count, self._lane_count):
            if self._device.type == "cuda" and self._lanes:
                free, whole = torch.cuda.mem_get_info(self._device)
                if free < whole // 2:
                    self._lane_count = len(self._lanes)
                    return
            self._queue.synchronize()
            with self._settings():
                lane = _Lane(self._module, self._samples, self._encoded, self._objective, self._training)
                if width is not None and not self.why_uncaptured:
                    self.why_uncaptured = lane.capture(width)
            self._lanes.append(lane)

    def _check_memory(self) -> None:
        """As the plain loop does it, for each lane's copy of the module, to the bit: anything looser hides a memory."""
        for lane in self._lanes:
            with self._settings(), lane.queue.here():
                refuse_other_outputs(lane.first_probe, lane.probe())

    def _why_never_captured(self) -> str:
        """Why no graph can do the module's steps, as far as it can be seen without trying."""
        if self._device.type != "cuda":
            return "graphs are for GPUs"
        self._module.train()
        with torch.no_grad(), torch.random.fork_rng(devices=[self._device]):
            outputs = []
            for seed in (0, 1):
                torch.manual_seed(seed)
                outputs.append(self._module(self._samples[:2]))
        return "" if torch.equal(*outputs) else "the network draws at random"

    @contextmanager
    def _settings(self) -> Iterator[None]:
        """Products of the precision, by algorithms that give the same bits every time."""
        before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        rough = self._precision == "bfloat16"
        # Casts of weights are not kept: a graph would replay the products and not the casts.
        cast = torch.autocast(self._device.type, torch.bfloat16, cache_enabled=False) if rough else nullcontext()
        try:
            with products_in(self._precision), cast:
                yield
        finally:
            torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before

    @contextmanager
    def _keyed(self, position: Position, client: int) -> Iterator[None]:
        """torch's generators keyed by the place, where steps run one by one and may draw."""
        if not self.why_uncaptured:
            yield
            return
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            torch.manual_seed(self._plan.layer_seed(position, client))
            yield


class _Lane:
    """A copy of a network at work on one client: its parameters are one flat vector."""

    def __init__(
        self,
        network: nn.Module,
        samples: Tensor,
        encoded: Tensor,
        objective: Objective,
        training: LocalTraining,
    ) -> None:
        self._network = copy.deepcopy(network).train()
        self._samples, self._encoded, self._objective, self._training = samples, encoded, objective, training
        self._parameters = list(self._network.parameters())
        self.flat = parameters_to_vector(self._parameters).detach().clone()
        self._velocity = torch.zeros_like(self.flat)
        sizes = [parameter.numel() for parameter in self._parameters]
        for parameter, part in zip(self._parameters, torch.split(self.flat, sizes), strict=True):
            parameter.data = part.view(parameter.shape)
        self._buffers = list(self._network.buffers())
        self._first_buffers = [buffer.clone() for buffer in self._buffers]
        self._batches: dict[int, tuple[Tensor, Tensor]] = {}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.queue = DeviceQueue(samples.device)
        self._probed_with = self.flat + PROBED_APART
        self.first_probe = self.probe()

    def train(self, start: Tensor, chosen: Tensor, shares: Tensor, result: Tensor, *, captured: bool) -> None:
        """A client's steps from `start`, one for each row of `chosen`, into `result`; call inside the lane's queue."""
        self._begin(start)
        width = chosen.shape[1]
        graph = self._graphs.get(width)
        if graph is None and captured and len(self._graphs) < MOST_GRAPHS:
            self.queue.synchronize()
            self.capture(width)
            graph = self._graphs.get(width)
            self._begin(start)
        own_chosen, own_shares = self._batch(width)
        for rows, weights in zip(chosen, shares, strict=True):
            own_chosen.copy_(rows)
            own_shares.copy_(weights)
            if graph is not None:
                graph.replay()
            else:
                self._step(own_chosen, own_shares)
        result.copy_(self.flat)

    def capture(self, width: int) -> str:
        """Make the graph of a step with batches of a width; else say why there is none, and go on without."""
        if width in self._graphs:
            return ""
        chosen, shares = self._batch(width)
        chosen.copy_(torch.arange(width, device=chosen.device) % len(self._samples))
        shares.fill_(1.0 / width)
        begun = self.flat.clone()

        def warm_up() -> None:
            for _ in range(WARM_UPS):
                self._step(chosen, shares)

        torch.cuda.synchronize(self.flat.device)
        try:
            graph = capture(self.flat.device, lambda: self._step(chosen, shares), warm_up)
            moves = []
            for step in (graph.replay, lambda: self._step(chosen, shares)):
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
            return f"a replayed step is {away:.2g} off the same step run without a graph"
        self._graphs[width] = graph
        return ""

    def probe(self) -> Tensor:
        """Outputs of two samples in training, near the parameters the network was made with."""
        self._begin(self._probed_with)
        with torch.no_grad(), torch.random.fork_rng(devices=[self.flat.device] if self.flat.is_cuda else []):
            torch.manual_seed(0)
            outputs: Tensor = self._network(self._samples[:2]).flatten()
        return outputs

    def _begin(self, start: Tensor) -> None:
        self.flat.copy_(start)
        self._velocity.zero_()
        for buffer, first in zip(self._buffers, self._first_buffers, strict=True):
            buffer.copy_(first)

    def _batch(self, width: int) -> tuple[Tensor, Tensor]:
        """Where a step finds its rows and what they count for."""
        if width not in self._batches:
            chosen = torch.zeros(width, dtype=torch.int64, device=self.flat.device)
            self._batches[width] = chosen, torch.zeros(width, dtype=self.flat.dtype, device=self.flat.device)
        return self._batches[width]

    def _step(self, chosen: Tensor, shares: Tensor) -> None:
        samples = self._samples.index_select(0, chosen)
        if samples.is_cuda and samples.ndim == 4:  # convolutions are up to twice as fast with channels last
            samples = samples.contiguous(memory_format=torch.channels_last)
        scores = self._network(samples).flatten(1).to(self.flat.dtype)
        losses = self._objective.row_loss(scores, self._encoded.index_select(0, chosen))
        parts = torch.autograd.grad(
            (losses * shares).sum(), self._parameters, allow_unused=True, materialize_grads=True
        )
        gradient = torch.cat([part.reshape(-1) for part in parts])
        self._training.clip_gradient(gradient)
        with torch.no_grad():
            self._training.descend_in_place(self.flat, gradient, self._velocity, step=1)
