"""Where every layer of a `ConvNet` lies in a slot's parameters on the device.

On the device a layer is a matrix [inputs, outputs] followed by its bias; a convolution's inputs run over
(row, column, channel) of its 3x3 patch, and images are NHWC, so a linear layer behind them sees (row, column, channel)
too. Convolutions come first. `to_device[j]` says which entry of the model's own vector lies at j; norms, means and
distances do not care, so vectors are only put back in order when they leave the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sifu.sim.networks import ConvNet


@dataclass(frozen=True)
class ConvolutionPlace:
    """A 3x3 convolution: input H x W x CI, stored output PH x PW x CO (after pooling)."""

    height: int
    width: int
    channels_in: int
    channels_out: int
    padding: int
    pool: bool
    out_height: int
    out_width: int
    weight_at: int
    bias_at: int


@dataclass(frozen=True)
class LinearPlace:
    """A linear layer of `inputs` x `outputs` weights."""

    inputs: int
    outputs: int
    weight_at: int
    bias_at: int


@dataclass(frozen=True)
class DeviceLayout:
    """All layers, and the permutation between the model's vector and the device's."""

    convolutions: tuple[ConvolutionPlace, ...]
    hidden: tuple[LinearPlace, ...]
    last: LinearPlace
    size: int
    convolution_size: int
    to_device: NDArray[np.int64]

    @staticmethod
    def of(network: ConvNet) -> DeviceLayout:
        """The places of a network's layers."""
        channels, height, width = network.input_shape
        order: list[NDArray[np.int64]] = []
        convolutions: list[ConvolutionPlace] = []
        at = 0

        def add(weights: NDArray[np.int64], biases: int, start: int) -> tuple[int, int]:
            nonlocal at
            order.extend([weights.reshape(-1), np.arange(start + weights.size, start + weights.size + biases)])
            spot = at
            at += weights.size + biases
            return spot, spot + weights.size

        for one in network.convolutions:
            shape = (one.channels_out, channels, 3, 3)
            own = at + np.arange(int(np.prod(shape))).reshape(shape)
            spot = add(own.transpose(2, 3, 1, 0), one.channels_out, at)
            rows, columns = height + 2 * one.padding - 2, width + 2 * one.padding - 2
            stored = (rows // 2, columns // 2) if one.pool else (rows, columns)
            convolutions.append(
                ConvolutionPlace(
                    height, width, channels, one.channels_out, one.padding, one.pool, stored[0], stored[1], *spot
                )
            )
            channels, (height, width) = one.channels_out, stored
        convolution_size = at
        # torch flattens (channel, row, column); the device has (row, column, channel).
        flat = np.arange(channels * height * width).reshape(channels, height * width).T.reshape(-1)
        linear: list[LinearPlace] = []
        for outputs in (*network.hidden, network.outputs):
            own = at + np.arange(outputs * flat.size).reshape(outputs, flat.size)[:, flat]
            spot = add(own.T, outputs, at)
            linear.append(LinearPlace(flat.size, outputs, *spot))
            flat = np.arange(outputs)
        return DeviceLayout(
            tuple(convolutions), tuple(linear[:-1]), linear[-1], at, convolution_size, np.concatenate(order)
        )
