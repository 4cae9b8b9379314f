"""Convolutional networks on which passes are compared with the plain loop."""

from __future__ import annotations

from collections.abc import Callable

from sifu.engines.sim import ConvNet, Convolution
from sifu.engines.sim.networks import cnn

_THREE = (Convolution(32), Convolution(64), Convolution(64, pool=False))
NETWORKS: dict[str, Callable[[tuple[int, int, int], int], ConvNet]] = {
    "cnn": cnn,
    "dropout": lambda shape, outputs: ConvNet(
        shape, (Convolution(32, 1), Convolution(64, 1)), (256,), outputs, dropout=0.1
    ),
    "three": lambda shape, outputs: ConvNet(shape, _THREE, (64,), outputs),
    "three wide": lambda shape, outputs: ConvNet(shape, _THREE, (256,), outputs),
    "no hidden layer": lambda shape, outputs: ConvNet(
        shape, (Convolution(8, 1), Convolution(16, 1), Convolution(32, 1)), (), outputs
    ),
}
