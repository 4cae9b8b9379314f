"""A released model as an ONNX graph, written node by node; networks are exported by torch.

The graph covers all steps from a raw sample to a class. For a table, its inputs are the columns by name: each is one
column of doubles (NaN for a missing number) or of strings. Otherwise the input is `x`, bytes or numbers in the shape of
the data file. The outputs are `scores`, `prediction`, and `class` if the spec names the classes. A row that `sifu
predict` refuses has the scores NaN, the prediction -1 (NaN for regression) and an empty class. The metadata of the file
holds the description, under the key `sifu`.

Networks that groups tuned share their frozen layers: a node with the inputs and constants of an earlier one is not
added again (`Graph.add`). The layers below the first tuned layer are therefore stored and computed once for all S + 1
copies of a backbone.
"""

from __future__ import annotations

import json
import logging
import math
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.torch_version import TorchVersion

from sifu.core.spec.sections import HEAD_KINDS
from sifu.data.feature_maps import FeatureMap
from sifu.data.feature_maps.fixed_networks import NetworkFeatures
from sifu.data.feature_maps.tuned_networks import TunedFeatures
from sifu.engines.sim.models import Model
from sifu.errors import InputError, install_extra
from sifu.export.loaded_model import LoadedModel, described_map
from sifu.export.onnx_inputs import (
    INSTEAD,
    IR_VERSION,
    LABELS_OPSET,
    NETWORK_MAPS,
    OPSET,
    OUTPUTS,
    Graph,
    Prepared,
    at_most,
    prepared_inputs,
    raw_samples,
)
from sifu.theory.arrays import Array

NEEDED = f"to write a network as ONNX, install onnxscript and torch 2.7 or later: {install_extra('onnx')}"


def onnx_bytes(
    description: dict[str, Any], content: bytes, networks: bytes | None = None, own: Model | None = None
) -> bytes:
    """Return the ONNX file of a model.

    Args:
        description: Description of the model.
        content: Safetensors bytes of its parameters.
        networks: Safetensors bytes of the networks that groups tuned.
        own: The user's own model, or None for a built-in model.
    """
    try:
        from onnx import TensorProto, checker, helper
    except ModuleNotFoundError as error:
        raise InputError(f"to write ONNX files, install onnx: {install_extra('onnx')}") from error
    from safetensors.numpy import load

    kind, outputs = description["model"], int(description["outputs"])
    if kind == "python" and own is None:
        raise InputError(
            "this model is your own module: to write it as ONNX, open the run with the function that makes it, "
            "sifu.open_run(folder, model=..., clients=...).export(...)"
        )
    graph, arrays = Graph(), load(content)
    # CPU runtimes have no convolution of doubles.
    element = np.dtype("float32" if any(values.ndim > 2 for values in arrays.values()) else description["dtype"])
    arrays = {name: values.astype(element) for name, values in arrays.items()}
    if kind in HEAD_KINDS:
        if description["features"]["kind"] in NETWORK_MAPS:
            prepared = _through_networks(graph, description, {} if networks is None else load(networks))
        else:
            prepared = prepared_inputs(graph, description, int(arrays["weight"].shape[0]))
        scores = graph.affine(graph.cast(prepared.features, element), arrays["weight"], arrays["bias"])
    else:
        prepared = prepared_inputs(graph, description, int(arrays["1.weight"].shape[1]) if kind == "mlp" else None)
        example = torch.from_numpy(np.zeros((2, *prepared.shape), element))
        network = LoadedModel(arrays, description, own=own).network.to(example.dtype)
        exported, outputs = _exported(network, example)
        scores = _nodes(graph, exported, network, prepared.features)
    scores = graph.add("Where", prepared.valid, scores, graph.constant(np.array(math.nan, element)), output=OUTPUTS[0])
    decided = _prediction(graph, description, prepared, scores, element, kind if own is None else own.kind)
    number = helper.np_dtype_to_tensor_dtype(element)
    results: list[tuple[str, Any, Any]] = [
        ("scores", number, ["samples", outputs]),
        (
            "prediction",
            number if decided == "values" else TensorProto.INT64,
            ["samples"] if decided == "class" else ["samples", outputs],
        ),
    ]
    if description["classes"] and decided == "class":
        unnamed = map(str, range(len(description["classes"]), outputs))
        names = np.array([*description["classes"], *unnamed, ""], dtype=object)  # refused rows have index -1: ""
        graph.add("Gather", graph.constant(names), "prediction", axis=0, output="class")
        results.append(("class", TensorProto.STRING, ["samples"]))
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            f"sifu {kind}",
            graph.inputs,
            [helper.make_tensor_value_info(*result) for result in results],
            graph.constants,
        ),
        producer_name="sifu",
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid("ai.onnx.ml", LABELS_OPSET)],
    )
    model.ir_version = IR_VERSION
    helper.set_model_props(model, {"sifu": json.dumps(description | {"outputs": outputs})})
    checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString())


def _prediction(
    graph: Graph, description: dict[str, Any], prepared: Prepared, scores: str, element: np.dtype[Any], kind: str
) -> str:
    """Add the prediction that `LoadedModel.predict` makes; return its kind: class, labels or values."""
    task = description["task"] or {}
    if kind == "least_squares":
        graph.add("Identity", scores, output="prediction")
        return "values"
    if task.get("task") == "regression":
        scaled = graph.add("Mul", scores, graph.constant(np.array(task["scale"], element)))
        graph.add("Add", scaled, graph.constant(np.array(task["shift"], element)), output="prediction")
        return "values"
    nothing = graph.constant(np.array(-1, np.int64))
    if task.get("task") == "multi_label":
        shifted = graph.add("Add", scores, graph.constant(np.array(task["shift"], element)))
        labels = graph.cast(graph.add("Greater", shifted, graph.constant(np.array(0.5, element))), np.int64)
        graph.add("Where", prepared.valid, labels, nothing, output="prediction")
        return "labels"
    if kind == "logistic":
        decided = graph.cast(graph.add("Greater", scores, graph.constant(np.zeros((), element))), np.int64)
    else:
        decided = graph.add("ArgMax", scores, axis=1, keepdims=1)
    column = graph.add("Where", prepared.valid, decided, nothing)
    graph.add("Squeeze", column, graph.constant(np.array([1], np.int64)), output="prediction")
    return "class"


def _through_networks(graph: Graph, description: dict[str, Any], networks: Mapping[str, Array]) -> Prepared:
    """Add the inputs of a graph, and their features computed by a public network and the groups' tuned networks."""
    if description["features"]["kind"] == "transformers" and len(description["input_shape"] or ()) != 3:
        raise InputError(f"the tokenizer of a text cannot be part of an ONNX graph: {INSTEAD}")
    samples, shape = raw_samples(graph, description, None)
    flat = samples if len(shape) == 1 else graph.add("Flatten", samples, axis=1)
    valid = at_most(graph, graph.cast(flat, np.float64), float(np.finfo(np.float32).max))
    return Prepared(_network_features(graph, described_map(description, networks, shape), samples), valid)


def _network_features(graph: Graph, mapping: FeatureMap, samples: str) -> str:
    """Add the features that a map's networks compute, concatenated in block order, as doubles; return their name."""
    if isinstance(mapping, NetworkFeatures):
        return _scaled(graph, mapping, samples, _exported_map(mapping))
    assert isinstance(mapping, TunedFeatures)  # only this map uses several networks
    public, networks = mapping.parts
    parts = [_scaled(graph, public, samples, _exported_map(public))]
    # The groups' networks differ only in their parameters, so one export serves all of them.
    exported = _exported_map(next(iter(networks.values()))) if networks else None
    for group in range(mapping.blocks.count):
        if group in networks:
            parts.append(_scaled(graph, networks[group], samples, exported))
        else:  # a dropped block is replaced by zeros
            first = graph.add("Slice", parts[0], *(graph.constant(np.array([at], np.int64)) for at in (0, 1, 1)))
            zeros = graph.constant(np.zeros((1, mapping.blocks.block)))
            parts.append(graph.add("Mul", first, zeros))
    return graph.add("Concat", *parts, axis=1)


def _exported_map(mapping: NetworkFeatures) -> Any:
    kind = next((value.dtype for value in mapping.module.parameters()), torch.float32)
    return _exported(mapping.module, torch.zeros(2, *mapping.shape, dtype=kind, device=mapping.device))[0]


def _scaled(graph: Graph, mapping: NetworkFeatures, samples: str, exported: Any) -> str:
    """Add a network's output, with each row scaled to the length `norm`; a row of zeros stays zero."""
    rows = graph.cast(_nodes(graph, exported, mapping.module, samples), np.float64)
    length = graph.add("Sqrt", graph.sums(graph.add("Mul", rows, rows)))
    nothing = graph.add("Equal", length, graph.constant(0.0))
    divisor = graph.add("Where", nothing, graph.constant(1.0), length)
    return graph.add("Div", graph.add("Mul", rows, graph.constant(mapping.norm)), divisor)


def _nodes(graph: Graph, exported: Any, module: torch.nn.Module, samples: str) -> str:
    """Add an exported network with the parameters of a module; return the name of its flattened output."""
    parameters = {name: value.detach().cpu().numpy() for name, value in module.state_dict().items()}
    return graph.add("Flatten", graph.copy(exported, samples, parameters), axis=1)


def _exported(module: torch.nn.Module, example: torch.Tensor) -> tuple[Any, int]:
    """Export a module with torch; return the result and the number of outputs per sample."""
    try:
        from onnxscript.optimizer import fold_constants, remove_unused_nodes
    except ImportError as error:
        raise InputError(NEEDED) from error
    if TorchVersion(torch.__version__) < "2.7":
        raise InputError(f"{NEEDED} (torch {torch.__version__} is installed)")
    exporter = logging.getLogger("torch.onnx")
    level = exporter.level
    exporter.setLevel(logging.ERROR)  # hides warnings about missing optional libraries
    try:
        with warnings.catch_warnings(action="ignore"):
            exported = torch.export.export(module, (example,), dynamic_shapes=({0: torch.export.Dim("samples")},))
            exported = exported.run_decompositions({torch.ops.aten.batch_norm.default: _normalised})
            if any("norm_legit_functional" in str(node.target) for node in exported.graph.nodes):
                raise ValueError("it normalises with the batch's statistics and keeps running ones")
            # Optimisation would fold normalisation into convolutions; parameters of other networks would not fit then.
            program = torch.onnx.export(exported, dynamo=True, opset_version=OPSET, optimize=False, verbose=False)
            assert program is not None
            program.model.graph.inputs.extend(program.model.graph.initializers.values())  # this prevents folding
            fold_constants(program.model)
            remove_unused_nodes(program.model)
    except Exception as error:  # a user's module may raise any exception
        cause: BaseException = error
        while cause.__cause__ is not None:  # the first error in the chain names the operation
            cause = cause.__cause__
        why = " ".join(str(cause).split())[:300]
        raise InputError(f"torch cannot export the network ({why}): {INSTEAD}") from error
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
    """Return values normalised by the batch's statistics; the exporter would use running statistics."""
    if not training:
        return NotImplemented
    axes, sizes = [axis for axis in range(values.dim()) if axis != 1], [-1, *[1] * (values.dim() - 2)]
    centred = values - values.mean(axes, keepdim=True)
    result = centred / torch.sqrt((centred * centred).mean(axes, keepdim=True) + epsilon)
    result = result if weight is None else result * weight.reshape(sizes)
    return result if bias is None else result + bias.reshape(sizes)
