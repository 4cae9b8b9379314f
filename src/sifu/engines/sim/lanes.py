"""Runs as lanes of one batched program on a GPU: engines that wait for each other and run together.

Groups of a run that train apart are lanes, too: they share everything but their model and who is in them.

Lanes share the model, the local training (with the clipping of its steps) and the way clients are sampled; seeds,
data, budgets, stop rules and the clipping of whole updates are each lane's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from sifu.core.replies import ReplyRules
from sifu.engines.sim.embedded_clients import ClientData, count_outputs
from sifu.engines.sim.gpu.lane_engine import LaneEngine
from sifu.engines.sim.gpu.lane_group import LaneGroup
from sifu.engines.sim.gpu.lane_stream import LaneSource
from sifu.engines.sim.gpu.schedule import Drawing, slots_for
from sifu.engines.sim.local_training import LocalTraining
from sifu.engines.sim.models import TORCH_TYPES, LinearModel, ModuleModel
from sifu.engines.sim.module_pass import ModulePass, refuse_other_gradients
from sifu.engines.sim.networks import ConvNet
from sifu.engines.sim.simulator import SimulatedFederation
from sifu.errors import InputError
from sifu.theory.arrays import Array, Integers
from sifu.theory.participation import Participation

PRECISIONS = ("float32", "tf32", "tf32x3")
COMPARED = 8
"""Samples of a module's gradient that a device is held against the CPU by."""


def lane_engines(
    federations: Sequence[SimulatedFederation],
    clients: Sequence[Sequence[ClientData]],
    device: str = "cuda",
    precision: str = "float32",
) -> list[LaneEngine]:
    """An engine for each of `federations`, all lanes of one group; `clients` are the data they were made from.

    `precision` is float32, tf32 (products with 10 bits of mantissa, summed in float32) or tf32x3 (three of those); it
    is of no importance to linear models, whose arithmetic is that of their dtype.
    """
    if precision not in PRECISIONS:
        raise InputError(f"the precision is one of {', '.join(PRECISIONS)}, found {precision!r}")

    if any(federation.reply_rules != ReplyRules() for federation in federations):
        raise InputError("lanes look at no single client's reply: leave server.rejected and server.update_bound out")
    first = federations[0]
    for other in federations[1:]:
        if (other.model, other.training, other.facts.participation, other.facts.server_rate) != (
            first.model, first.training, first.facts.participation, first.facts.server_rate,
        ):  # fmt: skip
            raise InputError("lanes must share the model, the local training, participation and the server rate")
    if any(federation.facts.noise > 0.0 and federation.noise_source != "seeded" for federation in federations):
        raise InputError(
            "lanes draw the noise of training from a keyed generator, which protects no client: set privacy.noise = "
            "'seeded' for an experiment, or use device cpu for noise from the operating system"
        )
    data = _gather(clients, max(client.samples for federation in federations for client in federation.clients))
    if isinstance(first.model, LinearModel):
        source = _linear_source(federations, first.model, data, device)
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
            source = _module_source(federations, first.model, data, device, precision)
        else:
            source = _conv_source(federations, network, data, device, precision)
        outside = (f"products in {precision}",) if precision != "float32" else ()
    group = LaneGroup(
        source,
        torch.from_numpy(data.tables).to(device),
        torch.from_numpy(data.sizes).to(device),
        [federation.seed for federation in federations],
        [(federation.facts.clip, federation.facts.noise) for federation in federations],
    )
    return [LaneEngine(federation, group, lane, outside) for lane, federation in enumerate(federations)]


@dataclass(frozen=True)
class _LaneData:
    """Every distinct federation's clients one after the other, and each lane's table of rows: client * most + place."""

    clients: list[ClientData]
    tables: Integers
    sizes: Integers
    most: int


def _gather(clients: Sequence[Sequence[ClientData]], most: int) -> _LaneData:
    where: dict[int, int] = {}
    everyone: list[ClientData] = []
    tables, sizes = [], []
    for data in clients:
        if id(data) not in where:
            where[id(data)] = len(everyone)
            everyone.extend(data)
        count = np.array([len(client.y) for client in data], dtype=np.int64)
        rows = (where[id(data)] + np.arange(len(data)))[:, None] * most + np.arange(most)
        tables.append(np.where(np.arange(most) < count[:, None], rows, -1))
        sizes.append(count)
    return _LaneData(everyone, np.stack(tables), np.stack(sizes), most)


def _shared(
    federations: Sequence[SimulatedFederation], most: int
) -> tuple[LocalTraining, Participation, int, int, bool]:
    first = federations[0]
    training, participation = first.training, first.facts.participation
    batch = most if training.batch_size is None else min(training.batch_size, most)
    slots = slots_for(participation, len(first.clients))
    return training, participation, batch, slots, any(federation.facts.clip > 0.0 for federation in federations)


def _conv_source(
    federations: Sequence[SimulatedFederation], network: ConvNet, data: _LaneData, device: str, precision: str
) -> LaneSource:
    from sifu.engines.sim.gpu.conv_plan import DeviceLayout
    from sifu.engines.sim.gpu.conv_program import ConvProgram, with_border

    training, participation, batch, slots, clipped = _shared(federations, data.most)
    channels, height, width = network.input_shape
    images = np.zeros((len(data.clients), data.most, height, width, channels), dtype=np.float32)
    labels = np.zeros((len(data.clients), data.most), dtype=np.int32)
    for place, client in enumerate(data.clients):
        shaped = np.asarray(client.x, dtype=np.float32).reshape(len(client.y), *network.input_shape)
        images[place, : len(client.y)] = shaped.transpose(0, 2, 3, 1)
        labels[place, : len(client.y)] = client.y
    all_images = with_border(network, torch.from_numpy(images.reshape(-1, height, width, channels)).to(device))
    all_labels = torch.from_numpy(labels.reshape(-1)).to(device)
    layout = DeviceLayout.of(network)

    def make(lanes: int, chunk: int, slots: int, width: int) -> ConvProgram:
        return ConvProgram(
            network, all_images, all_labels, training, lanes=lanes, slots=slots, batch=batch, chunk=chunk,
            width=width, summed_for=drawing.slots, server_rate=federations[0].facts.server_rate,
            precision=precision, clipped=clipped,
        )  # fmt: skip

    layers = len(network.hidden) if network.dropout else 0
    drawing = Drawing(slots, participation, batch, training.steps, layers)
    return LaneSource(drawing, layout.size, layout.entries, make)


def _module_source(
    federations: Sequence[SimulatedFederation], model: ModuleModel, data: _LaneData, device: str, precision: str
) -> LaneSource:
    from sifu.engines.sim.gpu.module_program import ModuleProgram

    training, participation, batch, slots, clipped = _shared(federations, data.most)
    if clipped:
        raise InputError(
            "updates of this model are not clipped on a GPU: leave privacy.clip out, or use device cpu; linear models "
            "and the convolutional networks that a spec can name are clipped there"
        )
    layout, objective = federations[0].layout, model.objective
    module = ModulePass(model, layout.dtype, torch.device(device), precision)
    samples = np.zeros((len(data.clients), data.most, *np.shape(data.clients[0].x)[1:]), dtype=layout.dtype)
    targets = [np.asarray(client.y) for client in data.clients]
    for place, client in enumerate(data.clients):
        samples[place, : len(client.y)] = client.x
    all_samples = torch.from_numpy(samples.reshape(-1, *samples.shape[2:])).to(device)
    outputs = module.try_out(all_samples[0], count_outputs(data.clients, objective))
    encoded = torch.zeros((len(data.clients), data.most, outputs), dtype=TORCH_TYPES[layout.dtype])
    for place, target in enumerate(targets):
        values = torch.from_numpy(target.astype(np.int64 if objective.labels else layout.dtype))
        encoded[place, : len(target)] = objective.encode(values, outputs, encoded.dtype)
    all_encoded = encoded.reshape(-1, outputs).to(device)
    _compare_with_the_cpu(module, federations[0], samples[0], encoded[0], device, precision)

    def make(lanes: int, chunk: int, slots: int, width: int) -> ModuleProgram:
        return ModuleProgram(
            module, objective, all_samples, all_encoded, training, size=layout.size, lanes=lanes, slots=slots,
            batch=batch, chunk=chunk, width=width, server_rate=federations[0].facts.server_rate,
        )  # fmt: skip

    drawing = Drawing(slots, participation, batch, training.steps, 0)
    return LaneSource(drawing, layout.size, np.arange(layout.size, dtype=np.int64), make)


def _compare_with_the_cpu(
    module: ModulePass, federation: SimulatedFederation, samples: Array, encoded: Tensor, device: str, precision: str
) -> None:
    """Hold the first client's gradient on the device against the CPU's before anything is trained."""
    model = cast("ModuleModel", federation.model)
    on_cpu = ModulePass(model, federation.layout.dtype, torch.device("cpu"))
    rows = (
        torch.from_numpy(federation.initial_model(0))[None],
        torch.from_numpy(samples)[None, :COMPARED],
        encoded[None, :COMPARED],
        torch.ones((1, min(COMPARED, len(samples))), dtype=encoded.dtype),
    )
    own = module.gradients(*(part.to(device) for part in rows))
    refuse_other_gradients(own, on_cpu.gradients(*rows), precision)


def _linear_source(
    federations: Sequence[SimulatedFederation], model: LinearModel, data: _LaneData, device: str
) -> LaneSource:
    from sifu.engines.sim.gpu.linear_program import LinearProgram

    training, participation, batch, slots, clipped = _shared(federations, data.most)
    layout = federations[0].layout
    dtype = TORCH_TYPES[layout.dtype]
    samples = torch.zeros((len(data.clients), data.most, model.features + 1), dtype=dtype)
    targets = torch.zeros((len(data.clients), data.most, model.outputs), dtype=dtype)
    for place, client in enumerate(data.clients):
        count = len(client.y)
        samples[place, :count, :-1] = torch.from_numpy(np.array(client.x, dtype=layout.dtype).reshape(count, -1))
        samples[place, :count, -1] = 1.0
        encoded = torch.from_numpy(np.asarray(client.y).astype(np.int64 if model.objective.labels else layout.dtype))
        targets[place, :count] = model.objective.encode(encoded, model.outputs, dtype)
    samples, targets = samples.to(device), targets.to(device)
    gram = LinearProgram.gram_of(samples, training)

    def make(lanes: int, chunk: int, slots: int, width: int) -> LinearProgram:
        return LinearProgram(
            model, samples, targets, training, lanes=lanes, slots=slots, batch=batch, chunk=chunk,
            clients_a_lane=len(federations[0].clients), gram=gram, server_rate=federations[0].facts.server_rate,
            everyone=participation.kind == "all", clipped=clipped,
        )  # fmt: skip

    drawing = Drawing(slots, participation, batch, training.steps, 0)
    return LaneSource(drawing, layout.size, np.arange(layout.size, dtype=np.int64), make)
