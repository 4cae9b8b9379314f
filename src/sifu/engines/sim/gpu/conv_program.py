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
from sifu.engines.sim.gpu.lane_stream import Program
from sifu.engines.sim.gpu.schedule import Packing, Schedule
from sifu.engines.sim.local_training import LocalTraining
from sifu.engines.sim.networks import ConvNet

_BLOCK = 1024


def with_border(network: ConvNet, images: Tensor) -> Tensor:
    """Images (samples, height, width, channels) as the kernels read them: in a border of zeros, channels padded."""
    border = network.convolutions[0].padding
    extra = stored_channels(images.shape[3]) - images.shape[3]
    return torch.nn.functional.pad(images, (0, extra, border, border, border, border)).contiguous()


class ConvProgram(Program):
    """`images` are `with_border`. `summed_for` is the number of slots that sums are split for.

    It is that of the run, whatever part of its clients a lane holds, so that a group of clients has the same bits in
    any company.
    """

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
        width: int | None = None,
        summed_for: int | None = None,
        server_rate: float = 1.0,
        precision: str = "float32",
        clipped: bool = False,
    ) -> None:
        self.plan, self.clipped = ConvPlan.of(network, batch, summed_for or slots, precision), clipped
        size, width = self.plan.layout.size, width or lanes * slots
        super().__init__(training, server_rate, images, size=size, lanes=lanes, slots=slots, chunk=chunk, width=width)
        self._blocks = -(-size // _BLOCK)
        self.rows = torch.full((chunk, training.steps, width, batch), -1, dtype=torch.int32, device=self.device)
        self._now_rows = torch.full((training.steps, width, batch), -1, dtype=torch.int32, device=self.device)
        self.weights = self._zeros(chunk, lanes, slots, kind=torch.float64)
        layers = max(len(network.hidden), 1)
        self.dropout = self._zeros(chunk, training.steps, layers, width, kind=torch.int64)
        self._now_dropout = self._zeros(training.steps, layers, width, kind=torch.int64)
        self._partial = self._zeros(lanes, slots + 3, self._blocks, kind=torch.float64)
        self._real_entries = self._zeros(size)
        self._real_entries[torch.from_numpy(self.plan.layout.entries).to(self.device)] = 1.0
        self._norm_partial = self._zeros(width, self._blocks, kind=torch.float64)
        self._activations = Activations.of(self.plan, width * batch, self.device)
        self._forward = ConvForward(self.plan, images, labels)
        self._backward = ConvBackward(self.plan, training, images, labels, self.params, self._activations, batch)

    def load(self, schedule: Schedule) -> None:
        """Take over the schedule of the next rounds."""
        rounds, packing = schedule.rows.shape[0], Packing.of(schedule.participants, self.width)
        self._order[:rounds], self._places[:rounds] = packing.order, packing.places
        self.rows[:rounds] = packing.rows(schedule)
        self.weights[:rounds] = schedule.weights
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
        round_kernels.hand_out[(self._blocks, self.width)](
            self.history, self.counter, self._order, self.params, self.lanes, self.width, self.size,
            SLOTS=self.slots, BLOCK=_BLOCK,
        )  # fmt: skip
        for step in range(steps):
            rows, keys = self._now_rows[step], self._now_dropout[step] if dropout else None
            self._forward.train(rows, self.params, self._activations, keys)
            self._backward.step(rows, first=step == 0)

    def _clip(self) -> None:
        grid, size, slots, lanes, width = (self._blocks, self.width), self.size, self.slots, self.lanes, self.width
        round_kernels.update_norms[grid](
            self.history, self.counter, self._order, self.params, self._norm_partial, lanes, width, size,
            SLOTS=slots, BLOCK=_BLOCK,
        )  # fmt: skip
        norms = self._norm_partial.sum(dim=1).sqrt()
        round_kernels.clip_and_noise[grid](
            self.history, self.counter, self._order, self.params, self._real_entries, norms, self.clip, self.noise,
            self.noise_seeds, lanes, width, size, SLOTS=slots, BLOCK=_BLOCK,
        )  # fmt: skip
