"""The embedded simulator: an engine whose clients live in this process (PyTorch, clients vectorised)."""

from sifu.sim.clients import ClientData
from sifu.sim.engine import SimulatedFederation, Strategy
from sifu.sim.local_training import LocalTraining
from sifu.sim.models import LinearModel, Model, ModuleModel, make_model
from sifu.sim.networks import ConvNet, Convolution

__all__ = [
    "ClientData",
    "ConvNet",
    "Convolution",
    "LinearModel",
    "LocalTraining",
    "Model",
    "ModuleModel",
    "SimulatedFederation",
    "Strategy",
    "make_model",
]
