"""Hand-written training of convolutional networks for sifu, on the CPU and in TF32 on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sifu.engines.sim.embedded_clients import CheckedClient
    from sifu.engines.sim.local_training import TrainingPlan
    from sifu.engines.sim.networks import ConvNet
    from sifu_kernels.conv_trainer import ConvTrainer

__version__ = "1.0.0.dev0"
NAME = "sifu-kernels, bits 1"
"""Name that runs record as their trainer. The number rises when the bits of rounds change."""


def serves(network: ConvNet | None, dtype: str, device: str) -> bool:
    """Return whether this package trains a model; `network` is None for any model but a described network."""
    if network is None or not all(layer.relu for layer in network.convolution_layers):
        return False
    return device == "cpu" and dtype in ("float32", "float64")


def cpu_trainer(network: ConvNet, clients: Sequence[CheckedClient], plan: TrainingPlan) -> ConvTrainer:
    """Return the trainer of a network's clients on the CPU."""
    from sifu_kernels.conv_trainer import ConvTrainer

    return ConvTrainer(network, clients, plan)
