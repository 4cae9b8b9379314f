"""Rounds of any module for many lanes at once (`engines.sim.module_pass`), kernel by kernel.

A lane is one run, or one group of a run. Participants of all lanes are packed side by side, each with its lane's model.
Sums over parameters are float64. A group has the same bits whenever the same lanes run together; in other company
torch may choose other kernels, and models agree to rounding.

Rounds are not captured as graphs, as those of other programs are. Captured rounds of a residual network once ended in
an illegal memory access on an H200. Their graphs shared one memory pool then. A shared pool that is used again after
its last graph was dropped still fails inside torch; a pool for each graph gives the models of uncaptured rounds.
Steps that no graph can replay would have to be recognised first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sifu.engines.sim.embedded_clients import Objective
from sifu.engines.sim.gpu.lane_stream import PackedProgram, ProgramPlan
from sifu.engines.sim.gpu.schedule import Packing, Schedule
from sifu.engines.sim.module_pass import ModulePass


class ModuleProgram(PackedProgram):
    """`samples` (all clients' samples, ...) and their `encoded` targets are what rows of a schedule point into."""

    def __init__(
        self,
        module: ModulePass,
        objective: Objective,
        samples: Tensor,
        encoded: Tensor,
        plan: ProgramPlan,
        size: int,
    ) -> None:
        super().__init__(plan, samples, size)
        self.module, self.objective, self.samples, self.encoded = module, objective, samples, encoded
        self._velocity = torch.zeros_like(self.params)
        self._shares = self._zeros(plan.chunk, self.lanes, self.width, kind=torch.float64)

    def _load_packed(self, schedule: Schedule, packing: Packing, rounds: int) -> None:
        super()._load_packed(schedule, packing, rounds)
        # What each packed slot counts for in each lane's mean; empty slots and those of other lanes for nothing.
        flat = schedule.weights.flatten(1).gather(1, packing.order)
        lane = packing.order // self.slots
        own = lane[:, None, :] == torch.arange(self.lanes, device=self.device)[None, :, None]
        self._shares[:rounds] = torch.where(own, flat[:, None, :], 0.0)

    def run(self, rounds: int) -> None:
        """One by one, uncaptured."""
        self.counter.zero_()
        for _ in range(rounds):
            self._round()

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
        self._end_round(exact, mean, torch.where(places >= 0, away[places.clamp(min=0)], 0.0))

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
            self.training.clip_gradient(gradient, dim=(1,))
            self.training.descend_in_place(self.params, gradient, self._velocity, step)
