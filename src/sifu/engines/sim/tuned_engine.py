"""The embedded engine of heads on networks that groups tune: rounds of descent apart, then statistics.

Groups tune with the plain loop, one client after the other; features go through the networks that the run says are
there (docs/theory.md, section 15.5).
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from sifu.core.closed_form_engine import Trunk
from sifu.core.layout import Vector
from sifu.data.client_data import ClientData
from sifu.data.feature_maps.tuned_networks import TunedFeatures, TunedNetwork
from sifu.engines.sim.embedded_heads import ClosedFormFederation
from sifu.engines.sim.local_training import LocalTraining
from sifu.engines.sim.models import TORCH_TYPES, ModuleModel
from sifu.engines.sim.simulator import SimulatedFederation
from sifu.errors import InputError
from sifu.theory.closed_form import FixedPoint, Targets


class TunedFederation(ClosedFormFederation):
    """A `TunedEngine` of clients whose data are available."""

    def __init__(
        self,
        clients: Sequence[ClientData],
        features: TunedFeatures,
        targets: Targets,
        fixed: FixedPoint,
        relative_penalty: float | None,
        local: LocalTraining,
        seed: int,
        **facts: Any,
    ) -> None:
        super().__init__(clients, features, targets, fixed, relative_penalty, **facts)
        self._tuned = features
        self._through: dict[int, str] = {}
        self.tuning = TuningFederation(clients, features.network, local, seed)

    def compute_features_on(self, device: str) -> None:
        """Compute features on a device from now on, whichever networks they go through."""
        self._tuned = self._tuned.on(device)
        super().compute_features_on(device)

    def use_trunks(self, trunks: Sequence[Trunk]) -> None:
        """Compute features through these networks from now on.

        Blocks do not depend on each other: where some are struck and the others stay, features that are kept for
        evaluations are those of the new map once the struck blocks are zero, and no network runs again.
        """
        through = {
            trunk.group: hashlib.sha256(f"{trunk.samples} ".encode() + trunk.vector.tobytes()).hexdigest()
            for trunk in trunks
        }
        if through == self._through:
            return
        stay = self._tuned.tune == "blocks" and through.items() <= self._through.items()
        for group in self._through.keys() - through.keys() if stay else ():
            for rows in self._kept.values():
                rows[:, self._tuned.blocks.columns(group)] = 0.0
        if not stay:
            self._kept.clear()
            self._kept_bytes = 0
        self._map, self._through = self._tuned.with_trunks(trunks), through


class TuningFederation(SimulatedFederation):
    """FedAvg of what is tuned, from the public network and a last layer of zeros: no seed is in its first model."""

    def __init__(self, clients: Sequence[ClientData], network: TunedNetwork, local: LocalTraining, seed: int) -> None:
        kind = next(iter(network.parameters())).dtype
        if kind not in TORCH_TYPES.values():
            raise InputError(f"a network that is tuned has parameters of float32 or float64, found {kind}")
        dtype: Literal["float64", "float32"] = "float64" if kind == torch.float64 else "float32"
        given = [ClientData(client.name, _inputs(client.x, dtype), np.asarray(client.y)) for client in clients]
        super().__init__(given, ModuleModel(partial(_copied, network)), local, dtype=dtype, seed=seed, strategy="loop")
        self._first = torch.cat([value.detach().reshape(-1) for value in network.parameters()]).numpy().copy()

    def initial_model(self, branch: int) -> Vector:
        """The public network, whatever the branch."""
        return self._first.copy()


def _copied(network: TunedNetwork) -> nn.Module:
    return copy.deepcopy(network)


def _inputs(x: Any, dtype: str) -> np.ndarray:
    """Samples as the network takes them; bytes become 255ths."""
    samples = np.asarray(x)
    return (samples / 255.0 if samples.dtype == np.uint8 else samples).astype(dtype)
