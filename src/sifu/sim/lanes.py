"""Runs as lanes of one batched program on a GPU: engines that wait for each other and run together.

Lanes share the model, the local training and the way clients are sampled; seeds, data, budgets, stop rules and
clipping are each lane's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from sifu.core.errors import InputError
from sifu.core.participation import Participation
from sifu.sim.clients import ClientData
from sifu.sim.engine import SimulatedFederation
from sifu.sim.models import ModuleModel
from sifu.sim.networks import ConvNet

if TYPE_CHECKING:
    from sifu.sim.gpu.lane_engine import LaneEngine

POISSON_MARGIN = 8.0
"""Standard deviations above the expected number of participants that slots are made for."""


def lane_engines(
    federations: Sequence[SimulatedFederation],
    clients: Sequence[Sequence[ClientData]],
    device: str = "cuda",
    precision: str = "tf32",
) -> list[LaneEngine]:
    """An engine for each of `federations`, all lanes of one group; `clients` are the data they were made from.

    `precision` is float32, tf32 (products with 10 bits of mantissa, summed in float32) or tf32x3 (three of those).
    """
    import torch

    from sifu.sim.gpu.device_layout import DeviceLayout
    from sifu.sim.gpu.lane_engine import LaneEngine
    from sifu.sim.gpu.lane_group import LaneGroup

    first = federations[0]
    for other in federations[1:]:
        if (other.model, other.training, other.facts.participation, other.facts.server_rate) != (
            first.model, first.training, first.facts.participation, first.facts.server_rate,
        ):  # fmt: skip
            raise InputError("lanes must share the model, the local training, participation and the server rate")
    network = _network(first)
    where: dict[int, int] = {}
    images, labels, tables, sizes = [], [], [], []
    most = max(one.samples for federation in federations for one in federation.clients)
    total = 0
    for data in clients:
        if id(data) in where:
            tables.append(tables[where[id(data)]])
            sizes.append(sizes[where[id(data)]])
            continue
        where[id(data)] = len(tables)
        table = np.full((len(data), most), -1, dtype=np.int64)
        for place, one in enumerate(data):
            table[place, : len(one.y)] = total + np.arange(len(one.y))
            total += len(one.y)
            images.append(_nhwc(np.asarray(one.x, dtype=np.float32), network))
            labels.append(np.asarray(one.y))
        tables.append(table)
        sizes.append(np.array([len(one.y) for one in data], dtype=np.int64))
    all_images = torch.from_numpy(np.concatenate(images)).to(device)
    all_labels = torch.from_numpy(np.concatenate(labels).astype(np.int32)).to(device)
    layout = DeviceLayout.of(network)
    source = _source(first, network, layout.size, all_images, all_labels, most, precision, federations)
    group = LaneGroup(
        source,
        torch.from_numpy(np.stack(tables)).to(device),
        torch.from_numpy(np.stack(sizes)).to(device),
        [one.seed for one in federations],
        [(one.facts.clip, one.facts.noise) for one in federations],
    )
    return [LaneEngine(one, group, lane, layout.entries) for lane, one in enumerate(federations)]


def _source(first, network, size, images, labels, most, precision, federations):  # type: ignore[no-untyped-def]
    from sifu.sim.gpu.conv_program import ConvProgram
    from sifu.sim.gpu.lane_group import LaneSource

    training, participation = first.training, first.facts.participation
    slots = slots_for(participation, len(first.clients))
    batch = most if training.batch_size is None else min(training.batch_size, most)
    clipped = any(one.facts.clip > 0.0 for one in federations)

    def make(lanes: int, chunk: int) -> ConvProgram:
        return ConvProgram(
            network, images, labels, training, lanes=lanes, slots=slots, batch=batch, chunk=chunk,
            server_rate=first.facts.server_rate, precision=precision, clipped=clipped,
        )  # fmt: skip

    layers = len(network.hidden) if network.dropout else 0
    return LaneSource(training, participation, batch, slots, size, layers, make)


def slots_for(participation: Participation, clients: int) -> int:
    """How many clients of a lane train at once at most."""
    if participation.kind == "all":
        return clients
    if participation.kind == "fixed":
        return min(participation.count, clients)
    expected = participation.rate * clients
    return min(clients, math.ceil(expected + POISSON_MARGIN * math.sqrt(expected) + POISSON_MARGIN))


def _network(federation: SimulatedFederation) -> ConvNet:
    model = federation.model
    if isinstance(model, ModuleModel) and isinstance(model.factory, ConvNet):
        return model.factory
    raise InputError("lanes on a GPU train the convolutional networks a spec can name; use device cpu for other models")


def _nhwc(x: np.ndarray, network: ConvNet) -> np.ndarray:
    return np.ascontiguousarray(x.reshape(len(x), *network.input_shape).transpose(0, 2, 3, 1))
