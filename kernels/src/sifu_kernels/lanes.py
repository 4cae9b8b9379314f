"""Engines of several runs, executed as lanes of one batched program on a GPU.

Separately trained groups of a run are lanes as well; only their models and members differ. Lanes share the network, the
local training and the sampling of clients. Seeds, data, budgets and stop rules belong to each lane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from sifu.core.replies import ReplyRules
from sifu.engines.sim.embedded_clients import ClientData
from sifu.engines.sim.simulator import SimulatedFederation
from sifu.errors import InputError
from sifu.theory.arrays import Array
from sifu_kernels import serves
from sifu_kernels.conv_plan import DeviceLayout
from sifu_kernels.conv_program import ConvProgram, with_border
from sifu_kernels.lane_engine import LaneEngine
from sifu_kernels.lane_group import LaneGroup
from sifu_kernels.lane_stream import LaneSource, ProgramPlan
from sifu_kernels.schedule import Drawing, slots_for


def lane_engines(
    federations: Sequence[SimulatedFederation], clients: Sequence[Sequence[ClientData]], device: str = "cuda"
) -> list[LaneEngine]:
    """Return one engine per federation; the engines are lanes of one group.

    Products are in TF32: factors have 10 bits of mantissa, and sums are in float32.

    Args:
        federations: The simulated federations; they must share model, training and participation.
        clients: The data that each federation was made from.
        device: Torch device.

    Raises:
        InputError: If the federations cannot run as lanes of one program.
    """
    first = federations[0]
    network = getattr(first.model, "conv_net", None)
    if network is None or not serves(network, "tf32", "cuda"):
        raise InputError('model.dtype = "tf32" is only for the convolutional networks of a spec')
    if any(federation.reply_rules != ReplyRules() for federation in federations):
        raise InputError('model.dtype = "tf32" checks no single replies: leave server.rejected and update_bound out')
    for other in federations[1:]:
        if (other.model, other.training, other.facts.participation) != (
            first.model, first.training, first.facts.participation
        ):  # fmt: skip
            raise InputError("lanes must share the model, the local training and participation")
    training = first.training
    data = _LaneData(
        clients, max(client.samples for federation in federations for client in federation.clients), device
    )
    plan = ProgramPlan(training, min(training.batch_size or data.most, data.most))

    def pixels(client: ClientData) -> Array:
        shaped = np.asarray(client.x, dtype=np.float32).reshape(len(client.y), *network.input_shape)
        return shaped.transpose(0, 2, 3, 1)

    images = with_border(network, data.padded(pixels).flatten(0, 1))
    labels = data.padded(lambda client: np.asarray(client.y, dtype=np.int32)).flatten()
    layout, participation = DeviceLayout.of(network), first.facts.participation
    slots = slots_for(participation, len(first.clients))
    drawing = Drawing(slots, participation, plan.batch, training.steps, len(network.hidden) if network.dropout else 0)
    make = partial(ConvProgram, network, images, labels, summed_for=slots)
    source = LaneSource(drawing, plan, layout.size, layout.entries, make)
    group = LaneGroup(source, data.tables, data.sizes, [federation.seed for federation in federations])
    return [LaneEngine(federation, group, lane) for lane, federation in enumerate(federations)]


class _LaneData:
    """Clients of all distinct federations, each padded to `most` rows, and the row numbers of each lane's samples."""

    def __init__(self, clients: Sequence[Sequence[ClientData]], most: int, device: str) -> None:
        where: dict[int, int] = {}
        self.clients: list[ClientData] = []
        tables, sizes = [], []
        for data in clients:
            if id(data) not in where:
                where[id(data)] = len(self.clients)
                self.clients.extend(data)
            count = np.array([len(client.y) for client in data], dtype=np.int64)
            rows = (where[id(data)] + np.arange(len(data)))[:, None] * most + np.arange(most)
            tables.append(np.where(np.arange(most) < count[:, None], rows, -1))
            sizes.append(count)
        self.tables, self.sizes = (torch.from_numpy(np.stack(part)).to(device) for part in (tables, sizes))
        self.most, self.device = most, device

    def padded(self, rows_of: Callable[[ClientData], Array]) -> Tensor:
        """Return a tensor (clients, most, ...) with the result of `rows_of` for each client, padded with zeros."""
        values = None
        for place, client in enumerate(self.clients):
            rows = rows_of(client)
            if values is None:
                values = np.zeros((len(self.clients), self.most, *rows.shape[1:]), dtype=rows.dtype)
            values[place, : len(rows)] = rows
        return torch.from_numpy(values).to(self.device)
