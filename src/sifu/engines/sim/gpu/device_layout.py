"""Where every layer of a `ConvNet` lies in a slot's parameters on the device.

On the device a layer is a matrix [inputs, outputs] followed by its bias; a convolution's inputs run over
(row, column, channel) of its 3x3 patch, and images are NHWC, so a linear layer behind them sees (row, column, channel)
too. Convolutions come first, and every matrix and bias begins at a multiple of `ALIGNMENT` entries, so that loads are
16 bytes wide; the gaps are zero and stay zero. Norms, means and distances do not care about the order, so vectors are
only put back when they leave the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sifu.engines.sim.networks import ConvNet

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
class ConvolutionPlace:
    """A 3x3 convolution: input H x W x CI, stored output PH x PW x CO (after pooling), channels as they are stored."""

    height: int
    width: int
    channels_in: int
    channels_out: int
    padding: int
    pool: bool
    relu: bool
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
            own = convolution.weight_at + np.arange(math.prod(convolution.weight_shape)).reshape(
                convolution.weight_shape
            )
            real = convolution.channels_out
            channels = convolutions[-1].channels_out if convolutions else stored_channels(convolution.channels_in)
            outputs = stored_outputs(real)
            weights = np.full((3, 3, channels, outputs), -1, dtype=np.int64)
            weights[:, :, : convolution.channels_in, :real] = own.transpose(2, 3, 1, 0)
            bias = np.full(outputs, -1, dtype=np.int64)
            bias[:real] = convolution.bias_at + np.arange(real)
            spot = add(weights), add(bias)
            convolutions.append(
                ConvolutionPlace(
                    convolution.height_in, convolution.width_in, channels, outputs,
                    convolution.padding, convolution.pool, convolution.relu,
                    convolution.height_out, convolution.width_out, *spot,
                )
            )  # fmt: skip
        last = network.convolution_layers[-1]
        # torch flattens (channel, row, column); the device has (row, column, channel).
        flat = np.full((last.height_out * last.width_out, stored_outputs(last.channels_out)), -1, dtype=np.int64)
        flat[:, : last.channels_out] = np.arange(last.features_out).reshape(last.channels_out, -1).T
        inputs = flat.reshape(-1)
        linear = []
        for layer in network.linear_layers:
            matrix = layer.weight_at + np.arange(math.prod(layer.weight_shape)).reshape(layer.weight_shape)
            own = np.where(inputs >= 0, matrix[:, inputs], -1)
            spot = add(own.T), add(layer.bias_at + np.arange(layer.features_out))
            linear.append(LinearPlace(inputs.size, layer.features_out, *spot))
            inputs = np.arange(layer.features_out)
        return DeviceLayout(tuple(convolutions), tuple(linear[:-1]), linear[-1], at, entries)
