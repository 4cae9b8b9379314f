"""The embedded simulator: an engine whose clients live in this process (PyTorch, clients vectorised)."""

from sifu.engines.sim.clients import ClientData
from sifu.engines.sim.engine import SimulatedFederation, Strategy
from sifu.engines.sim.local_training import LocalTraining
from sifu.engines.sim.models import LinearModel, Model, ModuleModel, make_model
from sifu.engines.sim.networks import ConvNet, Convolution

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
