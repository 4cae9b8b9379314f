"""Engines of several runs, executed as lanes of one batched program on a GPU.

Separately trained groups of a run are lanes as well; only their models and members differ.

Lanes share the model, the local training (including the clipping of its steps) and the sampling of clients. Seeds,
data, budgets, stop rules and the clipping of whole updates belong to each lane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from sifu.core.replies import ReplyRules
from sifu.engines.sim.embedded_clients import ClientData, Objective, count_outputs
from sifu.engines.sim.gpu.lane_engine import LaneEngine
from sifu.engines.sim.gpu.lane_group import LaneGroup
from sifu.engines.sim.gpu.lane_stream import LaneSource, ProgramPlan
from sifu.engines.sim.gpu.module_program import ModulePass, refuse_other_gradients
from sifu.engines.sim.gpu.schedule import Drawing, slots_for
from sifu.engines.sim.models import TORCH_TYPES, LinearModel, ModuleModel
from sifu.engines.sim.networks import ConvNet
from sifu.engines.sim.simulator import SimulatedFederation
from sifu.errors import InputError
from sifu.theory.arrays import Array
from sifu.theory.facts import NO_NOISE

PRECISIONS = ("float32", "tf32", "tf32x3")
COMPARED = 8
"""Number of samples on which a module's gradients on the device and on the CPU are compared."""


def lane_engines(
    federations: Sequence[SimulatedFederation],
    clients: Sequence[Sequence[ClientData]],
    device: str = "cuda",
    precision: str = "float32",
) -> list[LaneEngine]:
    """Return one engine per federation; the engines are lanes of one group.

    Args:
        federations: The simulated federations; they must share model, training and participation.
        clients: The data that each federation was made from.
        device: Torch device.
        precision: float32, tf32 (products with 10 bits of mantissa, summed in float32) or tf32x3 (three such products).
            It does not affect linear models, which compute in their own dtype.

    Returns:
        The engines, in the order of `federations`.

    Raises:
        InputError: If the federations cannot run as lanes of one program.
    """
    if precision not in PRECISIONS:
        raise InputError(f"the precision must be one of {', '.join(PRECISIONS)}, found {precision!r}")

    if any(federation.reply_rules != ReplyRules() for federation in federations):
        raise InputError(
            "the GPU engine does not check single replies: leave server.rejected and server.update_bound out"
        )
    first = federations[0]
    for other in federations[1:]:
        if (other.model, other.training, other.facts.participation, other.facts.server_rate) != (
            first.model, first.training, first.facts.participation, first.facts.server_rate,
        ):  # fmt: skip
            raise InputError("lanes must share the model, the local training, participation and the server rate")
    if any(federation.facts.noise_source not in (NO_NOISE, "seeded") for federation in federations):
        raise InputError(
            "the GPU engine draws training noise from a keyed generator, which protects no client: set privacy.noise "
            "= 'seeded' for an experiment, or use device cpu for noise from the operating system"
        )
    data = _LaneData(
        clients, max(client.samples for federation in federations for client in federation.clients), device
    )
    batch = min(first.training.batch_size or data.most, data.most)
    clipped = any(federation.facts.clip > 0.0 for federation in federations)
    plan = ProgramPlan(first.training, batch, first.facts.server_rate, clipped)
    if isinstance(first.model, LinearModel):
        source = _linear_source(federations, first.model, data, plan)
        outside: tuple[str, ...] = ()
    else:
        dtypes = {federation.layout.dtype for federation in federations}
        if dtypes != {"float32"}:
            raise InputError(
                f"networks run in float32 on a GPU, found model.dtype = {max(dtypes)!r}: set model.dtype = 'float32', "
                "or use device cpu"
            )
        network = first.model.conv_net
        if network is None:
            source = _module_source(federations, first.model, data, plan, precision)
        else:
            source = _conv_source(federations, network, data, plan, precision)
        outside = (f"products in {precision}",) if precision != "float32" else ()
    group = LaneGroup(
        source,
        data.tables,
        data.sizes,
        [federation.seed for federation in federations],
        [(federation.facts.clip, federation.facts.noise) for federation in federations],
    )
    return [LaneEngine(federation, group, lane, outside) for lane, federation in enumerate(federations)]


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

    def encoded(self, objective: Objective, outputs: int, dtype: str) -> Tensor:
        """Return each client's encoded targets, padded as in `padded`."""

        def encode(client: ClientData) -> Array:
            targets = torch.from_numpy(np.asarray(client.y).astype(np.int64 if objective.labels else dtype))
            return objective.encode(targets, outputs, TORCH_TYPES[dtype]).numpy()

        return self.padded(encode)


def _conv_source(
    federations: Sequence[SimulatedFederation], network: ConvNet, data: _LaneData, plan: ProgramPlan, precision: str
) -> LaneSource:
    from sifu.engines.sim.gpu.conv_plan import DeviceLayout
    from sifu.engines.sim.gpu.conv_program import ConvProgram, with_border

    def pixels(client: ClientData) -> Array:
        shaped = np.asarray(client.x, dtype=np.float32).reshape(len(client.y), *network.input_shape)
        return shaped.transpose(0, 2, 3, 1)

    images = with_border(network, data.padded(pixels).flatten(0, 1))
    labels = data.padded(lambda client: np.asarray(client.y, dtype=np.int32)).flatten()
    layout, drawing = DeviceLayout.of(network), _drawing(federations, plan)
    if network.dropout:
        drawing = replace(drawing, dropout_layers=len(network.hidden))
    make = partial(ConvProgram, network, images, labels, summed_for=drawing.slots, precision=precision)
    return LaneSource(drawing, plan, layout.size, layout.entries, make)


def _drawing(federations: Sequence[SimulatedFederation], plan: ProgramPlan) -> Drawing:
    participation = federations[0].facts.participation
    slots = slots_for(participation, len(federations[0].clients))
    return Drawing(slots, participation, plan.batch, plan.training.steps, 0)


def _module_source(
    federations: Sequence[SimulatedFederation], model: ModuleModel, data: _LaneData, plan: ProgramPlan, precision: str
) -> LaneSource:
    from sifu.engines.sim.gpu.module_program import ModuleProgram

    if plan.clipped:
        raise InputError(
            "updates of this model cannot be clipped on a GPU: leave server.clip out, or use device cpu; linear "
            "models and the convolutional networks of a spec can be clipped on a GPU"
        )
    layout, objective = federations[0].layout, model.objective
    module = ModulePass(model, layout.dtype, torch.device(data.device), precision)
    samples = data.padded(lambda client: np.asarray(client.x, dtype=layout.dtype))
    outputs = module.try_out(samples[0, 0], count_outputs(data.clients, objective))
    encoded = data.encoded(objective, outputs, layout.dtype)
    _compare_with_the_cpu(module, federations[0], samples[:1, :COMPARED], encoded[:1, :COMPARED], precision)
    all_samples, all_encoded = samples.flatten(0, 1), encoded.flatten(0, 1)
    make = partial(ModuleProgram, module, objective, all_samples, all_encoded, size=layout.size)
    return LaneSource(_drawing(federations, plan), plan, layout.size, np.arange(layout.size, dtype=np.int64), make)


def _compare_with_the_cpu(
    module: ModulePass, federation: SimulatedFederation, samples: Tensor, encoded: Tensor, precision: str
) -> None:
    """Refuse a module whose gradient on some samples of the first client differs between the device and the CPU."""
    on_cpu = ModulePass(cast("ModuleModel", federation.model), federation.layout.dtype, torch.device("cpu"))
    model = torch.from_numpy(federation.initial_model(0))[None].to(samples.device)
    rows = (model, samples, encoded, torch.ones_like(encoded[..., 0]))
    refuse_other_gradients(module.gradients(*rows), on_cpu.gradients(*(part.cpu() for part in rows)), precision)


def _linear_source(
    federations: Sequence[SimulatedFederation], model: LinearModel, data: _LaneData, plan: ProgramPlan
) -> LaneSource:
    from sifu.engines.sim.gpu.linear_program import LinearProgram

    layout, drawing = federations[0].layout, _drawing(federations, plan)

    def extended(client: ClientData) -> Array:
        rows = np.array(client.x, dtype=layout.dtype).reshape(len(client.y), -1)
        return np.concatenate([rows, np.ones((len(rows), 1), dtype=layout.dtype)], axis=1)

    samples, targets = data.padded(extended), data.encoded(model.objective, model.outputs, layout.dtype)
    make = partial(
        LinearProgram,
        model,
        samples,
        targets,
        clients_a_lane=len(federations[0].clients),
        gram=LinearProgram.gram_of(samples, plan.training),
        everyone=drawing.participation.kind == "all",
    )
    return LaneSource(drawing, plan, layout.size, np.arange(layout.size, dtype=np.int64), make)
