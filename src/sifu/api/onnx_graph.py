"""A released model as an ONNX graph, written node by node; networks are as torch exports them.

The graph is the whole path from a raw sample to a class. Of a table its inputs are the columns by name, each with one
column of doubles (NaN where a number is missing) or of texts; otherwise the input is `x`, bytes or numbers in the shape
that the data file has. The outputs are `scores`, `prediction`, and `class` where the spec names the classes. What
`sifu predict` refuses to predict has the scores NaN, the prediction -1 and no class. The description itself is in the
metadata of the file, under `sifu`.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from sifu.api.onnx_inputs import (
    IR_VERSION,
    LABELS_OPSET,
    NETWORK_MAPS,
    OPSET,
    OUTPUTS,
    Graph,
    Prepared,
    prepared_inputs,
)
from sifu.core.spec import LINEAR_KINDS, RIDGE
from sifu.errors import InputError

if TYPE_CHECKING:
    from sifu.engines.sim.models import Model

ONNX_ENDING = ".onnx"


def onnx_bytes(
    description: dict[str, Any], content: bytes, networks: bytes | None = None, own: Model | None = None
) -> bytes:
    """The file of a model, by its description and the safetensors bytes of its parameters and of what groups tuned.

    `own` is the model of a program of the user's.
    """
    try:
        from onnx import TensorProto, checker, helper
    except ModuleNotFoundError as error:
        raise InputError("to write ONNX files, install onnx: pip install 'sifu[onnx]'") from error
    from safetensors.numpy import load

    kind, outputs = description["model"], int(description["outputs"])
    if kind == "python" and own is None:
        raise InputError(
            "this model is a module of your own: to write it as ONNX, open the run with what makes it, "
            "sifu.open_run(folder, model=..., clients=...).export(...)"
        )
    graph, arrays = Graph(), load(content)
    # Runtimes on a CPU have no convolution of doubles.
    element = np.dtype("float32" if any(values.ndim > 2 for values in arrays.values()) else description["dtype"])
    arrays = {name: values.astype(element) for name, values in arrays.items()}
    if kind in (*LINEAR_KINDS, RIDGE):
        if description["features"]["kind"] in NETWORK_MAPS:
            from sifu.api.onnx_networks import prepared_through_networks  # imports torch

            prepared = prepared_through_networks(graph, description, None if networks is None else load(networks))
        else:
            prepared = prepared_inputs(graph, description, int(arrays["weight"].shape[0]))
        scores = graph.affine(graph.cast(prepared.features, element), arrays["weight"], arrays["bias"])
    else:
        from sifu.api.onnx_networks import network_scores

        prepared = prepared_inputs(graph, description, int(arrays["1.weight"].shape[1]) if kind == "mlp" else None)
        scores, outputs = network_scores(graph, own, description, arrays, prepared)
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
        names = np.array([*description["classes"], *unnamed, ""], dtype=object)  # the last one stands for -1
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
    """Decide from the scores as `LoadedModel.predict` does; says what was decided: a class, labels, or values."""
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
