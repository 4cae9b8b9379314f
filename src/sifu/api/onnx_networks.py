"""Networks as nodes of an ONNX graph, as torch's own exporter writes them.

Networks that groups tuned share their frozen layers: a node with the inputs and constants of an earlier one is that
node (`Graph.add`), so of S + 1 copies of a trunk everything below the first tuned layer is in the file, and computed,
once.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sifu.api.loaded_model import LoadedModel, described_map
from sifu.api.onnx_inputs import INSTEAD, OPSET, Graph, Prepared, at_most, raw_samples
from sifu.data.feature_maps.fixed_networks import NetworkFeatures
from sifu.data.feature_maps.tuned_networks import TunedFeatures
from sifu.errors import InputError
from sifu.theory.arrays import Array

if TYPE_CHECKING:
    from sifu.data.feature_maps import FeatureMap
    from sifu.engines.sim.models import Model


def prepared_through_networks(
    graph: Graph, description: dict[str, Any], networks: Mapping[str, Array] | None
) -> Prepared:
    """The inputs of a graph and their features through a public network, and through what groups tuned of it."""
    samples, shape = raw_samples(graph, description, None)
    flat = samples if len(shape) == 1 else graph.add("Flatten", samples, axis=1)
    valid = at_most(graph, graph.cast(flat, np.float64), float(np.finfo(np.float32).max))
    return Prepared(network_features(graph, described_map(description, networks or {}, shape), samples), valid)


def network_features(graph: Graph, mapping: FeatureMap, samples: str) -> str:
    """The features of a map through networks, from samples in its shape: all parts in their places, as doubles."""
    if isinstance(mapping, NetworkFeatures):
        return _scaled(graph, mapping, samples, _exported_map(mapping))
    assert isinstance(mapping, TunedFeatures)  # no other map goes through networks
    public, networks = mapping.parts
    parts = [_scaled(graph, public, samples, _exported_map(public))]
    # Groups' networks differ in their parameters only.
    exported = _exported_map(next(iter(networks.values()))) if networks else None
    for group in range(mapping.blocks.count):
        if group in networks:
            parts.append(_scaled(graph, networks[group], samples, exported))
        else:  # a struck block: as many zeros as it has features
            first = graph.add("Slice", parts[0], *(graph.constant(np.array([at], np.int64)) for at in (0, 1, 1)))
            zeros = graph.constant(np.zeros((1, mapping.blocks.block)))
            parts.append(graph.add("Mul", first, zeros))
    return graph.add("Concat", *parts, axis=1)


def _exported_map(mapping: NetworkFeatures) -> Any:
    kind = next((value.dtype for value in mapping.module.parameters()), torch.float32)
    return _exported(mapping.module, torch.zeros(2, *mapping.shape, dtype=kind, device=mapping.device))[0]


def _scaled(graph: Graph, mapping: NetworkFeatures, samples: str, exported: Any) -> str:
    """Rows of a network's output, each brought to the length `norm`; a row of zeros stays one."""
    rows = graph.cast(_nodes(graph, exported, mapping.module, samples), np.float64)
    length = graph.add("Sqrt", graph.sums(graph.add("Mul", rows, rows)))
    nothing = graph.add("Equal", length, graph.constant(0.0))
    divisor = graph.add("Where", nothing, graph.constant(1.0), length)
    return graph.add("Div", graph.add("Mul", rows, graph.constant(mapping.norm)), divisor)


def network_scores(
    graph: Graph, own: Model | None, description: dict[str, Any], arrays: dict[str, Array], prepared: Prepared
) -> tuple[str, int]:
    """The scores of a network, of a spec or of the user's, and how many a sample has."""
    example = torch.from_numpy(np.zeros((2, *prepared.shape), next(iter(arrays.values())).dtype))
    network = LoadedModel(arrays, description, own=own).network.to(example.dtype)
    exported, width = _exported(network, example)
    return _nodes(graph, exported, network, prepared.features), width


def _nodes(graph: Graph, exported: Any, module: torch.nn.Module, samples: str) -> str:
    """An exported network with the parameters of a module, its output flat."""
    parameters = {name: value.detach().cpu().numpy() for name, value in module.state_dict().items()}
    return graph.add("Flatten", graph.copy(exported, samples, parameters), axis=1)


def _exported(module: torch.nn.Module, example: torch.Tensor) -> tuple[Any, int]:
    """A module as torch's exporter writes it, and how many numbers a sample becomes."""
    exporter = logging.getLogger("torch.onnx")
    level = exporter.level
    exporter.setLevel(logging.ERROR)  # it warns of every library that it could also translate
    try:
        from onnxscript.optimizer import fold_constants, remove_unused_nodes

        with warnings.catch_warnings(action="ignore"):
            exported = torch.export.export(module, (example,), dynamic_shapes=({0: torch.export.Dim("samples")},))
            exported = exported.run_decompositions({torch.ops.aten.batch_norm.default: _normalised})
            if any("norm_legit_functional" in str(node.target) for node in exported.graph.nodes):
                raise ValueError("it normalises with the batch's statistics and keeps running ones")
            # Optimised, it would fold normalisation into convolutions, and other parameters would not fit any more.
            program = torch.onnx.export(exported, dynamo=True, opset_version=OPSET, optimize=False, verbose=False)
            assert program is not None
            program.model.graph.inputs.extend(program.model.graph.initializers.values())  # so they are not folded
            fold_constants(program.model)
            remove_unused_nodes(program.model)
    except Exception as error:  # of many kinds: a module may do anything
        raise InputError(f"torch cannot export the network ({error}): {INSTEAD}") from error
    finally:
        exporter.setLevel(level)
    graph = program.model_proto.graph
    return graph, math.prod(size.dim_value for size in graph.output[0].type.tensor_type.shape.dim[1:])


def _normalised(
    values: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    training: bool,
    momentum: float,
    epsilon: float,
    cudnn: bool,
) -> Any:
    """Batch normalisation by the batch's statistics, for which the exporter would write the running ones."""
    if not training:
        return NotImplemented
    axes, sizes = [axis for axis in range(values.dim()) if axis != 1], [-1, *[1] * (values.dim() - 2)]
    apart = values - values.mean(axes, keepdim=True)
    result = apart / torch.sqrt((apart * apart).mean(axes, keepdim=True) + epsilon)
    result = result if weight is None else result * weight.reshape(sizes)
    return result if bias is None else result + bias.reshape(sizes)
