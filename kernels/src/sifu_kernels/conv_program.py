"""Rounds of a `ConvNet` for many lanes at once, in captured graphs of one or several rounds (`CapturedRounds`).

A lane is one run, or one group of a run, with its own model, clients, schedule and origin. All lanes of a program share
the network, one table of samples and the local training. `run` advances every lane by `rounds` rounds; the models after
each round stay on the device.

A local step is a sequence of kernel launches: forward pass of every slot, backward pass, and SGD step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from sifu.engines.sim.local_training import LocalTraining
from sifu.engines.sim.networks import ConvNet
from sifu_kernels import convolution_kernels, round_kernels, weight_gradient_kernels
from sifu_kernels.conv_plan import (
    ENOUGH_PROGRAMS,
    ConvolutionPlace,
    ConvPlan,
    LinearPlace,
    in_flight,
    power_of_two,
    stored_channels,
)
from sifu_kernels.lane_stream import CapturedRounds, ProgramPlan
from sifu_kernels.schedule import Packing, Schedule

BLOCK = 1024
"""Number of parameters that one program of an elementwise kernel processes."""
EVALUATED_AT_ONCE = 2**27
"""Maximum size in bytes of the largest activation tensor in an evaluation."""


@dataclass(frozen=True)
class Activations:
    """Activations of a batch of every slot; `winners` are the positions that max-pooling chose."""

    outputs: tuple[Tensor, ...]
    winners: tuple[Tensor, ...]
    hidden: tuple[Tensor, ...]

    @staticmethod
    def of(plan: ConvPlan, samples: int, device: torch.device) -> Activations:
        """Allocate activations for `samples` samples of all slots together; borders are zero and stay zero."""
        convolutions = plan.layout.convolutions
        shapes = [(samples, layer.height_out, layer.width_out, layer.channels_out) for layer in convolutions]
        return Activations(
            tuple(torch.zeros(plan.output_shape(number, samples), device=device) for number in range(len(shapes))),
            tuple(torch.zeros(shape, dtype=torch.int8, device=device) for shape in shapes),
            tuple(torch.zeros((samples, layer.features_out), device=device) for layer in plan.layout.hidden),
        )

    def before_hidden(self, number: int) -> Tensor:
        """Return the input of hidden layer `number`; the number after the last hidden layer is the output layer."""
        return self.hidden[number - 1] if number else self.outputs[-1]


class ConvForward:
    """Forward pass through a network, for any number of slots.

    `images` have a border of zeros as wide as the first convolution's padding. A batch is given by `rows` (slots,
    samples), which index the images; negative entries are empty.
    """

    def __init__(self, plan: ConvPlan, images: Tensor, labels: Tensor) -> None:
        self._plan, self._layout = plan, plan.layout
        self._images, self._labels = images, labels

    def train(self, rows: Tensor, params: Tensor, into: Activations, dropout_keys: Tensor | None) -> None:
        """Compute the activations of a batch of every slot; `dropout_keys` are (hidden layers, slots)."""
        self._through(rows, params, into.outputs, into.hidden, into.winners, dropout_keys)

    def evaluate(self, models: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether each of `rows` (lanes, samples) is classified correctly by its lane's model, and its loss."""
        lanes, samples = rows.shape
        correct = torch.zeros((lanes, samples), dtype=torch.int32, device=rows.device)
        losses = torch.zeros((lanes, samples), dtype=torch.float32, device=rows.device)
        places: list[ConvolutionPlace | LinearPlace] = [*self._layout.convolutions, *self._layout.hidden]
        widest = max(place.features_out for place in places)
        at_once = max(1, EVALUATED_AT_ONCE // (4 * widest * lanes))
        for start in range(0, samples, at_once):
            part = slice(start, start + at_once)
            correct[:, part], losses[:, part] = self._score(models, rows[:, part])
        return correct, losses

    def _score(self, models: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        (lanes, batch), last, device = rows.shape, self._layout.last, rows.device
        samples = lanes * batch
        # Generators allocate buffers on demand, so that only two of them exist at a time.
        outputs = (self._output(number, samples, device) for number in range(len(self._layout.convolutions)))
        hidden = (torch.empty((samples, place.features_out), device=device) for place in self._layout.hidden)
        source = self._through(rows, models, outputs, hidden)
        correct = torch.empty((lanes, batch), dtype=torch.int32, device=device)
        losses = torch.empty((lanes, batch), device=device)
        round_kernels.score[(-(-batch // 32), lanes)](
            source, self._labels, rows, models, correct, losses,
            rows.stride(0), self._layout.size, batch, last.weight_at, last.bias_at,
            IN=last.features_in, OUT=last.features_out, BM=32, BN=power_of_two(last.features_out), BK=32,
            num_warps=4, num_stages=in_flight(2, last.features_in, 32),
        )  # fmt: skip
        return correct, losses

    def _output(self, number: int, samples: int, device: torch.device) -> Tensor:
        make = torch.zeros if self._plan.border(number) else torch.empty
        return make(self._plan.output_shape(number, samples), device=device)

    def _through(
        self,
        rows: Tensor,
        params: Tensor,
        outputs: Iterable[Tensor],
        hidden: Iterable[Tensor],
        winners: Sequence[Tensor] | None = None,
        dropout_keys: Tensor | None = None,
    ) -> Tensor:
        """Run all layers but the last and return the input of the last layer."""
        source = self._images
        for number, out in enumerate(outputs):
            self._convolve(number, source, rows, params, out, winners[number] if winners else None)
            source = out
        for number, out in enumerate(hidden):
            self._hidden(number, source, rows, params, out, None if dropout_keys is None else dropout_keys[number])
            source = out
        return source

    def _convolve(
        self, number: int, source: Tensor, rows: Tensor, params: Tensor, out: Tensor, winner: Tensor | None
    ) -> None:
        layer = self._layout.convolutions[number]
        groups, batch = rows.shape
        pixels = batch * layer.height_out * layer.width_out
        arguments = (
            source, rows, params, out, winner if winner is not None else out,
            rows.stride(0), self._layout.size, batch, layer.weight_at, layer.bias_at,
        )  # fmt: skip
        flags = self._plan.shape(number) | {
            "BORDER": self._plan.border(number), "KEEP_WINNER": winner is not None
        }  # fmt: skip
        if self._plan.forms[number].kind == "block":
            tall = 64
            several = 4 if -(-pixels // tall) * groups > ENOUGH_PROGRAMS else 1
            convolution_kernels.convolve_block[(-(-pixels // (tall * several)), groups)](
                *arguments, BM=tall, TILES=several, num_warps=4, num_stages=1, **flags
            )
            return
        tiles = self._plan.tiles("convolve", number)
        convolution_kernels.convolve[(-(-pixels // tiles.rows), groups)](
            *arguments, POOL=layer.pool, BM=tiles.rows, BK=tiles.inner, num_warps=tiles.warps,
            num_stages=in_flight(tiles.stages, 9 * layer.channels_in, tiles.inner), **flags,
        )  # fmt: skip

    def _hidden(
        self, number: int, source: Tensor, rows: Tensor, params: Tensor, out: Tensor, dropout_keys: Tensor | None
    ) -> None:
        place, plan = self._layout.hidden[number], self._plan
        groups, batch = rows.shape
        tall = min(power_of_two(batch), 64)
        # The width of a tile does not change the sums, because every output has its own sum.
        wide = 16 if groups * place.features_out < 2 * ENOUGH_PROGRAMS else 32
        round_kernels.hidden_layer[(-(-place.features_out // wide), -(-batch // tall), groups)](
            source, params, out, dropout_keys if dropout_keys is not None else out,
            self._layout.size, batch, place.weight_at, place.bias_at, plan.keep_scale, plan.dropped_below,
            IN=place.features_in, OUT=place.features_out, DROPOUT=dropout_keys is not None, BM=tall, BN=wide, BK=64,
            num_warps=4, num_stages=in_flight(3, place.features_in, 64),
        )  # fmt: skip


class ConvBackward:
    """Backward pass and SGD step from a batch's `activations`; the step changes `params` (slots, size) in place."""

    def __init__(
        self,
        plan: ConvPlan,
        training: LocalTraining,
        images: Tensor,
        labels: Tensor,
        params: Tensor,
        activations: Activations,
        batch: int,
    ) -> None:
        self._plan, self._layout, self._training = plan, plan.layout, training
        self._images, self._labels = images, labels
        self._params, self._velocities = params, torch.zeros_like(params)
        self._activations, self._groups, self._batch = activations, params.shape[0], batch
        self._device = params.device
        convolutions, samples = plan.layout.convolutions, self._groups * batch
        self._gradients = [torch.zeros(winners.shape, device=self._device) for winners in activations.winners]
        self._hidden_gradients = [torch.zeros_like(values) for values in activations.hidden]
        # The first convolution needs no gradient of its input.
        self._spread = [
            self._zeros(samples, layer.height_in + 2, layer.width_in + 2, layer.channels_out) if number else None
            for number, layer in enumerate(convolutions)
        ]
        self._partials = [
            self._zeros(form.stored, self._groups, _length(layer)) if form.stored else None
            for form, layer in zip(plan.forms, convolutions, strict=True)
        ]
        on_gpu = self._device.type == "cuda"
        self._side = torch.cuda.Stream(self._device) if on_gpu else None  # type: ignore[no-untyped-call]

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, device=self._device)

    def step(self, rows: Tensor, first: bool) -> None:
        """Take one step with the batch `rows` (slots, samples); the `first` step of a round starts without velocity."""
        self._classify(rows, first)
        for number in reversed(range(len(self._layout.hidden))):
            self._hidden(number, first)
        for number in reversed(range(len(self._layout.convolutions))):
            source = self._activations.outputs[number - 1] if number else self._images
            # Weight gradients of a layer are summed in parallel with the gradient of its input.
            with self._beside():
                self._sum_weight_gradient(number, source, rows)
            if number:
                self._input_gradient(number)
            # This comes last, because the step changes weights that the gradient of the input uses.
            with self._beside():
                self._weight_step(number, source, rows, first)
        self._together()

    @property
    def _sgd(self) -> tuple[float, float, float]:
        return self._training.rate, self._training.momentum, self._training.weight_decay

    def _before_hidden(self, number: int) -> Tensor:
        """Return the buffer for the input gradient of hidden layer `number` (see `Activations.before_hidden`)."""
        return self._hidden_gradients[number - 1] if number else self._gradients[-1]

    # -- linear layers -------------------------------------------------------------------------------------------

    def _classify(self, rows: Tensor, first: bool) -> None:
        last, batch, behind = self._layout.last, self._batch, len(self._layout.hidden)
        round_kernels.classify[(self._groups,)](
            self._activations.before_hidden(behind), self._labels, rows, self._params, self._velocities,
            self._before_hidden(behind), batch, self._layout.size, batch, last.weight_at, last.bias_at, *self._sgd,
            IN=last.features_in, OUT=last.features_out, BM=power_of_two(batch), BN=power_of_two(last.features_out),
            BK=min(128, power_of_two(last.features_in)) if last.features_out <= 64 else 32,
            FIRST=first, num_warps=4, num_stages=1,
        )  # fmt: skip

    def _hidden(self, number: int, first: bool) -> None:
        place, activations = self._layout.hidden[number], self._activations
        wide = min(64, power_of_two(place.features_out))
        round_kernels.hidden_layer_backward[(-(-place.features_in // 32), self._groups)](
            activations.before_hidden(number), activations.hidden[number], self._hidden_gradients[number],
            self._params, self._velocities, self._before_hidden(number),
            self._layout.size, self._batch, place.weight_at, place.bias_at, self._plan.keep_scale, *self._sgd,
            IN=place.features_in, OUT=place.features_out, BM=power_of_two(self._batch), BF=32, BO=wide,
            num_warps=4, num_stages=in_flight(2, place.features_out, wide), FIRST=first,
        )  # fmt: skip

    # -- convolutions --------------------------------------------------------------------------------------------

    def _input_gradient(self, number: int) -> None:
        layer, gradient, spread = self._layout.convolutions[number], self._gradients[number], self._spread[number]
        convolution_kernels.spread_gradient[(-(-gradient.numel() // 1024),)](
            gradient, self._activations.winners[number], spread, gradient.numel(),
            CO=layer.channels_out, POOL=layer.pool, PH=layer.height_out, PW=layer.width_out,
            SH=layer.height_in + 2, SW=layer.width_in + 2, LEAD=2 - layer.padding, BLOCK=1024,
        )  # fmt: skip
        pixels = self._batch * layer.height_in * layer.width_in
        tiles = self._plan.tiles("input", number)
        convolution_kernels.convolution_input_gradient[(-(-pixels // tiles.rows), self._groups)](
            spread, self._params, self._gradients[number - 1],
            self._layout.size, self._batch, layer.weight_at,
            H=layer.height_in, W=layer.width_in, CI=layer.channels_in, CO=layer.channels_out,
            BM=tiles.rows, BN=power_of_two(layer.channels_in), BK=tiles.inner,
            num_warps=tiles.warps, num_stages=in_flight(tiles.stages, 9 * layer.channels_out, tiles.inner),
        )  # fmt: skip

    def _sum_weight_gradient(self, number: int, source: Tensor, rows: Tensor) -> None:
        """Compute the partial sums of a convolution's weight gradient, if its form has any."""
        layer, form, partial = self._layout.convolutions[number], self._plan.forms[number], self._partials[number]
        if partial is None:
            return
        arguments = (
            source, rows, self._gradients[number], self._activations.winners[number], partial,
            rows.stride(0), self._groups, _length(layer), layer.bias_at - layer.weight_at,
        )  # fmt: skip
        flags = {"PARTS": form.parts, "BATCH": self._batch, **self._plan.shape(number)}
        outputs = -(-self._batch * layer.height_out * layer.width_out // form.parts)
        if form.kind == "block":
            weight_gradient_kernels.block_weight_gradient[(form.parts, self._groups)](
                *arguments, BR=32, num_warps=2, num_stages=in_flight(2, outputs, 32), **flags
            )
        elif form.kind == "row":
            wide = min(layer.channels_in, 32)
            weight_gradient_kernels.row_weight_gradient[(3 * layer.channels_in // wide, form.parts, self._groups)](
                *arguments, BC=wide, BR=16, num_warps=2, num_stages=in_flight(2, outputs, 16), **flags
            )
        else:
            tiles = self._plan.tiles("weight", number)
            grid = (-(-9 * layer.channels_in // tiles.rows), form.parts, self._groups)
            weight_gradient_kernels.convolution_weight_gradient[grid](
                *arguments, POOL=layer.pool, BKW=tiles.rows, BR=tiles.inner, num_warps=tiles.warps,
                num_stages=in_flight(tiles.stages, outputs, tiles.inner), **flags,
            )  # fmt: skip

    def _weight_step(self, number: int, source: Tensor, rows: Tensor, first: bool) -> None:
        """Take one step of a convolution's weights, from the partial sums or directly from the gradient."""
        layer, partial = self._layout.convolutions[number], self._partials[number]
        size, groups, length = self._layout.size, self._groups, _length(layer)
        if partial is None:
            weight_gradient_kernels.descend_by_weight_gradient[(-(-9 * layer.channels_in // 64), groups)](
                source, rows, self._gradients[number], self._activations.winners[number], self._params,
                self._velocities, rows.stride(0), size, layer.weight_at, layer.bias_at, *self._sgd,
                BKW=64, BR=32, num_warps=4, num_stages=1, BATCH=self._batch, FIRST=first, **self._plan.shape(number),
            )  # fmt: skip
            return
        round_kernels.descend_convolution[(-(-length // 256), groups)](
            partial, self._params, self._velocities, groups, size, length, layer.weight_at, *self._sgd,
            PARTS=self._plan.forms[number].stored, BLOCK=256, num_warps=2, FIRST=first,
        )  # fmt: skip

    # -- two streams ---------------------------------------------------------------------------------------------

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Run the enclosed kernels after all earlier kernels and in parallel with later kernels, until `_together`."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            yield

    def _together(self) -> None:
        """Make later kernels wait for all kernels that run in parallel."""
        if self._side is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._side)


def _length(layer: ConvolutionPlace) -> int:
    """Return the number of weights and biases of a convolution."""
    return layer.bias_at - layer.weight_at + layer.channels_out


def with_border(network: ConvNet, images: Tensor) -> Tensor:
    """Return images (samples, height, width, channels) as kernels read them: with a zero border and padded channels."""
    border = network.convolutions[0].padding
    extra = stored_channels(images.shape[3]) - images.shape[3]
    return torch.nn.functional.pad(images, (0, extra, border, border, border, border)).contiguous()


class ConvProgram:
    """Program that trains a `ConvNet` on `images` prepared by `with_border`, in several lanes.

    `history[k, l]` is the model of lane l after k rounds, in device order. Only slots that hold a client are trained
    (`schedule.Packing`). `summed_for` is the number of slots that determines how sums are split. It is the same for the
    whole run, so that the results of a group of clients do not depend on the lanes that run in parallel.
    """

    def __init__(self, network: ConvNet, images: Tensor, labels: Tensor, plan: ProgramPlan, *, summed_for: int) -> None:
        self.plan, self.device, self.training = (
            ConvPlan.of(network, plan.batch, summed_for),
            images.device,
            plan.training,
        )
        self.lanes, self.slots, self.width, self.size = plan.lanes, plan.slots, plan.width, self.plan.layout.size
        chunk, steps, places = plan.chunk, plan.training.steps, (plan.chunk, plan.lanes, plan.slots)
        self.history = self._zeros(chunk + 1, self.lanes, self.size)
        self.origins = self._zeros(self.lanes, self.size, kind=torch.float64)
        self.params = self._zeros(self.width, self.size)
        self.counter = self._zeros(1, kind=torch.int64)
        self.measured = self._zeros(chunk, self.lanes, self.slots + 3, kind=torch.float64)
        """Drifts of the slots, distance of the mean from the start, of the new model from `origins`, norm of the start.

        One row for each round and lane.
        """
        self.weights = self._zeros(*places, kind=torch.float64)
        self._order = self._zeros(chunk, self.width, kind=torch.int64)
        self._places = self._zeros(*places, kind=torch.int64).sub_(1)
        self._rows = torch.full((chunk, steps, self.width, plan.batch), -1, dtype=torch.int32, device=self.device)
        self._now_rows = torch.full_like(self._rows[0], -1)
        self.dropout = self._zeros(chunk, steps, max(len(network.hidden), 1), self.width, kind=torch.int64)
        self._now_dropout = torch.zeros_like(self.dropout[0])
        self._blocks = -(-self.size // BLOCK)
        self._partial = self._zeros(self.lanes, self.slots + 3, self._blocks, kind=torch.float64)
        self._activations = Activations.of(self.plan, self.width * plan.batch, self.device)
        self._forward = ConvForward(self.plan, images, labels)
        self._backward = ConvBackward(
            self.plan, plan.training, images, labels, self.params, self._activations, plan.batch
        )
        self._rounds = CapturedRounds(self.counter, self.history)

    def _zeros(self, *shape: int, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=kind, device=self.device)

    def load(self, schedule: Schedule) -> None:
        """Load the schedule of the next rounds."""
        packing, rounds = Packing.of(schedule.participants, self.width), schedule.rows.shape[0]
        self._order[:rounds], self._places[:rounds] = packing.order, packing.places
        self._rows[:rounds], self.weights[:rounds] = packing.rows(schedule), schedule.weights
        if self.plan.dropout:
            self.dropout[:rounds] = packing.dropout(schedule)

    def run(self, rounds: int) -> None:
        """Run `rounds` rounds from `history[0]`; afterwards `history[k]` is the model after k rounds."""
        self._rounds.run(self._round, rounds)

    def evaluate(self, models: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return whether each of `rows` (lanes, samples) is classified correctly by its lane's model, and its loss."""
        return self._forward.evaluate(models, rows)

    def _round(self) -> None:
        """Run the round that `counter` selects."""
        self._local_steps()
        round_kernels.average[(self._blocks, self.lanes)](
            self.history, self.counter, self._places, self.params, self.weights, self.origins, self._partial,
            self.lanes, self.size, SLOTS=self.slots, BLOCK=BLOCK,
        )  # fmt: skip
        round_kernels.collect[(self.lanes, self.slots + 3)](
            self._partial, self.counter, self.measured, self.lanes,
            BLOCKS=self._blocks, QUANTITIES=self.slots + 3, BLOCK=128,
        )  # fmt: skip
        self.counter.add_(1)

    def _local_steps(self) -> None:
        """Distribute the models and train them by the schedule of the round that `counter` selects."""
        dropout = bool(self.plan.dropout)
        self._now_rows.copy_(self._rows.index_select(0, self.counter)[0])
        if dropout:
            self._now_dropout.copy_(self.dropout.index_select(0, self.counter)[0])
        round_kernels.hand_out[(self._blocks, self.width)](
            self.history, self.counter, self._order, self.params, self.lanes, self.width, self.size,
            SLOTS=self.slots, BLOCK=BLOCK,
        )  # fmt: skip
        for step in range(self.training.steps):
            rows, keys = self._now_rows[step], self._now_dropout[step] if dropout else None
            self._forward.train(rows, self.params, self._activations, keys)
            self._backward.step(rows, first=step == 0)
