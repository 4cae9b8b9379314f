"""Rounds of a `ConvNet` for many lanes at once: one captured graph per round, nothing read back in between.

A lane is one run: its own model, clients, schedule and origin. All lanes of a program share the network, the data and
the local training. `run` takes every lane `rounds` rounds ahead; the models after each of them stay on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sifu.engines.sim.gpu import round_kernels
from sifu.engines.sim.gpu.captured import CapturedRounds
from sifu.engines.sim.gpu.conv_backward import ConvBackward
from sifu.engines.sim.gpu.conv_forward import Activations, ConvForward
from sifu.engines.sim.gpu.conv_plan import ConvPlan
from sifu.engines.sim.gpu.device_layout import stored_channels
from sifu.engines.sim.gpu.schedule import Schedule
from sifu.engines.sim.local_training import LocalTraining
from sifu.engines.sim.networks import ConvNet

_BLOCK = 1024


class ConvProgram:
    """`lanes` runs of `slots` clients each, at most `chunk` rounds ahead."""

    def __init__(
        self,
        network: ConvNet,
        images: Tensor,
        labels: Tensor,
        training: LocalTraining,
        *,
        lanes: int,
        slots: int,
        batch: int,
        chunk: int,
        server_rate: float = 1.0,
        precision: str = "float32",
        clipped: bool = False,
    ) -> None:
        self.plan = ConvPlan.of(network, batch, slots, precision)
        self.training, self.server_rate, self.clipped = training, server_rate, clipped
        self.lanes, self.slots, self.groups = lanes, slots, lanes * slots
        self.device = images.device
        size, groups = self.plan.layout.size, self.groups
        self._size, self._blocks = size, -(-size // _BLOCK)

        def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        self.history = make(chunk + 1, lanes, size)
        self.origins = make(lanes, size, dtype=torch.float64)
        self.params = make(groups, size)
        self.counter = make(1, dtype=torch.int64)
        self.rows = torch.full((chunk, training.steps, groups, batch), -1, dtype=torch.int32, device=self.device)
        self._now_rows = torch.full((training.steps, groups, batch), -1, dtype=torch.int32, device=self.device)
        self.weights = make(chunk, lanes, slots, dtype=torch.float64)
        layers = max(len(network.hidden), 1)
        self.dropout = make(chunk, training.steps, layers, groups, dtype=torch.int64)
        self._now_dropout = make(training.steps, layers, groups, dtype=torch.int64)
        self.measured = make(chunk, lanes, slots + 3, dtype=torch.float64)
        self.clip, self.noise = make(lanes, dtype=torch.float64), make(lanes, dtype=torch.float64)
        self.noise_seeds = make(chunk, groups, dtype=torch.int64)
        self._partial = make(lanes, slots + 3, self._blocks, dtype=torch.float64)
        self._real_entries = make(size)
        self._real_entries[torch.from_numpy(self.plan.layout.entries).to(self.device)] = 1.0
        self._norm_partial = make(groups, self._blocks, dtype=torch.float64)

        border = network.convolutions[0].padding
        extra = stored_channels(images.shape[3]) - images.shape[3]
        bordered = torch.nn.functional.pad(images, (0, extra, border, border, border, border)).contiguous()
        self._activations = Activations.of(self.plan, groups * batch, self.device)
        self._forward = ConvForward(self.plan, bordered, labels)
        self._backward = ConvBackward(self.plan, training, bordered, labels, self.params, self._activations, batch)
        self._rounds = CapturedRounds(self.counter, self.history)

    def load(self, schedule: Schedule) -> None:
        """Take over the schedule of the next rounds."""
        rounds = schedule.rows.shape[0]
        self.rows[:rounds] = schedule.rows
        self.weights[:rounds] = schedule.weights
        self.dropout[:rounds] = schedule.dropout

    def run(self, rounds: int) -> None:
        """`rounds` rounds from history[0]; afterwards history[k] is the model after k of them."""
        self._rounds.run(self._round, rounds)

    def local_steps(self, steps: int) -> None:
        """Only the local steps of round 0 of the schedule: `params` holds the local models afterwards."""
        self.counter.zero_()
        self._local_steps(steps)

    def evaluate(
        self, models: Tensor, rows: Tensor, firsts: Sequence[int], upload: object = None
    ) -> tuple[Tensor, Tensor]:
        """Whether each of `rows` (lanes, samples) is classified rightly by its lane's model, and its loss."""
        return self._forward.evaluate(models, rows)

    def _round(self) -> None:
        size, slots, lanes = self._size, self.slots, self.lanes
        self._local_steps(self.training.steps)
        if self.clipped:
            self._clip()
        round_kernels.average[(self._blocks, lanes)](
            self.history, self.counter, self.params, self.weights, self.origins, self._partial,
            lanes, size, self.server_rate, SLOTS=slots, BLOCK=_BLOCK,
        )  # fmt: skip
        round_kernels.collect[(lanes, slots + 3)](
            self._partial, self.counter, self.measured, lanes, BLOCKS=self._blocks, QUANTITIES=slots + 3, BLOCK=128
        )
        self.counter.add_(1)

    def _local_steps(self, steps: int) -> None:
        """Hand the models out and train them by the schedule of the round that `counter` names."""
        dropout = bool(self.plan.dropout)
        self._now_rows.copy_(self.rows.index_select(0, self.counter)[0])
        if dropout:
            self._now_dropout.copy_(self.dropout.index_select(0, self.counter)[0])
        round_kernels.hand_out[(self._blocks, self.groups)](
            self.history, self.counter, self.params, self.lanes, self._size, SLOTS=self.slots, BLOCK=_BLOCK
        )
        for step in range(steps):
            rows, keys = self._now_rows[step], self._now_dropout[step] if dropout else None
            self._forward.train(rows, self.params, self._activations, keys)
            self._backward.step(rows, first=step == 0)

    def _clip(self) -> None:
        grid, size, slots, lanes = (self._blocks, self.groups), self._size, self.slots, self.lanes
        round_kernels.update_norms[grid](
            self.history, self.counter, self.params, self._norm_partial, lanes, size, SLOTS=slots, BLOCK=_BLOCK
        )
        norms = self._norm_partial.sum(dim=1).sqrt()
        round_kernels.clip_and_noise[grid](
            self.history, self.counter, self.params, self._real_entries, norms, self.clip, self.noise,
            self.noise_seeds, lanes, size, SLOTS=slots, BLOCK=_BLOCK,
        )  # fmt: skip
