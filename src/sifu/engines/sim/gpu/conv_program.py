"""Rounds of a `ConvNet` for many lanes at once: one captured graph per round, nothing read back in between.

A lane is one run, or one group of a run: its own model, clients, schedule and origin. All lanes of a program share the
network, the data and the local training. `run` takes every lane `rounds` rounds ahead; the models after each of them
stay on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sifu.engines.sim.gpu import round_kernels
from sifu.engines.sim.gpu.conv_backward import Activations, ConvBackward, ConvForward
from sifu.engines.sim.gpu.conv_plan import ConvPlan, stored_channels
from sifu.engines.sim.gpu.lane_stream import BLOCK, PackedProgram, ProgramPlan
from sifu.engines.sim.gpu.schedule import Packing, Schedule
from sifu.engines.sim.networks import ConvNet


def with_border(network: ConvNet, images: Tensor) -> Tensor:
    """Images (samples, height, width, channels) as the kernels read them: in a border of zeros, channels padded."""
    border = network.convolutions[0].padding
    extra = stored_channels(images.shape[3]) - images.shape[3]
    return torch.nn.functional.pad(images, (0, extra, border, border, border, border)).contiguous()


class ConvProgram(PackedProgram):
    """`images` are `with_border`. `summed_for` is the number of slots that sums are split for.

    It is that of the run, whatever part of its clients a lane holds, so that a group of clients has the same bits in
    any company.
    """

    def __init__(
        self,
        network: ConvNet,
        images: Tensor,
        labels: Tensor,
        plan: ProgramPlan,
        *,
        summed_for: int,
        precision: str = "float32",
    ) -> None:
        self.plan = ConvPlan.of(network, plan.batch, summed_for, precision)
        size, training, width, batch = self.plan.layout.size, plan.training, plan.width, plan.batch
        super().__init__(plan, images, size)
        self._blocks = -(-size // BLOCK)
        self._now_rows = torch.full_like(self._rows[0], -1)
        layers = max(len(network.hidden), 1)
        self.dropout = self._zeros(plan.chunk, training.steps, layers, width, kind=torch.int64)
        self._now_dropout = torch.zeros_like(self.dropout[0])
        self._partial = self._zeros(self.lanes, self.slots + 3, self._blocks, kind=torch.float64)
        self._real_entries.zero_()
        self._real_entries[torch.from_numpy(self.plan.layout.entries).to(self.device)] = 1.0
        self._norm_partial = self._zeros(width, self._blocks, kind=torch.float64)
        self._activations = Activations.of(self.plan, width * batch, self.device)
        self._forward = ConvForward(self.plan, images, labels)
        self._backward = ConvBackward(self.plan, training, images, labels, self.params, self._activations, batch)

    def _load_packed(self, schedule: Schedule, packing: Packing, rounds: int) -> None:
        super()._load_packed(schedule, packing, rounds)
        if self.plan.dropout:
            self.dropout[:rounds] = packing.dropout(schedule)

    def evaluate(
        self, models: Tensor, rows: Tensor, firsts: Sequence[int], upload: object = None
    ) -> tuple[Tensor, Tensor]:
        """Whether each of `rows` (lanes, samples) is classified rightly by its lane's model, and its loss."""
        return self._forward.evaluate(models, rows)

    def _round(self) -> None:
        size, slots, lanes = self.size, self.slots, self.lanes
        self._local_steps(self.training.steps)
        if self.clipped:
            self._clip()
        round_kernels.average[(self._blocks, lanes)](
            self.history, self.counter, self._places, self.params, self.weights, self.origins, self._partial,
            lanes, size, self.server_rate, SLOTS=slots, BLOCK=BLOCK,
        )  # fmt: skip
        round_kernels.collect[(lanes, slots + 3)](
            self._partial, self.counter, self.measured, lanes, BLOCKS=self._blocks, QUANTITIES=slots + 3, BLOCK=128
        )
        self.counter.add_(1)

    def _local_steps(self, steps: int) -> None:
        """Hand the models out and train them by the schedule of the round that `counter` names."""
        dropout = bool(self.plan.dropout)
        self._now_rows.copy_(self._rows.index_select(0, self.counter)[0])
        if dropout:
            self._now_dropout.copy_(self.dropout.index_select(0, self.counter)[0])
        round_kernels.hand_out[(self._blocks, self.width)](
            self.history, self.counter, self._order, self.params, self.lanes, self.width, self.size,
            SLOTS=self.slots, BLOCK=BLOCK,
        )  # fmt: skip
        for step in range(steps):
            rows, keys = self._now_rows[step], self._now_dropout[step] if dropout else None
            self._forward.train(rows, self.params, self._activations, keys)
            self._backward.step(rows, first=step == 0)

    def _clip(self) -> None:
        round_kernels.update_norms[(self._blocks, self.width)](
            self.history, self.counter, self._order, self.params, self._norm_partial, self.lanes, self.width, self.size,
            SLOTS=self.slots, BLOCK=BLOCK,
        )  # fmt: skip
        self._clip_and_noise(self._norm_partial.sum(dim=1).sqrt())
