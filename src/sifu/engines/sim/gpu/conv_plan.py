"""How a `ConvNet` is computed on the device: form and block sizes of every layer's kernels, and where parameters lie.

On the device a layer is a matrix [inputs, outputs] followed by its bias; a convolution's inputs run over
(row, column, channel) of its 3x3 patch, and images are NHWC, so a linear layer behind them sees (row, column, channel)
too. Convolutions come first, and every matrix and bias begins at a multiple of `ALIGNMENT` entries, so that loads are
16 bytes wide; the gaps are zero and stay zero. Norms, means and distances do not care about the order, so vectors are
only put back when they leave the device.
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
    """Channels of an image on the device: a multiple of 4 (or 1), so that a pixel is loaded in one go."""
    return channels if channels == 1 else -(-channels // 4) * 4


def stored_outputs(channels: int) -> int:
    """Channels of a convolution's output on the device: a multiple of 8, those behind the last being zero.

    Their weights are gaps: zero, with gradients of zero. Without them a convolution of 3 channels into 4 behind another
    one was compiled for an H200 to outputs that were 10 to 30 % off, while Triton's interpreter was right.
    """
    return -(-channels // 8) * 8


@dataclass(frozen=True)
class ConvolutionPlace(ConvLayer):
    """A convolution with its channels as they are stored, and with the places of its parameters on the device."""

    bias_at: int = 0


@dataclass(frozen=True)
class LinearPlace(LinearLayer):
    """A linear layer with its inputs as they are stored, and with the places of its parameters on the device."""

    bias_at: int = 0


@dataclass(frozen=True)
class DeviceLayout:
    """All layers, and the permutation between the model's vector and the device's."""

    convolutions: tuple[ConvolutionPlace, ...]
    hidden: tuple[LinearPlace, ...]
    last: LinearPlace
    size: int
    entries: NDArray[np.int64]
    """Where each entry of the model's own vector lies on the device."""

    @staticmethod
    def of(network: ConvNet) -> DeviceLayout:
        """The places of a network's layers."""
        entries = np.zeros(network.parameters, dtype=np.int64)
        at = 0

        def add(own: NDArray[np.int64]) -> int:
            """Give these entries of the model's vector the next places (-1: a gap); returns the first."""
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
    """Where the weights of a layer lie in the model's own vector, in their shape."""
    return layer.weight_at + np.arange(math.prod(layer.weight_shape)).reshape(layer.weight_shape)


PRECISIONS = {"float32": "ieee", "tf32": "tf32", "tf32x3": "tf32x3"}
BLOCK_CHANNELS = (1, 2, 4)
"""Input channels for which a pooled convolution looks at blocks of 4 x 4 pixels; others would fill no matrix."""
ENOUGH_PROGRAMS = 1024
"""Programs that keep the chip busy: with more of them, one may do several tiles."""


def power_of_two(value: int, least: int = 16) -> int:
    """The smallest power of two that holds `value`, and at least `least`: the side of a tile."""
    return max(least, 1 << (value - 1).bit_length())


def in_flight(stages: int, length: int, inner: int) -> int:
    """How many passes of a loop over `length` in steps of `inner` are under way at once: `stages`, or 1 if it has two.

    Triton 3.6 compiled loops of two passes, over an odd number of channels and with three stages, to sums that were 10
    to 30 % off on an H200; with one stage they were right. Stages change no sum.
    """
    return 1 if -(-length // inner) == 2 else stages


def _parts(*limits: int) -> int:
    """The largest power of two within all limits, at least 1."""
    return 1 << max(0, min(limits).bit_length() - 1)


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
    def of(layer: ConvolutionPlace, batch: int, slots: int, precision: str) -> WeightForm:
        """The form measured to be good on an H200; without tensor cores it is the one with the least arithmetic."""
        if precision == "ieee":
            return WeightForm("patch", _parts(64 // slots, 8))
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
    """A network on the device: where its layers lie, and how its convolutions are computed.

    `precision` is that of products as Triton names it. Lanes have no part in it: see `WeightForm`.
    """

    layout: DeviceLayout
    forms: tuple[WeightForm, ...]
    dropout: float
    precision: str

    @staticmethod
    def of(network: ConvNet, batch: int, slots: int, precision: str) -> ConvPlan:
        """The plan for local steps of `slots` clients per lane with batches of `batch`; a key of `PRECISIONS`."""
        layout, products = DeviceLayout.of(network), PRECISIONS[precision]
        forms = tuple(WeightForm.of(layer, batch, slots, products) for layer in layout.convolutions)
        return ConvPlan(layout, forms, network.dropout, products)

    @property
    def keep_scale(self) -> float:
        """What dropout multiplies the units with that it keeps."""
        return 1.0 / (1.0 - self.dropout) if self.dropout else 1.0

    @property
    def dropped_below(self) -> int:
        """Draws of 53 bits below this drop their unit."""
        return math.ceil(self.dropout * 2.0**53)

    def shape(self, number: int) -> dict[str, Any]:
        """What kernels are told about a convolution: its input with padding, and its output after pooling."""
        layer = self.layout.convolutions[number]
        return {
            "H": layer.height_in + 2 * layer.padding, "W": layer.width_in + 2 * layer.padding, "CI": layer.channels_in,
            "CO": layer.channels_out, "PH": layer.height_out, "PW": layer.width_out, "GATHER": number == 0,
            "BN": power_of_two(layer.channels_out), "PRECISION": self.precision,
        }  # fmt: skip

    def border(self, number: int) -> int:
        """The zeros around the output of a convolution: the next one's padding."""
        later = self.layout.convolutions[number + 1 :]
        return later[0].padding if later else 0

    def output_shape(self, number: int, samples: int) -> tuple[int, int, int, int]:
        """The output of a convolution for some samples, with its border."""
        layer, border = self.layout.convolutions[number], self.border(number)
        return samples, layer.height_out + 2 * border, layer.width_out + 2 * border, layer.channels_out

    def tiles(self, kernel: Literal["convolve", "input", "weight"], number: int) -> Tiles:
        """Block sizes of a convolution's kernels, measured to be good on an H200."""
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
