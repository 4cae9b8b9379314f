"""Embedded simulator: an engine whose clients are in this process (PyTorch, vectorised over clients)."""

from sifu.engines.sim.embedded_clients import ClientData
from sifu.engines.sim.local_training import LocalTraining
from sifu.engines.sim.models import LinearModel, Model, ModuleModel, make_model
from sifu.engines.sim.networks import ConvNet, Convolution
from sifu.engines.sim.simulator import SimulatedFederation, SimulationSettings

__all__ = [
    "ClientData",
    "ConvNet",
    "Convolution",
    "LinearModel",
    "LocalTraining",
    "Model",
    "ModuleModel",
    "SimulatedFederation",
    "SimulationSettings",
    "make_model",
]
