"""Embedded engine for closed-form heads on networks that groups of clients tune.

Each group tunes its network with rounds of SGD, in the plain loop or on a GPU. Afterwards, clients send statistics of
the features that the tuned networks compute. The run selects these networks (docs/theory.md, section 15.5).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from sifu.core.closed_form_engine import GroupNetwork, TunedEngine
from sifu.core.engine import ChecksModule, Position, RoundResult
from sifu.core.layout import Vector
from sifu.core.round_stream import RoundsWanted, StreamedRound, StreamsGroupRounds
from sifu.data import client_data
from sifu.data.feature_maps.tuned_networks import TunedFeatures, TunedNetwork
from sifu.data.fresh_modules import fresh_copy
from sifu.engines.sim.embedded_clients import ClientData
from sifu.engines.sim.embedded_heads import ClosedFormFederation
from sifu.engines.sim.gpu.captured_loop import CapturedLoop
from sifu.engines.sim.local_training import LocalTraining
from sifu.engines.sim.models import TORCH_TYPES, ModuleModel
from sifu.engines.sim.simulator import SimulatedFederation, SimulationSettings
from sifu.errors import InputError, RoundRejectedError
from sifu.theory.closed_form import FixedPoint, Targets
from sifu.theory.participation import ClientIndices


class TunedFederation(ClosedFormFederation, TunedEngine, ChecksModule):
    """Engine for heads on tuned networks; the clients' data are available in this process."""

    tuning: TuningFederation

    def __init__(
        self,
        clients: Sequence[ClientData],
        features: TunedFeatures,
        targets: Targets,
        fixed: FixedPoint,
        relative_penalty: float | None,
        local: LocalTraining,
        seed: int,
        *,
        numbers: Sequence[int] | None = None,
        **facts: Any,
    ) -> None:
        super().__init__(clients, features, targets, fixed, relative_penalty, **facts)
        self._tuned = features
        self._through: dict[int, str] = {}
        self._plan = (clients, features, targets, fixed, relative_penalty, local, seed), numbers, facts
        self.tuning = TuningFederation(clients, features.network, local, seed, numbers)

    def on(self, device: str, precision: str) -> TunedOnDevice:
        """Return a copy of this engine that tunes networks and computes features on `device`."""
        given, numbers, facts = self._plan
        moved = TunedOnDevice(*given, numbers=numbers, **facts)
        clients, features, *_, local, seed = given
        moved.tuning = TuningOnDevice(clients, features.network, local, seed, device, precision, numbers=numbers)
        moved.compute_features_on(device)
        rough = (f"products in {precision}",) if precision != "float32" else ()
        moved.facts = replace(moved.facts, outside=(*moved.facts.outside, *rough))
        return moved

    def check_module(self) -> None:
        """Refuse a network whose local training gives a different result when it is repeated."""
        self.tuning.check_module()

    def compute_features_on(self, device: str) -> None:
        """Compute the features of all networks on a device from now on."""
        self._tuned = self._tuned.on(device)
        super().compute_features_on(device)

    def use_backbones(self, backbones: Sequence[GroupNetwork]) -> None:
        """Compute features with these groups' networks from now on."""
        self.use_networks(self._tuned.networks(backbones))

    def use_networks(self, networks: Mapping[int, Vector]) -> None:
        """Compute features with these networks from now on: one network per block, or the merged network.

        Blocks are independent of each other. If some blocks are dropped and the others stay, the dropped blocks of
        cached features are set to zero, and no network runs again.
        """
        through = {group: hashlib.sha256(vector.tobytes()).hexdigest() for group, vector in networks.items()}
        if through == self._through:
            return
        stay = self._tuned.tune == "blocks" and through.items() <= self._through.items()
        for group in self._through.keys() - through.keys() if stay else ():
            for rows in self._kept.values():
                rows[:, self._tuned.blocks.columns(group)] = 0.0
        if not stay:
            self._kept.clear()
            self._kept_bytes = 0
        self._map, self._through = self._tuned.through(networks), through


class TunedOnDevice(TunedFederation):
    """`TunedFederation` under another class name, by which `run.devices.engine_kind` recognises the device."""


class TuningFederation(SimulatedFederation):
    """Federation that tunes a network; every branch starts from the public network and a last layer of zeros."""

    def __init__(
        self,
        clients: Sequence[ClientData],
        network: TunedNetwork,
        local: LocalTraining,
        seed: int,
        numbers: Sequence[int] | None = None,
        **loop: Any,
    ) -> None:
        dtype, given = number_format(network), []
        for client in clients:
            x = np.asarray(client.x)
            x = (x / 255.0 if x.dtype == np.uint8 else x).astype(dtype)  # scale bytes to [0, 1]
            given.append(client_data.ClientData(client.name, x, np.asarray(client.y)))
        model = tuned_model(network)
        settings = SimulationSettings(dtype=dtype, seed=seed, strategy="loop", numbers=numbers, **loop)
        super().__init__(given, model, local, settings)
        self._first = network.flat()

    def initial_model(self, branch: int) -> Vector:
        """Return the public network for every branch."""
        return self._first.copy()


class TuningOnDevice(TuningFederation, StreamsGroupRounds):
    """Variant of `TuningFederation` on a device, where the groups' networks stay from round to round."""

    def __init__(
        self,
        clients: Sequence[ClientData],
        network: TunedNetwork,
        local: LocalTraining,
        seed: int,
        device: str,
        precision: str = "float32",
        numbers: Sequence[int] | None = None,
        **layout: Any,
    ) -> None:
        loop = partial(CapturedLoop, device=device, precision=precision, **layout)
        super().__init__(clients, network, local, seed, numbers, loop=loop)
        self.loop = cast("CapturedLoop", self._trainer)

    def stream_group_rounds(
        self, models: Sequence[Vector], position: Position, groups: Sequence[ClientIndices], wanted: RoundsWanted
    ) -> Iterator[list[StreamedRound]]:
        """Yield lists of rounds, one round per group from the group's own model, with infinite (unknown) drifts."""
        vectors = [self.loop.on_device(self.layout.own_copy(model)) for model in models]
        for start in range(position.round, wanted.stop.max_rounds):
            vectors = self._means(vectors, Position(position.branch, start), groups)
            yield [
                StreamedRound(
                    np.asarray(members),
                    self.samples[members],
                    np.full(len(members), np.inf),
                    mean_shift=math.inf,
                    rounding=0.0,
                    distance=math.inf,
                    fetch_model=partial(self.loop.to_host, vector),
                )
                for members, vector in zip(groups, vectors, strict=True)
            ]

    def run_round(self, model: Vector, position: Position, active: ClientIndices, **options: Any) -> RoundResult:
        """Run one round of a group, with the same bits as `stream_group_rounds` and with unknown drifts.

        With options, such as a Gram matrix, drifts are measured, and the model may differ in its last bits.
        """
        if options or not len(active):
            return super().run_round(model, position, active, **options)
        members = np.sort(np.asarray(active))
        (vector,) = self._means([self.loop.on_device(self.layout.own_copy(model))], position, [members])
        unknown = np.full(len(members), np.inf)
        return RoundResult(self.loop.to_host(vector), members, self.samples[members], unknown, math.inf, rounding=0.0)

    def _means(self, models: Sequence[Tensor], position: Position, groups: Sequence[ClientIndices]) -> list[Tensor]:
        vectors, finite = self.loop.means(models, position, groups)
        if not finite:
            raise RoundRejectedError(
                f"round {position.round + 1} made a model with NaN or Inf and was rejected: lower local.rate "
                f"({self.facts.local_rate:g}), or scale the samples, which reach {self.loop.largest_sample:g}; the "
                "last good state stays"
            )
        return vectors


def number_format(network: TunedNetwork) -> Literal["float64", "float32"]:
    """Return the element type of the tuned parameters."""
    kind = next(iter(network.parameters())).dtype
    if kind not in TORCH_TYPES.values():
        raise InputError(f"a network that is tuned has parameters of float32 or float64, found {kind}")
    return "float64" if kind == torch.float64 else "float32"


def tuned_model(network: TunedNetwork) -> ModuleModel:
    """Return the model that groups train."""
    return ModuleModel(partial(fresh_copy, network))
