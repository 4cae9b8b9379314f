"""Rounds of a `ConvNet` for many lanes at once: one captured graph a round, nothing read back in between.

A lane is one run: its own model, clients, schedule and origin. All lanes of a program share the network, the data and
the local training. `run` takes every lane `rounds` rounds ahead; the models after each of them stay on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sifu.sim.gpu import kernels, round_kernels
from sifu.sim.gpu.captured import CapturedRounds
from sifu.sim.gpu.device_layout import ConvolutionPlace, DeviceLayout, stored_channels
from sifu.sim.gpu.schedule import Schedule
from sifu.sim.local_training import LocalTraining
from sifu.sim.networks import ConvNet

PRECISIONS = {"float32": "ieee", "tf32": "tf32", "tf32x3": "tf32x3"}
EVALUATED_AT_ONCE = 2**31
"""Bytes of the largest activation tensor in evaluation."""
BLOCK_CHANNELS = (1, 2, 4)
"""Input channels for which a pooled convolution looks at blocks of 4 x 4 pixels; others would fill no matrix."""
ENOUGH_PROGRAMS = 1024
"""Programs that keep the chip busy: with more of them, one may do several tiles."""
_BLOCK = 1024


def _power(value: int, least: int = 16) -> int:
    return max(least, 1 << (value - 1).bit_length())


@dataclass(frozen=True)
class Tiles:
    """Block sizes of a kernel."""

    rows: int
    inner: int
    warps: int
    stages: int


@dataclass(frozen=True)
class WeightForm:
    """How a convolution's weight gradient is summed.

    `block` and `row` are for pooled convolutions of few and of many channels, `whole` for unpooled ones of few
    outputs, `patch` for any other. Sums over samples are split into `parts`, since few slots leave most of the chip
    idle otherwise; `stored` of them lie in memory until the step. All of this decides how sums are rounded, so it must
    not depend on how many lanes happen to run together: a lane's results are its own.
    """

    kind: Literal["block", "row", "whole", "patch"]
    parts: int

    @property
    def stored(self) -> int:
        """Partial sums of each weight; 0 where the step is taken at once."""
        return {"block": 4 * self.parts, "whole": 0}.get(self.kind, self.parts)

    @staticmethod
    def of(one: ConvolutionPlace, batch: int, slots: int) -> WeightForm:
        """The form measured to be good on an H200."""
        channels, outputs = one.channels_in, batch * one.out_height * one.out_width
        if one.pool and channels in BLOCK_CHANNELS:
            return WeightForm("block", _parts(outputs // 32, 80 // slots, 16))
        if one.pool and channels >= 16 and channels == _power(channels):
            return WeightForm("row", _parts(outputs // 32, 64 // slots, 8))
        if not one.pool and outputs <= 512:
            return WeightForm("whole", 1)
        return WeightForm("patch", _parts(outputs // 32, 64 // slots, 8))


def _parts(*limits: int) -> int:
    """The largest power of two within all limits, at least 1."""
    return 1 << max(0, min(limits).bit_length() - 1)


@dataclass
class _Buffers:
    """Activations of a batch of every slot, and the gradients that flow back through them."""

    outputs: list[Tensor]
    winners: list[Tensor]
    hidden: list[Tensor]
    gradients: list[Tensor]
    spread: list[Tensor | None]
    hidden_gradients: list[Tensor]


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
        self.layout = DeviceLayout.of(network)
        self.network, self.training = network, training
        self.lanes, self.slots, self.batch, self.chunk = lanes, slots, batch, chunk
        border = network.convolutions[0].padding
        extra = stored_channels(images.shape[3]) - images.shape[3]
        self.images = torch.nn.functional.pad(images, (0, extra, border, border, border, border)).contiguous()
        self.labels = labels
        self.device = images.device
        self.precision = PRECISIONS[precision]
        self.server_rate = server_rate
        self.clipped = clipped
        self.groups = lanes * slots
        self._keep_scale = 1.0 / (1.0 - network.dropout) if network.dropout else 1.0
        self._dropped_below = math.ceil(network.dropout * 2.0**53)
        size, groups = self.layout.size, self.groups
        self.forms = [WeightForm.of(one, batch, slots) for one in self.layout.convolutions]
        self._blocks = -(-size // _BLOCK)

        def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        self.history = make(chunk + 1, lanes, size)
        self.origins = make(lanes, size, dtype=torch.float64)
        self.params, self.velocities = make(groups, size), make(groups, size)
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
        self._real_entries[torch.from_numpy(self.layout.entries).to(self.device)] = 1.0
        self._norm_partial = make(groups, self._blocks, dtype=torch.float64)
        self._partials = [
            make(form.stored, groups, self._length(one)) if form.stored else None
            for form, one in zip(self.forms, self.layout.convolutions, strict=True)
        ]
        self._buffers = self._make_buffers(make)
        self._rounds = CapturedRounds(self._round, self.counter, self.history)

    def _make_buffers(self, make: Callable[..., Tensor]) -> _Buffers:
        rows, convolutions = self.groups * self.batch, self.layout.convolutions
        shapes = [(rows, one.out_height, one.out_width, one.channels_out) for one in convolutions]
        widths = [one.outputs for one in self.layout.hidden]
        return _Buffers(
            [make(*self._bordered(number, rows)) for number in range(len(convolutions))],
            [make(*shape, dtype=torch.int8) for shape in shapes],
            [make(rows, width) for width in widths],
            [make(*shape) for shape in shapes],
            [
                make(rows, one.height + 2, one.width + 2, one.channels_out) if number else None
                for number, one in enumerate(convolutions)
            ],
            [make(rows, width) for width in widths],
        )

    @staticmethod
    def _length(one: ConvolutionPlace) -> int:
        """Entries of a convolution's weights and bias together."""
        return one.bias_at - one.weight_at + one.channels_out

    def _border(self, number: int) -> int:
        """The zeros around the output of a convolution: the next one's padding."""
        later = self.layout.convolutions[number + 1 :]
        return later[0].padding if later else 0

    def _bordered(self, number: int, rows: int) -> tuple[int, int, int, int]:
        one, border = self.layout.convolutions[number], self._border(number)
        return rows, one.out_height + 2 * border, one.out_width + 2 * border, one.channels_out

    # -- a round -------------------------------------------------------------------------------------------------

    def load(self, schedule: Schedule) -> None:
        """Take over the schedule of the next rounds."""
        rounds = schedule.rows.shape[0]
        self.rows[:rounds] = schedule.rows
        self.weights[:rounds] = schedule.weights
        self.dropout[:rounds] = schedule.dropout

    def run(self, rounds: int) -> None:
        """`rounds` rounds from history[0]; afterwards history[k] is the model after k of them."""
        self._rounds.run(rounds)

    def _round(self) -> None:
        size, slots, lanes, groups = self.layout.size, self.slots, self.lanes, self.groups
        self._now_rows.copy_(self.rows.index_select(0, self.counter)[0])
        if self.network.dropout:
            self._now_dropout.copy_(self.dropout.index_select(0, self.counter)[0])
        grid = (self._blocks, groups)
        round_kernels.hand_out[grid](self.history, self.counter, self.params, lanes, size, SLOTS=slots, BLOCK=_BLOCK)
        for step in range(self.training.steps):
            self._step(step)
        if self.clipped:
            round_kernels.update_norms[grid](
                self.history, self.counter, self.params, self._norm_partial, lanes, size, SLOTS=slots, BLOCK=_BLOCK
            )
            norms = self._norm_partial.sum(dim=1).sqrt()
            round_kernels.clip_and_noise[grid](
                self.history, self.counter, self.params, self._real_entries, norms, self.clip, self.noise,
                self.noise_seeds, lanes, size, SLOTS=slots, BLOCK=_BLOCK,
            )  # fmt: skip
        round_kernels.average[(self._blocks, lanes)](
            self.history, self.counter, self.params, self.weights, self.origins, self._partial,
            lanes, size, self.server_rate, SLOTS=slots, BLOCK=_BLOCK,
        )  # fmt: skip
        round_kernels.collect[(lanes, slots + 3)](
            self._partial, self.counter, self.measured, lanes, BLOCKS=self._blocks, QUANTITIES=slots + 3, BLOCK=128
        )
        self.counter.add_(1)

    def local_steps(self, steps: int) -> None:
        """Only the local steps of round 0 of the schedule: `params` holds the local models afterwards."""
        self.counter.zero_()
        self._now_rows.copy_(self.rows[0])
        self._now_dropout.copy_(self.dropout[0])
        round_kernels.hand_out[(self._blocks, self.groups)](
            self.history, self.counter, self.params, self.lanes, self.layout.size, SLOTS=self.slots, BLOCK=_BLOCK
        )
        for step in range(steps):
            self._step(step)

    def _step(self, step: int) -> None:
        """One step of SGD of every slot: forward, backward, descend."""
        layout, buffers, training = self.layout, self._buffers, self.training
        rows = self._now_rows[step]
        groups, batch, size, first = self.groups, self.batch, layout.size, step == 0
        sgd = (training.rate, training.momentum, training.weight_decay)
        flags = {"FIRST": first, "NESTEROV": training.nesterov, "PRECISION": self.precision}
        source = self.images
        for number in range(len(layout.convolutions)):
            self._convolve(number, source, rows, self.params, buffers.outputs[number], buffers.winners[number])
            source = buffers.outputs[number]
        features = source if layout.convolutions else None
        for number in range(len(layout.hidden)):
            self._hidden(number, source, buffers.hidden[number], self.params, groups, batch, step)
            source = buffers.hidden[number]
        last = layout.last
        behind = buffers.hidden_gradients[-1] if layout.hidden else buffers.gradients[-1]
        kernels.classify[(groups,)](
            source, self.labels, rows, self.params, self.velocities, behind,
            batch, size, batch, last.weight_at, last.bias_at, *sgd,
            IN=last.inputs, OUT=last.outputs, BM=_power(batch), BN=_power(last.outputs),
            BK=min(128, _power(last.inputs)) if last.outputs <= 64 else 32, num_warps=4, num_stages=1, **flags,
        )  # fmt: skip
        for number in reversed(range(len(layout.hidden))):
            place = layout.hidden[number]
            before = buffers.hidden[number - 1] if number else features
            into = buffers.hidden_gradients[number - 1] if number else buffers.gradients[-1]
            kernels.hidden_layer_backward[(-(-place.inputs // 32), groups)](
                before, buffers.hidden[number], buffers.hidden_gradients[number], self.params, self.velocities, into,
                size, batch, place.weight_at, place.bias_at, self._keep_scale, *sgd,
                IN=place.inputs, OUT=place.outputs, BM=_power(batch), BF=32,
                BO=min(64, _power(place.outputs)), num_warps=4, num_stages=2, **flags,
            )  # fmt: skip
        for number in reversed(range(len(layout.convolutions))):
            one = layout.convolutions[number]
            if number:
                self._input_gradient(one, number)
            source = self.images if number == 0 else buffers.outputs[number - 1]
            self._weight_step(one, source, rows, number, first)

    def _convolve(
        self, number: int, source: Tensor, rows: Tensor, params: Tensor, out: Tensor, winner: Tensor | None
    ) -> None:
        one = self.layout.convolutions[number]
        groups, batch = rows.shape
        pixels = batch * one.out_height * one.out_width
        arguments = (
            source, rows, params, out, winner if winner is not None else out,
            rows.stride(0), self.layout.size, batch, one.weight_at, one.bias_at,
        )  # fmt: skip
        flags = {
            "H": one.height + 2 * one.padding, "W": one.width + 2 * one.padding, "CI": one.channels_in,
            "CO": one.channels_out, "PH": one.out_height, "PW": one.out_width, "BORDER": self._border(number),
            "GATHER": number == 0, "KEEP_WINNER": winner is not None, "BN": _power(one.channels_out),
            "PRECISION": self.precision,
        }  # fmt: skip
        if one.pool and one.channels_in in BLOCK_CHANNELS:
            tall = 64
            several = 4 if -(-pixels // tall) * groups > ENOUGH_PROGRAMS else 1
            kernels.convolve_block[(-(-pixels // (tall * several)), groups)](
                *arguments, BM=tall, TILES=several, num_warps=4, num_stages=1, **flags
            )
            return
        tiles = self.tiles("convolve", number)
        kernels.convolve[(-(-pixels // tiles.rows), groups)](
            *arguments, POOL=one.pool, BM=tiles.rows, BK=tiles.inner, num_warps=tiles.warps, num_stages=tiles.stages,
            **flags,
        )  # fmt: skip

    def tiles(self, kernel: str, number: int) -> Tiles:
        """Block sizes measured to be good on an H200."""
        one = self.layout.convolutions[number]
        if kernel == "convolve":
            if not one.pool and 9 * one.channels_in % 64 == 0:
                return Tiles(32, 64, 4, 3)
            return Tiles(32, 32, 4, 3) if 9 * one.channels_in % 32 == 0 else Tiles(64, 16, 4, 3)
        if kernel == "input":
            return Tiles(128, 32, 4, 3) if one.channels_out >= 32 else Tiles(128, 16, 4, 4)
        if not one.pool:
            return Tiles(64, 64, 4, 2)
        return Tiles(32, 32 if one.channels_in >= 32 else 64, 2, 2)

    def _hidden(
        self, number: int, source: Tensor, out: Tensor, params: Tensor, groups: int, batch: int, step: int | None
    ) -> None:
        place = self.layout.hidden[number]
        dropout = bool(self.network.dropout) and step is not None
        keys = self._now_dropout[step, number] if dropout else self.counter
        tall = min(_power(batch), 64)
        wide = 32
        kernels.hidden_layer[(-(-place.outputs // wide), -(-batch // tall), groups)](
            source, params, out, keys,
            self.layout.size, batch, place.weight_at, place.bias_at, self._keep_scale, self._dropped_below,
            IN=place.inputs, OUT=place.outputs, DROPOUT=dropout,
            BM=tall, BN=wide, BK=64, PRECISION=self.precision, num_warps=4, num_stages=3,
        )  # fmt: skip

    def _input_gradient(self, one: ConvolutionPlace, number: int) -> None:
        buffers, spread = self._buffers, self._buffers.spread[number]
        gradient = buffers.gradients[number]
        kernels.spread_gradient[(-(-gradient.numel() // 1024),)](
            gradient, buffers.winners[number], spread, gradient.numel(),
            CO=one.channels_out, POOL=one.pool, PH=one.out_height, PW=one.out_width,
            SH=one.height + 2, SW=one.width + 2, LEAD=2 - one.padding, BLOCK=1024,
        )  # fmt: skip
        pixels = self.batch * one.height * one.width
        tiles = self.tiles("input", number)
        kernels.convolution_input_gradient[(-(-pixels // tiles.rows), self.groups)](
            spread, self.params, buffers.gradients[number - 1],
            self.layout.size, self.batch, one.weight_at,
            H=one.height, W=one.width, CI=one.channels_in, CO=one.channels_out,
            BM=tiles.rows, BN=_power(one.channels_in), BK=tiles.inner, PRECISION=self.precision,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip

    def _weight_step(self, one: ConvolutionPlace, source: Tensor, rows: Tensor, number: int, first: bool) -> None:
        """A convolution's weight gradient, and the step it makes."""
        form, partial, training = self.forms[number], self._partials[number], self.training
        sgd = (training.rate, training.momentum, training.weight_decay)
        size, groups, length = self.layout.size, self.groups, self._length(one)
        upstream, winner = self._buffers.gradients[number], self._buffers.winners[number]
        shape = {
            "BATCH": self.batch, "H": one.height + 2 * one.padding, "W": one.width + 2 * one.padding,
            "CI": one.channels_in, "CO": one.channels_out, "PH": one.out_height, "PW": one.out_width,
            "BN": _power(one.channels_out), "PRECISION": self.precision,
        }  # fmt: skip
        inputs, bias_at = 9 * one.channels_in, one.bias_at - one.weight_at
        if partial is None:
            kernels.descend_by_weight_gradient[(-(-inputs // 64), groups)](
                source, rows, upstream, winner, self.params, self.velocities,
                rows.stride(0), size, one.weight_at, one.bias_at, *sgd,
                GATHER=number == 0, FIRST=first, NESTEROV=training.nesterov, BKW=64, BR=32, num_warps=4, num_stages=1,
                **shape,
            )  # fmt: skip
            return
        if form.kind == "block":
            kernels.block_weight_gradient[(form.parts, groups)](
                source, rows, upstream, winner, partial, rows.stride(0), groups, length, bias_at,
                GATHER=number == 0, PARTS=form.parts, BR=32, num_warps=2, num_stages=2, **shape,
            )  # fmt: skip
        elif form.kind == "row":
            wide = min(one.channels_in, 32)
            kernels.row_weight_gradient[(3 * one.channels_in // wide, form.parts, groups)](
                source, rows, upstream, winner, partial, rows.stride(0), groups, length, bias_at,
                GATHER=number == 0, PARTS=form.parts, BC=wide, BR=16, num_warps=2, num_stages=2, **shape,
            )  # fmt: skip
        else:
            tiles = self.tiles("weight", number)
            kernels.convolution_weight_gradient[(-(-inputs // tiles.rows), form.parts, groups)](
                source, rows, upstream, winner, partial, rows.stride(0), groups, length, bias_at,
                POOL=one.pool, GATHER=number == 0, PARTS=form.parts, BKW=tiles.rows, BR=tiles.inner,
                num_warps=tiles.warps, num_stages=tiles.stages, **shape,
            )  # fmt: skip
        kernels.descend_convolution[(-(-length // 256), groups)](
            partial, self.params, self.velocities, groups, size, length, one.weight_at, *sgd,
            PARTS=form.stored, FIRST=first, NESTEROV=training.nesterov, BLOCK=256, num_warps=2,
        )  # fmt: skip

    # -- evaluation ----------------------------------------------------------------------------------------------

    def evaluate(
        self, models: Tensor, rows: Tensor, firsts: Sequence[int], upload: object = None
    ) -> tuple[Tensor, Tensor]:
        """Whether each of `rows` (lanes, samples) is classified rightly by its lane's model, and its loss."""
        lanes, samples = rows.shape
        correct = torch.zeros((lanes, samples), dtype=torch.int32, device=self.device)
        losses = torch.zeros((lanes, samples), dtype=torch.float32, device=self.device)
        widest = max(
            [one.out_height * one.out_width * one.channels_out for one in self.layout.convolutions]
            + [one.outputs for one in self.layout.hidden]
        )
        at_once = max(1, EVALUATED_AT_ONCE // (4 * widest * lanes))
        for start in range(0, samples, at_once):
            part = rows[:, start : start + at_once]
            correct[:, start : start + at_once], losses[:, start : start + at_once] = self._score(models, part)
        return correct, losses

    def _score(self, models: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        lanes, batch = rows.shape
        layout = self.layout
        source = self.images
        for number in range(len(layout.convolutions)):
            shape = self._bordered(number, lanes * batch)
            out = (
                torch.zeros(shape, device=self.device)
                if self._border(number)
                else torch.empty(shape, device=self.device)
            )
            self._convolve(number, source, rows, models, out, None)
            source = out
        for number, place in enumerate(layout.hidden):
            out = torch.empty((lanes * batch, place.outputs), device=self.device)
            self._hidden(number, source, out, models, lanes, batch, None)
            source = out
        correct = torch.empty((lanes, batch), dtype=torch.int32, device=self.device)
        losses = torch.empty((lanes, batch), device=self.device)
        last = layout.last
        kernels.score[(-(-batch // 32), lanes)](
            source, self.labels, rows, models, correct, losses,
            rows.stride(0), layout.size, batch, last.weight_at, last.bias_at,
            IN=last.inputs, OUT=last.outputs, BM=32, BN=_power(last.outputs), BK=32, PRECISION=self.precision,
            num_warps=4, num_stages=2,
        )  # fmt: skip
        return correct, losses
