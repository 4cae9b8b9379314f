"""How a `ConvNet` is computed on the device: the form and the block sizes of every layer's kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from sifu.engines.sim.gpu.device_layout import ConvolutionPlace, DeviceLayout
from sifu.engines.sim.networks import ConvNet

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
        channels, outputs = layer.channels_in, batch * layer.out_height * layer.out_width
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

    def border(self, number: int) -> int:
        """The zeros around the output of a convolution: the next one's padding."""
        later = self.layout.convolutions[number + 1 :]
        return later[0].padding if later else 0

    def output_shape(self, number: int, samples: int) -> tuple[int, int, int, int]:
        """The output of a convolution for some samples, with its border."""
        layer, border = self.layout.convolutions[number], self.border(number)
        return samples, layer.out_height + 2 * border, layer.out_width + 2 * border, layer.channels_out

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
