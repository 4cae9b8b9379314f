"""Plan for computing a `ConvNet` on the device: kernel forms, block sizes, and positions of parameters.

On the device a layer is a matrix [inputs, outputs] followed by its bias. The inputs of a convolution are ordered by
(row, column, channel) of its 3x3 patch. Images are NHWC, so the inputs of the first linear layer have the same order.
Convolutions come first. Every matrix and bias begins at a multiple of `ALIGNMENT` entries, so that loads are 16 bytes
wide; the gaps are zero and stay zero. Norms, means and distances do not depend on the order of the entries, so vectors
are reordered only when they leave the device.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sifu.engines.sim.networks import ConvLayer, ConvNet, LinearLayer

ALIGNMENT = 16


def stored_channels(channels: int) -> int:
    """Return the number of stored channels of an image: 1 or a multiple of 4, so that one load reads a pixel."""
    return channels if channels == 1 else -(-channels // 4) * 4


def stored_outputs(channels: int) -> int:
    """Return the number of stored channels of a convolution's output: a multiple of 8, padded with zeros.

    The weights of padded channels are gaps: zero, with zero gradients. Without the padding, a second convolution from 3
    to 4 channels, compiled for an H200, gave outputs that were 10 to 30 % off; Triton's interpreter was correct.
    """
    return -(-channels // 8) * 8


@dataclass(frozen=True)
class ConvolutionPlace(ConvLayer):
    """Convolution with its stored numbers of channels and the positions of its parameters on the device."""

    bias_at: int = 0


@dataclass(frozen=True)
class LinearPlace(LinearLayer):
    """Linear layer with its stored number of inputs and the positions of its parameters on the device."""

    bias_at: int = 0


@dataclass(frozen=True)
class DeviceLayout:
    """Layers on the device, and the mapping from the model's vector to the vector on the device."""

    convolutions: tuple[ConvolutionPlace, ...]
    hidden: tuple[LinearPlace, ...]
    last: LinearPlace
    size: int
    entries: NDArray[np.int64]
    """Position on the device of each entry of the model's own vector."""

    @staticmethod
    def of(network: ConvNet) -> DeviceLayout:
        """Compute the positions of a network's layers."""
        entries = np.zeros(network.parameters, dtype=np.int64)
        at = 0

        def add(own: NDArray[np.int64]) -> int:
            """Assign the next positions to entries of the model's vector (-1: a gap); return the first position."""
            nonlocal at
            start, flat = at, own.reshape(-1)
            entries[flat[flat >= 0]] = start + np.flatnonzero(flat >= 0)
            at += -(-own.size // ALIGNMENT) * ALIGNMENT
            return start

        convolutions: list[ConvolutionPlace] = []
        for convolution in network.convolution_layers:
            own, real = _weight_entries(convolution), convolution.channels_out
            channels = convolutions[-1].channels_out if convolutions else stored_channels(convolution.channels_in)
            outputs = stored_outputs(real)
            weights = np.full((3, 3, channels, outputs), -1, dtype=np.int64)
            weights[:, :, : convolution.channels_in, :real] = own.transpose(2, 3, 1, 0)
            bias = np.full(outputs, -1, dtype=np.int64)
            bias[:real] = convolution.bias_at + np.arange(real)
            stored = replace(convolution, channels_in=channels, channels_out=outputs, weight_at=add(weights))
            convolutions.append(ConvolutionPlace(**asdict(stored), bias_at=add(bias)))
        last = network.convolution_layers[-1]
        # torch flattens (channel, row, column); the device has (row, column, channel).
        flat = np.full((last.height_out * last.width_out, stored_outputs(last.channels_out)), -1, dtype=np.int64)
        flat[:, : last.channels_out] = np.arange(last.features_out).reshape(last.channels_out, -1).T
        inputs = flat.reshape(-1)
        linear = []
        for layer in network.linear_layers:
            own = np.where(inputs >= 0, _weight_entries(layer)[:, inputs], -1)
            stored_layer = replace(layer, features_in=inputs.size, weight_at=add(own.T))
            bias_at = add(layer.bias_at + np.arange(layer.features_out))
            linear.append(LinearPlace(**asdict(stored_layer), bias_at=bias_at))
            inputs = np.arange(layer.features_out)
        return DeviceLayout(tuple(convolutions), tuple(linear[:-1]), linear[-1], at, entries)


def _weight_entries(layer: ConvLayer | LinearLayer) -> NDArray[np.int64]:
    """Return the positions of a layer's weights in the model's own vector, in the shape of the weights."""
    return layer.weight_at + np.arange(math.prod(layer.weight_shape)).reshape(layer.weight_shape)


BLOCK_CHANNELS = (1, 2, 4)
"""Numbers of input channels for which a pooled convolution uses blocks of 4 x 4 pixels."""
ENOUGH_PROGRAMS = 1024
"""Number of programs that keep the whole GPU busy. Beyond this number, one program may compute several tiles."""


def power_of_two(value: int) -> int:
    """Return the side of a tile: the smallest power of two that is at least max(`value`, 16)."""
    return max(16, 1 << (value - 1).bit_length())


def in_flight(stages: int, length: int, inner: int) -> int:
    """Return the number of pipeline stages of a loop over `length` in steps of `inner`.

    The result is 1 if the loop has two passes, and `stages` otherwise. This avoids a defect of Triton 3.6: on an H200,
    loops of two passes over an odd number of channels computed sums that were wrong by 10 to 30 % with three stages,
    and correct sums with one stage. Apart from this defect, the number of stages does not change the sums.
    """
    return 1 if -(-length // inner) == 2 else stages


def _parts(*limits: int) -> int:
    """Return the largest power of two within all limits, at least 1."""
    return 1 << max(0, min(limits).bit_length() - 1)


@dataclass(frozen=True)
class Tiles:
    """Block sizes, warps and pipeline stages of a kernel."""

    rows: int
    inner: int
    warps: int
    stages: int


@dataclass(frozen=True)
class WeightForm:
    """Method of summing a convolution's weight gradient.

    `block` and `row` are for pooled convolutions with few and with many channels, `whole` is for unpooled convolutions
    with few outputs, and `patch` for all others. Sums over samples are split into `parts`, because a few slots alone
    would leave most of the GPU idle; `stored` partial sums stay in memory until the step. The form determines how sums
    are rounded. It must therefore not depend on how many lanes run together: the results of a lane must not depend on
    other lanes.
    """

    kind: Literal["block", "row", "whole", "patch"]
    parts: int

    @property
    def stored(self) -> int:
        """Number of stored partial sums of each weight, or 0 if the kernel takes the step itself."""
        return {"block": 4 * self.parts, "whole": 0}.get(self.kind, self.parts)

    @staticmethod
    def of(layer: ConvolutionPlace, batch: int, slots: int) -> WeightForm:
        """Return a form that was fast on an H200."""
        channels, outputs = layer.channels_in, batch * layer.height_out * layer.width_out
        if layer.pool and channels in BLOCK_CHANNELS:
            return WeightForm("block", _parts(outputs // 32, 80 // slots, 16))
        if layer.pool and channels >= 16 and channels == power_of_two(channels):
            return WeightForm("row", _parts(outputs // 32, 64 // slots, 8))
        if not layer.pool and outputs <= 512:
            return WeightForm("whole", 1)
        return WeightForm("patch", _parts(outputs // 32, 64 // slots, 8))


@dataclass(frozen=True)
class ConvPlan:
    """Plan of a network on the device: positions of its layers, and forms of its convolutions.

    The plan does not depend on the lanes (see `WeightForm`).
    """

    layout: DeviceLayout
    forms: tuple[WeightForm, ...]
    dropout: float

    @staticmethod
    def of(network: ConvNet, batch: int, slots: int) -> ConvPlan:
        """Make the plan for computing a network.

        Args:
            network: The network to compute.
            batch: Maximum batch size.
            slots: Clients per lane.
        """
        layout = DeviceLayout.of(network)
        forms = tuple(WeightForm.of(layer, batch, slots) for layer in layout.convolutions)
        return ConvPlan(layout, forms, network.dropout)

    @property
    def keep_scale(self) -> float:
        """Scale factor applied to the units dropout keeps."""
        return 1.0 / (1.0 - self.dropout) if self.dropout else 1.0

    @property
    def dropped_below(self) -> int:
        """Threshold of dropout: a unit is dropped if its 53-bit draw is smaller."""
        return math.ceil(self.dropout * 2.0**53)

    def shape(self, number: int) -> dict[str, Any]:
        """Return the kernel arguments of a convolution: its padded input and its output after pooling."""
        layer = self.layout.convolutions[number]
        return {
            "H": layer.height_in + 2 * layer.padding, "W": layer.width_in + 2 * layer.padding, "CI": layer.channels_in,
            "CO": layer.channels_out, "PH": layer.height_out, "PW": layer.width_out, "GATHER": number == 0,
            "BN": power_of_two(layer.channels_out),
        }  # fmt: skip

    def border(self, number: int) -> int:
        """Return the width of the zero border around a convolution's output: the padding of the next convolution."""
        later = self.layout.convolutions[number + 1 :]
        return later[0].padding if later else 0

    def output_shape(self, number: int, samples: int) -> tuple[int, int, int, int]:
        """Return the shape of a convolution's output for some samples, including its border."""
        layer, border = self.layout.convolutions[number], self.border(number)
        return samples, layer.height_out + 2 * border, layer.width_out + 2 * border, layer.channels_out

    def tiles(self, kernel: Literal["convolve", "input", "weight"], number: int) -> Tiles:
        """Return block sizes for a kernel of convolution `number`; they were fast on an H200."""
        layer = self.layout.convolutions[number]
        if kernel == "convolve":
            if layer.channels_in <= 4:
                return Tiles(64, 16, 4, 3)
            if not layer.pool and 9 * layer.channels_in % 64 == 0:
                return Tiles(32, 64, 4, 3)
            return Tiles(32, 32, 4, 3) if 9 * layer.channels_in % 32 == 0 else Tiles(64, 16, 4, 3)
        if kernel == "input":
            return Tiles(128, 32, 4, 3) if layer.channels_out >= 32 else Tiles(128, 16, 4, 4)
        if not layer.pool:
            return Tiles(64, 64, 4, 2)
        if layer.channels_in <= 4:
            return Tiles(16 if layer.channels_in == 1 else 64, 32, 2, 2)
        return Tiles(32, 32 if layer.channels_in >= 32 else 64, 2, 2)
