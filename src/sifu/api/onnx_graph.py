"""A released model as an ONNX graph, written node by node: `onnx` is all it needs, and nothing is traced.

The input is what the description says the model takes: `x` for rows of numbers or images, scaled as the clients' were,
and `features` where a public feature map comes before a linear head. The outputs are `scores` and `prediction`. The
description itself is in the metadata of the file, under `sifu`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from sifu.core.spec import LINEAR_KINDS, RIDGE
from sifu.errors import InputError
from sifu.theory.arrays import Array

if TYPE_CHECKING:
    from sifu.engines.sim.networks import ConvNet

ONNX_ENDING = ".onnx"
OPSET, IR_VERSION = 17, 9
"""Old enough for the runtimes that people have: ONNX 1.14 and later read it."""


class _Graph:
    """Nodes and constants as they are added; every node but those of the ends has one input and one output."""

    def __init__(self, source: str) -> None:
        from onnx import helper, numpy_helper

        self._helper, self._arrays = helper, numpy_helper
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.last = source

    def constant(self, name: str, values: Any) -> str:
        """An array that belongs to the model."""
        self.constants.append(self._arrays.from_array(np.ascontiguousarray(values), name))
        return name

    def add(self, kind: str, *constants: str, output: str = "", source: str = "", **attributes: Any) -> str:
        """A node that takes what came last (or `source`) and some constants."""
        name = output or f"{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(self._helper.make_node(kind, [source or self.last, *constants], [name], **attributes))
        self.last = name
        return name

    def affine(self, name: str, weight: Array, bias: Array, output: str = "") -> None:
        """x W + b, with W of shape (in, out)."""
        self.add("MatMul", self.constant(f"{name}.weight", weight))
        self.add("Add", self.constant(f"{name}.bias", bias), output=output)


def onnx_bytes(description: dict[str, Any], content: bytes) -> bytes:
    """The file of a model, by its description and the safetensors bytes of its parameters."""
    try:
        from onnx import TensorProto, checker, helper
    except ModuleNotFoundError as error:
        raise InputError("to write ONNX files, install onnx: pip install 'sifu[onnx]'") from error
    from safetensors.numpy import load

    kind, outputs = description["model"], int(description["outputs"])
    if kind == "python":
        raise InputError("this is a model of a program of your own: export it as safetensors, or with torch.onnx")
    if kind == "resnet_small":
        raise InputError("resnet_small is not written as ONNX: export it as safetensors, which sifu.load_model reads")
    on_features = description["features"]["kind"] != "none" or kind == RIDGE
    graph = _Graph("features" if on_features else "x")
    source = graph.last
    # Runtimes on a CPU have no convolution of doubles.
    element = np.dtype("float32" if kind not in (*LINEAR_KINDS, RIDGE, "mlp") else description["dtype"])
    arrays = {name: values.astype(element) for name, values in load(content).items()}
    if kind in (*LINEAR_KINDS, RIDGE):
        shape: list[Any] = [int(arrays["weight"].shape[0])]
        graph.affine("head", arrays["weight"], arrays["bias"], "scores")
    elif kind == "mlp":
        shape = [int(arrays["1.weight"].shape[1])]
        graph.affine("hidden", arrays["1.weight"].T, arrays["1.bias"])
        graph.add("Tanh")
        graph.affine("output", arrays["3.weight"].T, arrays["3.bias"], "scores")
    else:
        shape = _convolutions(graph, description, arrays)
    predicted = _prediction(graph, description, element)
    number = helper.np_dtype_to_tensor_dtype(element)
    whole = predicted in ("one", "labels")
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            f"sifu {kind}",
            [helper.make_tensor_value_info(source, number, ["samples", *shape])],
            [
                helper.make_tensor_value_info("scores", number, ["samples", outputs]),
                helper.make_tensor_value_info(
                    "prediction",
                    TensorProto.INT64 if whole else number,
                    ["samples"] if predicted == "one" else ["samples", outputs],
                ),
            ],
            graph.constants,
        ),
        producer_name="sifu",
        opset_imports=[helper.make_opsetid("", OPSET)],
    )
    model.ir_version = IR_VERSION
    helper.set_model_props(model, {"sifu": json.dumps(description)})
    checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString())


def _convolutions(graph: _Graph, description: dict[str, Any], arrays: dict[str, Array]) -> list[Any]:
    """The layers of a convolutional network; returns the shape of an image."""
    from sifu.engines.sim.networks import CONV_NETS

    shape = description["input_shape"]
    if shape is None:
        raise InputError(
            "the shape of the images is not known any more, so the network cannot be written: put the data file back "
            "where the spec says (data.file) and export again"
        )
    network: ConvNet = CONV_NETS[description["model"]](tuple(shape), int(description["outputs"]))
    for number, convolution in enumerate(network.convolution_layers, 1):
        names = [graph.constant(f"conv{number}.{part}", arrays[f"conv{number}.{part}"]) for part in ("weight", "bias")]
        graph.add("Conv", *names, kernel_shape=[3, 3], pads=4 * [convolution.padding])
        if convolution.relu:
            graph.add("Relu")
        if convolution.pool:
            graph.add("MaxPool", kernel_shape=[2, 2], strides=[2, 2])
    graph.add("Flatten", axis=1)
    for number, layer in enumerate(network.linear_layers, 1):
        output = "" if layer.hidden else "scores"
        graph.affine(f"fc{number}", arrays[f"fc{number}.weight"].T, arrays[f"fc{number}.bias"], output)
        if layer.hidden:
            graph.add("Relu")
    return list(shape)


def _prediction(graph: _Graph, description: dict[str, Any], element: np.dtype[Any]) -> str:
    """Decide from the scores as `LoadedModel.predict` does; says what was decided: one class, labels, or values."""
    from onnx import TensorProto

    kind, task = description["model"], description["task"] or {}
    if kind == "logistic":
        graph.add("Greater", graph.constant("zero", np.zeros((), element)))
        graph.add("Cast", to=TensorProto.INT64)
        graph.add("Squeeze", graph.constant("last_axis", np.array([1], np.int64)), output="prediction")
        return "one"
    if kind == "least_squares":
        graph.add("Identity", output="prediction")
        return "values"
    if task.get("task") == "regression":
        graph.add("Mul", graph.constant("scale", np.array(task["scale"], element)))
        graph.add("Add", graph.constant("shift", np.array(task["shift"], element)), output="prediction")
        return "values"
    if task.get("task") == "multi_label":
        graph.add("Greater", graph.constant("threshold", np.array(0.5 - task["shift"], element)))
        graph.add("Cast", to=TensorProto.INT64, output="prediction")
        return "labels"
    graph.add("ArgMax", axis=1, keepdims=0, output="prediction")
    return "one"
