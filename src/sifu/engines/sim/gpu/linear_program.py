"""Rounds of a linear model for many lanes at once, in float64 or float32, in captured graphs (`CapturedRounds`).

The arithmetic is the same as in `engines.sim.linear`: steps in sample space if clients have few samples (W_k = a_k W_0
+ X'V_k, so a step needs only G = XX'), otherwise steps in feature space. The local models are always computed and
measured directly, because on a GPU their memory costs less than computing drifts without them.
The bounds of `engines.sim.float_rounding` hold for any order of summation. As in `engines.sim.linear`, clipped steps in
float64 are taken in feature space only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sifu.engines.sim.gpu.lane_stream import Program, ProgramPlan
from sifu.engines.sim.gpu.schedule import Schedule
from sifu.engines.sim.linear import cheaper_between_samples, descend_between_features
from sifu.engines.sim.local_training import LocalTraining
from sifu.engines.sim.models import LinearModel


class LinearProgram(Program):
    """Program that trains a linear model.

    `samples` (clients of all lanes, rows, features + 1) and `targets` are padded with zero rows. A row of the schedule
    is client * rows + position. `everyone` is True if the participants of a lane do not change within a chunk. Slots
    are not packed: they are in the order of their lanes.
    """

    whole_lanes = True

    def __init__(
        self,
        model: LinearModel,
        samples: Tensor,
        targets: Tensor,
        plan: ProgramPlan,
        *,
        clients_a_lane: int,
        gram: Tensor | None,
        everyone: bool,
    ) -> None:
        rows, self._shape = samples.shape[1], (samples.shape[2], targets.shape[2])
        width, chunk = plan.lanes * plan.slots, plan.chunk
        super().__init__(replace(plan, width=width), samples, math.prod(self._shape))
        self.objective, self.everyone = model.objective, everyone
        self.samples, self.targets, self.gram = samples, targets, gram
        self._lane_rows = clients_a_lane * rows
        self._separate_steps = 1 if plan.batch >= rows else plan.training.steps
        self._clients = self._zeros(chunk, width, kind=torch.int64)
        self._order.copy_(torch.arange(width, device=self.device))
        stays = everyone and self._separate_steps == 1
        self._row_weights = self._zeros(1 if stays else chunk, self._separate_steps, width, rows)
        self._taken: tuple[Tensor, Tensor, Tensor | None] | None = None

    @staticmethod
    def gram_of(samples: Tensor, training: LocalTraining) -> Tensor | None:
        """Return XX' of each client, or None if steps in feature space are cheaper or needed for precise norms."""
        _, rows, width = samples.shape
        if training.clip and samples.dtype == torch.float64:
            return None
        return torch.bmm(samples, samples.transpose(1, 2)) if cheaper_between_samples(rows, width, training) else None

    def load(self, schedule: Schedule) -> None:
        """Load the schedule of the next rounds."""
        rounds, rows = schedule.rows.shape[0], self.samples.shape[1]
        self.weights[:rounds] = schedule.weights
        drawn = schedule.rows[:, : self._separate_steps].to(torch.int64)
        self._clients[:rounds] = drawn[:, 0, :, 0].clamp(min=0) // rows
        if self._row_weights.shape[0] == 1:
            drawn = drawn[:1]
        real = drawn >= 0
        shares = real.to(self.samples.dtype) / real.sum(dim=3, keepdim=True).clamp(min=1)
        table = self._row_weights[: drawn.shape[0]]
        table.zero_().scatter_add_(3, drawn.clamp(min=0) % rows, shares)
        if self.everyone:
            self._take(self._clients[0])

    def _take(self, clients: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the data of the slots; with `everyone` the tensors are reused, since a graph holds their addresses."""
        fresh = (
            self.samples.index_select(0, clients),
            self.targets.index_select(0, clients),
            None if self.gram is None else self.gram.index_select(0, clients),
        )
        if not self.everyone:
            return fresh
        if self._taken is None:
            self._taken = fresh
        else:
            for old, new in zip(self._taken, fresh, strict=True):
                if old is not None and new is not None:
                    old.copy_(new)
        return self._taken

    def _round(self) -> None:
        now = self.counter
        theta = self.history.index_select(0, now)[0]
        self._local_steps(self.training.steps)
        if self.clipped:
            self._clip(theta)
        local = self.params.view(self.lanes, self.slots, self.size).to(torch.float64)
        shares = self.weights.index_select(0, now)[0]
        exact = theta.to(torch.float64)
        mean = torch.bmm(shares[:, None, :], local)[:, 0]
        mean = torch.where(shares.sum(dim=1, keepdim=True) > 0.0, mean, exact)
        self._end_round(exact, mean, torch.linalg.vector_norm(local - mean[:, None], dim=2))

    def local_models(self, at: int, lane: int) -> Tensor:
        """Return the local models of a lane, as in `Program.local_models`; the slots of a lane are contiguous."""
        return self.params[lane * self.slots : (lane + 1) * self.slots]

    def _local_steps(self, steps: int) -> None:
        theta = self.history.index_select(0, self.counter)[0]
        if self.everyone and self._taken is not None:
            samples, targets, gram = self._taken
        else:
            samples, targets, gram = self._take(self._clients.index_select(0, self.counter)[0])
        at = torch.zeros_like(self.counter) if self._row_weights.shape[0] == 1 else self.counter
        row_weights = self._row_weights.index_select(0, at)[0][..., None]
        start = theta.view(self.lanes, 1, *self._shape).expand(-1, self.slots, -1, -1).reshape(self.width, *self._shape)
        if gram is None:
            local = self._between_features(samples, targets, row_weights, start, steps)
        else:
            local = self._between_samples(samples, targets, gram, row_weights, start, steps)
        self.params.copy_(local.reshape(self.width, self.size))

    def _between_features(
        self, samples: Tensor, targets: Tensor, row_weights: Tensor, start: Tensor, steps: int
    ) -> Tensor:
        batches = ((samples, targets, row_weights[min(step, self._separate_steps - 1)]) for step in range(steps))
        return descend_between_features(self.objective, self.training, start, batches)

    def _between_samples(
        self, samples: Tensor, targets: Tensor, gram: Tensor, row_weights: Tensor, start: Tensor, steps: int
    ) -> Tensor:
        first = torch.bmm(samples, start)
        share, dual = 1.0, torch.zeros_like(first)
        share_velocity, dual_velocity = None, None
        for step in range(steps):
            shares = row_weights[min(step, self._separate_steps - 1)]
            scores = torch.baddbmm(first, gram, dual, beta=share)
            residual = self.objective.residual(scores, targets).mul_(shares)
            if self.training.clip:
                squares = torch.bmm(gram, residual).mul_(residual).sum(dim=(1, 2), dtype=torch.float64)
                factors = self.training.clip_factor(squares.clamp_min_(0.0).sqrt_())
                residual.mul_(factors.to(residual.dtype)[:, None, None])
            share, share_velocity = self.training.descend(share, 0.0, share_velocity)
            dual, dual_velocity = self.training.descend(dual, residual, dual_velocity)
        return torch.baddbmm(start, samples.transpose(1, 2), dual, beta=share)

    def _clip(self, theta: Tensor) -> None:
        updates = self.params.view(self.lanes, self.slots, self.size) - theta[:, None]
        self._clip_and_noise(torch.linalg.vector_norm(updates.to(torch.float64), dim=2).reshape(-1))

    def evaluate(
        self, models: Tensor, rows: Tensor, firsts: Sequence[int], upload: Callable[[NDArray[Any]], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Evaluate each lane's model on its samples, as in `Program.evaluate`; `rows` cover all clients of a lane."""
        correct = torch.zeros(rows.shape, dtype=torch.int32, device=self.device)
        losses = torch.zeros(rows.shape, dtype=torch.float64, device=self.device)
        start = np.asarray(firsts) // self._lane_rows
        width, outputs = self._shape
        flat, encoded = self.samples.reshape(-1, width), self.targets.reshape(-1, outputs)
        for base in np.unique(start).tolist():
            chosen = upload(np.flatnonzero(start == base))
            own = slice(base * self._lane_rows, (base + 1) * self._lane_rows)
            side_by_side = models[chosen].reshape(-1, width, outputs).transpose(0, 1).reshape(width, -1)
            scores = (flat[own] @ side_by_side).reshape(-1, chosen.numel(), outputs).transpose(0, 1)
            targets = encoded[own].expand_as(scores)
            real = rows[chosen] >= 0
            correct[chosen] = (self.objective.hits(scores, targets) & real).to(torch.int32)
            losses[chosen] = torch.where(real, self.objective.row_loss(scores, targets).to(torch.float64), 0.0)
        return correct, losses
