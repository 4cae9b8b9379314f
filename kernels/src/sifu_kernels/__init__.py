"""Hand-written training of convolutional networks for sifu, on the CPU and in TF32 on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sifu.engines.sim.embedded_clients import CheckedClient, ClientData
    from sifu.engines.sim.local_training import TrainingPlan
    from sifu.engines.sim.networks import ConvNet
    from sifu.engines.sim.simulator import SimulatedFederation
    from sifu_kernels.conv_trainer import ConvTrainer
    from sifu_kernels.lane_engine import LaneEngine

__version__ = "1.0.0.dev0"
NAME = "sifu-kernels, bits 1"
"""Name that runs record as their trainer. The number rises when the bits of rounds change."""


TF32 = "tf32"
"""Value of `model.dtype` for float32 models whose products have factors of 10 bits, on a GPU."""


def serves(network: ConvNet | None, dtype: str, device: str) -> bool:
    """Return whether this package trains a model; `network` is None for any model but a described network."""
    return network is not None and (device == "cpu") == (dtype != TF32)


def cpu_trainer(network: ConvNet, clients: Sequence[CheckedClient], plan: TrainingPlan) -> ConvTrainer:
    """Return the trainer of a network's clients on the CPU."""
    from sifu_kernels.conv_trainer import ConvTrainer

    return ConvTrainer(network, clients, plan)


def gpu_engine(federation: SimulatedFederation, clients: Sequence[ClientData], device: str) -> LaneEngine:
    """Return the engine that trains a federation in TF32 on a GPU."""
    from sifu_kernels.lanes import lane_engines

    return lane_engines([federation], [clients], device)[0]
