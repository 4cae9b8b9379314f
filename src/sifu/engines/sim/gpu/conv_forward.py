"""Launches that take images through a `ConvNet` of every slot, in local steps and in evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sifu.engines.sim.gpu import convolution_kernels, linear_kernels
from sifu.engines.sim.gpu.conv_plan import ENOUGH_PROGRAMS, ConvPlan, in_flight, power_of_two

EVALUATED_AT_ONCE = 2**27
"""Bytes of the largest activation tensor in evaluation."""


@dataclass(frozen=True)
class Activations:
    """What the layers made of a batch of every slot: `winners` are the positions that max-pooling chose."""

    outputs: tuple[Tensor, ...]
    winners: tuple[Tensor, ...]
    hidden: tuple[Tensor, ...]

    @staticmethod
    def of(plan: ConvPlan, samples: int, device: torch.device) -> Activations:
        """Room for `samples` of all slots together; borders are zero and stay so."""
        convolutions = plan.layout.convolutions
        shapes = [(samples, layer.out_height, layer.out_width, layer.channels_out) for layer in convolutions]
        return Activations(
            tuple(torch.zeros(plan.output_shape(number, samples), device=device) for number in range(len(shapes))),
            tuple(torch.zeros(shape, dtype=torch.int8, device=device) for shape in shapes),
            tuple(torch.zeros((samples, layer.outputs), device=device) for layer in plan.layout.hidden),
        )

    def before_hidden(self, number: int) -> Tensor:
        """The input of a hidden layer; of the last layer behind the last of them."""
        return self.hidden[number - 1] if number else self.outputs[-1]


class ConvForward:
    """The way forward through a network, for any number of slots.

    `images` lie in a border of zeros as wide as the first convolution's padding; a batch is given as `rows` of them,
    (slots, samples), of which negative ones are none.
    """

    def __init__(self, plan: ConvPlan, images: Tensor, labels: Tensor) -> None:
        self._plan, self._layout = plan, plan.layout
        self._images, self._labels = images, labels

    def train(self, rows: Tensor, params: Tensor, into: Activations, dropout_keys: Tensor | None) -> None:
        """The activations of a batch of every slot; `dropout_keys` are (hidden layers, slots)."""
        self._through(rows, params, into.outputs, into.hidden, into.winners, dropout_keys)

    def evaluate(self, models: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Whether each of `rows` (lanes, samples) is classified rightly by its lane's model, and its loss."""
        lanes, samples = rows.shape
        correct = torch.zeros((lanes, samples), dtype=torch.int32, device=rows.device)
        losses = torch.zeros((lanes, samples), dtype=torch.float32, device=rows.device)
        widest = max(
            [layer.out_height * layer.out_width * layer.channels_out for layer in self._layout.convolutions]
            + [layer.outputs for layer in self._layout.hidden]
        )
        at_once = max(1, EVALUATED_AT_ONCE // (4 * widest * lanes))
        for start in range(0, samples, at_once):
            part = slice(start, start + at_once)
            correct[:, part], losses[:, part] = self._score(models, rows[:, part])
        return correct, losses

    def _score(self, models: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        (lanes, batch), last, device = rows.shape, self._layout.last, rows.device
        samples = lanes * batch
        # Made one by one as they are needed, so that only two of them take memory at a time.
        outputs = (self._output(number, samples, device) for number in range(len(self._layout.convolutions)))
        hidden = (torch.empty((samples, place.outputs), device=device) for place in self._layout.hidden)
        source = self._through(rows, models, outputs, hidden)
        correct = torch.empty((lanes, batch), dtype=torch.int32, device=device)
        losses = torch.empty((lanes, batch), device=device)
        linear_kernels.score[(-(-batch // 32), lanes)](
            source, self._labels, rows, models, correct, losses,
            rows.stride(0), self._layout.size, batch, last.weight_at, last.bias_at,
            IN=last.inputs, OUT=last.outputs, BM=32, BN=power_of_two(last.outputs), BK=32,
            PRECISION=self._plan.precision, num_warps=4, num_stages=in_flight(2, last.inputs, 32),
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
        """All layers but the last; returns what goes into that one."""
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
        pixels = batch * layer.out_height * layer.out_width
        arguments = (
            source, rows, params, out, winner if winner is not None else out,
            rows.stride(0), self._layout.size, batch, layer.weight_at, layer.bias_at,
        )  # fmt: skip
        flags = {
            "H": layer.height + 2 * layer.padding, "W": layer.width + 2 * layer.padding, "CI": layer.channels_in,
            "CO": layer.channels_out, "PH": layer.out_height, "PW": layer.out_width,
            "BORDER": self._plan.border(number), "RELU": layer.relu, "GATHER": number == 0,
            "KEEP_WINNER": winner is not None, "BN": power_of_two(layer.channels_out),
            "PRECISION": self._plan.precision,
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
        # How wide a tile is changes no sum: every output has its own.
        wide = 16 if groups * place.outputs < 2 * ENOUGH_PROGRAMS else 32
        linear_kernels.hidden_layer[(-(-place.outputs // wide), -(-batch // tall), groups)](
            source, params, out, dropout_keys if dropout_keys is not None else out,
            self._layout.size, batch, place.weight_at, place.bias_at, plan.keep_scale, plan.dropped_below,
            IN=place.inputs, OUT=place.outputs, DROPOUT=dropout_keys is not None,
            BM=tall, BN=wide, BK=64, PRECISION=plan.precision, num_warps=4, num_stages=in_flight(3, place.inputs, 64),
        )  # fmt: skip
