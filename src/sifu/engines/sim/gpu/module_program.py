"""Rounds of any module for many lanes at once (`engines.sim.module_pass`), kernel by kernel.

A lane is one run, or one group of a run. Participants of all lanes are packed side by side, each with its lane's model.
Sums over parameters are float64. A group has the same bits whenever the same lanes run together; in other company
torch may choose other kernels, and models agree to rounding.

Rounds are not captured as graphs, as those of other programs are. Captured rounds of a residual network once ended in
an illegal memory access on an H200. Their graphs shared one memory pool then. A shared pool that is used again after
its last graph was dropped still fails inside torch; a pool for each graph gives the models of uncaptured rounds
(`benchmarks/gpu_module_capture.py`). Steps that no graph can replay would have to be recognised first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sifu.engines.sim.embedded_clients import Objective
from sifu.engines.sim.gpu.lane_stream import end_round
from sifu.engines.sim.gpu.schedule import Packing, Schedule
from sifu.engines.sim.local_training import LocalTraining
from sifu.engines.sim.module_pass import ModulePass


class ModuleProgram:
    """`lanes` lanes of at most `slots` clients each, `width` of them at a time, at most `chunk` rounds ahead.

    `samples` (all clients' samples, ...) and their `encoded` targets are what rows of a schedule point into.
    """

    whole_lanes = False

    def __init__(
        self,
        module: ModulePass,
        objective: Objective,
        samples: Tensor,
        encoded: Tensor,
        training: LocalTraining,
        *,
        size: int,
        lanes: int,
        slots: int,
        batch: int,
        chunk: int,
        width: int,
        server_rate: float = 1.0,
    ) -> None:
        self.module, self.objective, self.training, self.server_rate = module, objective, training, server_rate
        self.samples, self.encoded = samples, encoded
        self.lanes, self.slots, self.width = lanes, slots, width
        self.device, dtype = samples.device, samples.dtype

        def make(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=self.device)

        self.history = make(chunk + 1, lanes, size)
        self.origins = make(lanes, size, kind=torch.float64)
        self.params, self._velocity = make(width, size), make(width, size)
        self.counter = make(1, kind=torch.int64)
        self.measured = make(chunk, lanes, slots + 3, kind=torch.float64)
        self.clip, self.noise = make(lanes, kind=torch.float64), make(lanes, kind=torch.float64)
        self.noise_seeds = make(chunk, lanes * slots, kind=torch.int64)
        self._rows = torch.full((chunk, training.steps, width, batch), -1, dtype=torch.int32, device=self.device)
        self._order = make(chunk, width, kind=torch.int64)
        self._places = torch.full((chunk, lanes, slots), -1, device=self.device)
        self._shares = make(chunk, lanes, width, kind=torch.float64)

    def load(self, schedule: Schedule) -> None:
        """Take over the schedule of the next rounds."""
        rounds, packing = schedule.rows.shape[0], Packing.of(schedule.participants, self.width)
        self._order[:rounds], self._places[:rounds] = packing.order, packing.places
        self._rows[:rounds] = packing.rows(schedule)
        # What each packed slot counts for in each lane's mean; empty slots and those of other lanes for nothing.
        flat = schedule.weights.flatten(1).gather(1, packing.order)
        lane = packing.order // self.slots
        own = lane[:, None, :] == torch.arange(self.lanes, device=self.device)[None, :, None]
        self._shares[:rounds] = torch.where(own, flat[:, None, :], 0.0)

    def run(self, rounds: int) -> None:
        """`rounds` rounds from history[0]; afterwards history[k] is the model after k of them."""
        self.counter.zero_()
        for _ in range(rounds):
            self._round()

    def local_steps(self, steps: int) -> None:
        """Only the local steps of round 0 of the schedule: `params` holds the local models afterwards."""
        self.counter.zero_()
        self._local_steps(steps)

    def local_models(self, at: int, lane: int) -> Tensor:
        """The local models (slots, size) of a lane after round `at`, if it was the last; empty slots hold anything."""
        return self.params[self._places[at, lane].clamp(min=0)]

    def evaluate(
        self, models: Tensor, rows: Tensor, firsts: Sequence[int], upload: object = None
    ) -> tuple[Tensor, Tensor]:
        """Whether each of `rows` (lanes, samples) is classified rightly by its lane's model, and its loss."""
        real, chosen = rows >= 0, rows.clamp(min=0)
        scores = self.module.scores(models, self.samples[chosen])
        targets = self.encoded[chosen]
        hits = self.objective.hits(scores, targets) & real
        return hits.to(torch.int32), torch.where(real, self.objective.row_loss(scores, targets), 0.0)

    def _round(self) -> None:
        now = self.counter
        self._local_steps(self.training.steps)
        exact = self.history.index_select(0, now)[0].to(torch.float64)
        shares = self._shares.index_select(0, now)[0]
        local = self.params.to(torch.float64)
        mean = torch.where(shares.sum(dim=1, keepdim=True) > 0.0, shares @ local, exact)
        lane = self._order.index_select(0, now)[0] // self.slots
        away = torch.linalg.vector_norm(local.sub_(mean[lane]), dim=1)
        places = self._places.index_select(0, now)[0]
        end_round(
            self.history,
            self.measured,
            now,
            start=exact,
            mean=mean,
            drifts=torch.where(places >= 0, away[places.clamp(min=0)], 0.0),
            origins=self.origins,
            server_rate=self.server_rate,
        )

    def _local_steps(self, steps: int) -> None:
        """Hand the models out and train them by the schedule of the round that `counter` names."""
        theta = self.history.index_select(0, self.counter)[0]
        rows_of_steps = self._rows.index_select(0, self.counter)[0]
        self.params.copy_(theta[self._order.index_select(0, self.counter)[0] // self.slots])
        for step in range(steps):
            rows = rows_of_steps[step]
            real = (rows >= 0).to(self.params.dtype)
            shares = real / real.sum(dim=1, keepdim=True).clamp(min=1.0)
            chosen = rows.clamp(min=0)
            gradient = self.module.gradients(self.params, self.samples[chosen], self.encoded[chosen], shares)
            if self.training.clip:
                norms = torch.linalg.vector_norm(gradient, dim=1, dtype=torch.float64)
                gradient.mul_(self.training.clip_factor(norms).to(gradient.dtype)[:, None])
            self.training.descend_in_place(self.params, gradient, self._velocity, step)
