"""Networks under a head as nodes of an ONNX graph: a torch module is exported to its operations, each written by hand.

Networks that groups tuned share their frozen layers: a node with the inputs and constants of an earlier one is that
node (`Graph.add`), so of S + 1 copies of a trunk everything below the first tuned layer is in the file, and computed,
once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sifu.api.loaded_model import LoadedModel, described_map
from sifu.api.onnx_inputs import INSTEAD, Graph, Prepared, at_most, raw_samples
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
        return _scaled(graph, mapping, samples)
    assert isinstance(mapping, TunedFeatures)  # no other map goes through networks
    public, networks = mapping.parts
    parts = [_scaled(graph, public, samples)]
    for group in range(mapping.blocks.count):
        if group in networks:
            parts.append(_scaled(graph, networks[group], samples))
        else:  # a struck block: as many zeros as it has features
            first = graph.add("Slice", parts[0], *(graph.constant(np.array([at], np.int64)) for at in (0, 1, 1)))
            zeros = graph.constant(np.zeros((1, mapping.blocks.block)))
            parts.append(graph.add("Mul", first, zeros))
    return graph.add("Concat", *parts, axis=1)


def _scaled(graph: Graph, mapping: NetworkFeatures, samples: str) -> str:
    """Rows of a network's output, each brought to the length `norm`; a row of zeros stays one."""
    kind = next((value.dtype for value in mapping.module.parameters()), torch.float32)
    element = np.dtype(str(kind).removeprefix("torch."))
    example = torch.zeros(2, *mapping.shape, dtype=kind, device=mapping.device)
    nodes, _ = _nodes(graph, mapping.module, example, graph.cast(samples, element))
    rows = graph.cast(nodes, np.float64)
    length = graph.add("Sqrt", graph.sums(graph.add("Mul", rows, rows)))
    nothing = graph.add("Equal", length, graph.constant(0.0))
    divisor = graph.add("Where", nothing, graph.constant(1.0), length)
    return graph.add("Div", graph.add("Mul", rows, graph.constant(mapping.norm)), divisor)


def module_scores(
    graph: Graph, own: Model, description: dict[str, Any], arrays: Mapping[str, Array], prepared: Prepared
) -> tuple[str, int, np.dtype[Any]]:
    """The scores of a module of the user's, how many a sample has, and the type of their numbers."""
    # Runtimes on a CPU have no convolution of doubles.
    element = np.dtype("float32" if any(values.ndim > 2 for values in arrays.values()) else description["dtype"])
    network = LoadedModel({**arrays}, description, own=own).network.to(torch.from_numpy(np.zeros(0, element)).dtype)
    example = torch.from_numpy(np.zeros((2, *prepared.shape), element))
    return *_nodes(graph, network, example, graph.cast(prepared.features, element)), element


def _nodes(graph: Graph, module: torch.nn.Module, example: torch.Tensor, samples: str) -> tuple[str, int]:
    """The operations of a module, flat at the end, and how many numbers a sample becomes."""
    try:
        exported = torch.export.export(module, (example,), dynamic_shapes=({0: torch.export.Dim("samples")},))
    except Exception as error:  # of many kinds: a module may do anything
        raise InputError(f"torch.export cannot export the network ({error}): {INSTEAD}") from error
    arrays = {
        entry.arg.name: (exported.state_dict | exported.constants)[entry.target].detach().cpu().numpy()
        for entry in exported.graph_signature.input_specs
        if entry.target is not None
    }
    values: dict[str, Any] = {}
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            values[node.name] = graph.constant(arrays[node.name]) if node.name in arrays else samples
        elif node.op == "call_function":
            name = str(node.target)
            if name not in WRITERS:
                raise InputError(f"the network's operation {name} is not written as ONNX: {INSTEAD}")
            given = [_given(argument, values) for argument in node.args]
            named = {key: _given(argument, values) for key, argument in node.kwargs.items()}
            values[node.name] = WRITERS[name](_Operation(graph, node), *given, **named)
        elif node.op == "output":
            (output,) = node.args[0]
            width = math.prod(int(size) for size in output.meta["val"].shape[1:])
            return graph.add("Flatten", values[output.name], axis=1), width
    raise InputError(f"the network has no output: {INSTEAD}")


def _given(argument: Any, values: dict[str, Any]) -> Any:
    """An argument of an operation: the name of a value in the graph, or what torch was given."""
    if isinstance(argument, torch.fx.Node):
        return values[argument.name]
    if isinstance(argument, (list, tuple)):
        return [_given(part, values) for part in argument]
    return argument


class _Operation:
    """One operation of torch that is being written."""

    def __init__(self, graph: Graph, node: torch.fx.Node) -> None:
        self.graph = graph
        self._value: Any = node.meta.get("val")
        self.inputs = [argument.meta["val"] for argument in node.args if isinstance(argument, torch.fx.Node)]

    @property
    def shape(self) -> list[int]:
        """Of the result, without the number of samples."""
        return [int(size) for size in self._value.shape[1:]]

    @property
    def element(self) -> np.dtype[Any]:
        """The type of its numbers."""
        return np.dtype(str(self._value.dtype).removeprefix("torch."))

    def value(self, operand: Any) -> str:
        """The name of an operand, which may be a number."""
        return operand if isinstance(operand, str) else self.graph.constant(np.array(operand, self.element))

    def refuse(self, what: str) -> InputError:
        """An operation with settings that are not written."""
        return InputError(f"the network has {what}, which is not written as ONNX: {INSTEAD}")


Writer = Callable[..., str]


def _simple(kind: str) -> Writer:
    return lambda operation, value, *_, **__: operation.graph.add(kind, value)


def _arithmetic(kind: str) -> Writer:
    def write(operation: _Operation, left: Any, right: Any, **settings: Any) -> str:
        if settings.get("alpha", 1) != 1 or settings.get("rounding_mode") is not None:
            raise operation.refuse(f"{kind} with {settings}")
        return operation.graph.add(kind, operation.value(left), operation.value(right))

    return write


def _clip(operation: _Operation, value: str, low: float = 0.0, high: float = 6.0) -> str:
    return operation.graph.add("Clip", value, operation.value(low), operation.value(high))


def _pair(value: Any) -> list[int]:
    return [int(part) for part in value] * (2 if len(value) == 1 else 1) if isinstance(value, list) else [value] * 2


def _convolution(
    operation: _Operation,
    value: str,
    weight: str,
    bias: str | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> str:
    if isinstance(padding, str):
        raise operation.refuse(f"a convolution padded {padding!r}")
    inputs = [value, weight] if bias is None else [value, weight, bias]
    settings: dict[str, Any] = {"strides": _pair(stride), "pads": 2 * _pair(padding), "dilations": _pair(dilation)}
    return operation.graph.add("Conv", *inputs, group=groups, **settings)


def _normalised(
    operation: _Operation,
    value: str,
    weight: str | None,
    bias: str | None,
    mean: Any,
    variance: Any,
    training: bool = False,
    momentum: float = 0.1,
    epsilon: float = 1e-5,
    cudnn: bool = False,
) -> str:
    graph, channels = operation.graph, operation.shape[0]
    scale = weight or graph.constant(np.ones(channels, operation.element))
    shift = bias or graph.constant(np.zeros(channels, operation.element))
    if training:  # with the statistics of the batch, channel by channel
        axes = [axis for axis in range(len(operation.shape) + 1) if axis != 1]
        apart = graph.add("Sub", value, graph.add("ReduceMean", value, axes=axes, keepdims=1))
        squares = graph.add("ReduceMean", graph.add("Mul", apart, apart), axes=axes, keepdims=1)
        deviation = graph.add("Sqrt", graph.add("Add", squares, operation.value(epsilon)))
        sizes = graph.constant(np.array([channels, *[1] * (len(operation.shape) - 1)], np.int64))
        scaled = graph.add("Mul", graph.add("Div", apart, deviation), graph.add("Reshape", scale, sizes))
        return graph.add("Add", scaled, graph.add("Reshape", shift, sizes))
    return graph.add("BatchNormalization", value, scale, shift, mean, variance, epsilon=epsilon)


def _layer_norm(
    operation: _Operation,
    value: str,
    shape: Sequence[int],
    weight: str | None = None,
    bias: str | None = None,
    epsilon: float = 1e-5,
    cudnn: bool = True,
) -> str:
    scale = weight or operation.graph.constant(np.ones(shape, operation.element))
    shift = bias or operation.graph.constant(np.zeros(shape, operation.element))
    return operation.graph.add("LayerNormalization", value, scale, shift, axis=-len(shape), epsilon=epsilon)


def _linear(operation: _Operation, value: str, weight: str, bias: str | None = None) -> str:
    graph = operation.graph
    result = graph.add("MatMul", value, graph.add("Transpose", weight, perm=[1, 0]))
    return result if bias is None else graph.add("Add", result, bias)


def _transposed(operation: _Operation, value: str) -> str:
    return operation.graph.add("Transpose", value, perm=[1, 0])


def _reshaped(operation: _Operation, value: str, *_: Any, **__: Any) -> str:
    """Any shape in which samples stay apart; the number of samples is that of the input."""
    sizes = np.array([0, *operation.shape], np.int64)
    return operation.graph.add("Reshape", value, operation.graph.constant(sizes))


def _max_pool(
    operation: _Operation,
    value: str,
    kernel: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> str:
    return operation.graph.add(
        "MaxPool",
        value,
        kernel_shape=_pair(kernel),
        strides=_pair(stride or kernel),
        pads=2 * _pair(padding),
        dilations=_pair(dilation),
        ceil_mode=int(ceil_mode),
    )


def _average_pool(
    operation: _Operation,
    value: str,
    kernel: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    counts_padding: bool = True,
    divisor: Any = None,
) -> str:
    if divisor is not None or ceil_mode:
        raise operation.refuse("an average pool with a divisor or ceil_mode")
    sizes: dict[str, Any] = {
        "kernel_shape": _pair(kernel),
        "strides": _pair(stride or kernel),
        "pads": 2 * _pair(padding),
    }
    return operation.graph.add("AveragePool", value, count_include_pad=int(counts_padding), **sizes)


def _adaptive_pool(operation: _Operation, value: str, size: Any) -> str:
    if _pair(size) != [1, 1]:
        raise operation.refuse(f"an adaptive average pool to {_pair(size)}")
    return operation.graph.add("GlobalAveragePool", value)


def _mean(operation: _Operation, value: str, axes: Any, keeps: bool = False, **_: Any) -> str:
    return operation.graph.add("ReduceMean", value, axes=[int(axis) for axis in axes], keepdims=int(keeps))


def _padded(operation: _Operation, value: str, sides: Sequence[int], mode: str = "constant", fill: Any = None) -> str:
    if mode != "constant":
        raise operation.refuse(f"padding of mode {mode!r}")
    rank = len(operation.shape) + 1
    ends = [0] * (2 * rank)
    for place in range(len(sides) // 2):  # torch begins with the last axis
        ends[rank - 1 - place], ends[2 * rank - 1 - place] = sides[2 * place], sides[2 * place + 1]
    if not any(ends):
        return value
    graph = operation.graph
    return graph.add("Pad", value, graph.constant(np.array(ends, np.int64)), operation.value(fill or 0.0))


def _enlarged(operation: _Operation, value: str, size: Any, corners: bool, scales: Any) -> str:
    if corners:
        raise operation.refuse("interpolation with align_corners")
    (image,), (height, width) = operation.inputs, operation.shape[1:]
    factors = np.array([1, 1, height / int(image.shape[2]), width / int(image.shape[3])], np.float32)
    names = ("", operation.graph.constant(factors))
    return operation.graph.add("Resize", value, *names, mode="linear", coordinate_transformation_mode="half_pixel")


def _silu(operation: _Operation, value: str) -> str:
    return operation.graph.add("Mul", value, operation.graph.add("Sigmoid", value))


def _gelu(operation: _Operation, value: str, approximate: str = "none") -> str:
    if approximate != "none":
        raise operation.refuse(f"gelu approximated by {approximate}")
    graph = operation.graph
    wave = graph.add("Erf", graph.add("Mul", value, operation.value(2.0**-0.5)))
    half = graph.add("Mul", value, operation.value(0.5))
    return graph.add("Mul", half, graph.add("Add", wave, operation.value(1.0)))


def _leaky(operation: _Operation, value: str, slope: float = 0.01) -> str:
    return operation.graph.add("LeakyRelu", value, alpha=slope)


def _soft(operation: _Operation, value: str, axis: int, *_: Any) -> str:
    return operation.graph.add("Softmax", value, axis=axis)


def _joined(operation: _Operation, values: Sequence[str], axis: int = 0) -> str:
    return operation.graph.add("Concat", *values, axis=axis)


def _cast(operation: _Operation, value: str, *_: Any, **__: Any) -> str:
    return operation.graph.cast(value, operation.element)


def _same(operation: _Operation, value: str, *_: Any, **__: Any) -> str:
    return value


WRITERS: dict[str, Writer] = {
    "aten.conv2d.default": _convolution,
    "aten.conv2d.padding": _convolution,
    "aten.batch_norm.default": _normalised,
    "aten.layer_norm.default": _layer_norm,
    "aten.linear.default": _linear,
    "aten.matmul.default": _arithmetic("MatMul"),
    "aten.mm.default": _arithmetic("MatMul"),
    "aten.t.default": _transposed,
    "aten.numpy_T.default": _transposed,
    "aten.relu.default": _simple("Relu"),
    "aten.relu_.default": _simple("Relu"),
    "aten.tanh.default": _simple("Tanh"),
    "aten.sigmoid.default": _simple("Sigmoid"),
    "aten.relu6.default": _clip,
    "aten.relu6_.default": _clip,
    "aten.hardtanh.default": _clip,
    "aten.hardtanh_.default": _clip,
    "aten.silu.default": _silu,
    "aten.silu_.default": _silu,
    "aten.hardswish.default": _simple("HardSwish"),
    "aten.gelu.default": _gelu,
    "aten.leaky_relu.default": _leaky,
    "aten.softmax.int": _soft,
    "aten.flatten.using_ints": _reshaped,
    "aten.view.default": _reshaped,
    "aten.reshape.default": _reshaped,
    "aten.max_pool2d.default": _max_pool,
    "aten.avg_pool2d.default": _average_pool,
    "aten.adaptive_avg_pool2d.default": _adaptive_pool,
    "aten.mean.dim": _mean,
    "aten.pad.default": _padded,
    "aten.upsample_bilinear2d.vec": _enlarged,
    "aten.add.Tensor": _arithmetic("Add"),
    "aten.add_.Tensor": _arithmetic("Add"),
    "aten.sub.Tensor": _arithmetic("Sub"),
    "aten.mul.Tensor": _arithmetic("Mul"),
    "aten.div.Tensor": _arithmetic("Div"),
    "aten.cat.default": _joined,
    "aten.dropout.default": _same,
    "aten._assert_tensor_metadata.default": _same,
    "aten.to.dtype": _cast,
    "aten.clone.default": _same,
    "aten.contiguous.default": _same,
}
