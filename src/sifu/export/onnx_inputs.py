"""Nodes of an ONNX graph that compute a model's features from a raw row or image.

Columns of a table are coded, bytes are looked up in a table of their 256 possible values, and rows are passed to the
feature map, all with the operations of `TableCoding`, `scale_features` and the map itself. Inputs that these operations
refuse (an unlisted category, a missing value without a filler, infinity, a number that is too large) get the score NaN
and an empty class.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sifu.core.operator_words import PYTHON
from sifu.data.dataset import scale_features
from sifu.data.feature_maps import FeatureMap, PlainInputs, Projection, RandomFourier
from sifu.data.feature_maps.row_maps import FREQUENCY_BITS, INPUT_BITS, LARGEST_INPUT, LARGEST_WHOLE, TURN_BITS
from sifu.data.sources import scale_of
from sifu.data.table_coding import TableCoding
from sifu.data.table_values import MISSING_WORDS
from sifu.errors import InputError
from sifu.export.loaded_model import described_map

OPSET, LABELS_OPSET, IR_VERSION = 18, 3, 9
"""Versions of the operator sets and of the file format, which ONNX 1.14 and later read."""
OUTPUTS = ("scores", "prediction", "class")
WRITTEN_MAPS = ("none", "projection", "random_fourier")
NETWORK_MAPS = ("module", "pretrained", "transformers")
INSTEAD = "export it as safetensors, which sifu predict and sifu.load_model use"


class Graph:
    """Inputs, nodes and constants of a graph under construction; generated names begin with a slash."""

    def __init__(self) -> None:
        from onnx import helper, numpy_helper

        self.helper, self._arrays = helper, numpy_helper
        self.inputs: list[Any] = []
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self._added: dict[Any, str] = {}

    def input(self, name: str, element: int, shape: list[int]) -> str:
        """Add an input with one row per sample; return its name, which differs from the names of all outputs."""
        own = f"column {name}" if name in OUTPUTS else name
        self.inputs.append(self.helper.make_tensor_value_info(own, element, ["samples", *shape]))
        return own

    def constant(self, values: Any) -> str:
        """Add a constant array of the model and return its name; equal arrays are stored once."""
        name = f"/constant_{len(self.constants)}"
        array = np.asarray(values)
        key = (array.dtype.str, array.shape, array.tolist() if array.dtype == object else array.tobytes())
        earlier = self._added.setdefault(repr(key) if array.dtype == object else key, name)
        if earlier != name:
            return earlier
        self.constants.append(self._arrays.from_array(array.copy(order="C") if array.ndim else array, name))
        return name

    def add(
        self, kind: str, *inputs: str, output: str = "", domain: str = "", outputs: int = 1, **attributes: Any
    ) -> str:
        """Add a node, or reuse an equal one with the same inputs and attributes; return the name of its first output.

        Further outputs are called NAME/1, NAME/2, ...

        Args:
            kind: Name of the ONNX operator.
            *inputs: Names of the inputs.
            output: Name of the first output. If empty, a name is generated.
            domain: Domain of the operator.
            outputs: Number of outputs.
            **attributes: Attributes of the operator.
        """
        name = output or f"/{kind.lower()}_{len(self.nodes)}"
        if not output:
            earlier = self._added.setdefault((kind, inputs, domain, repr(sorted(attributes.items()))), name)
            if earlier != name:
                return earlier
        names = [name, *(f"{name}/{number}" for number in range(1, outputs))]
        self.nodes.append(self.helper.make_node(kind, list(inputs), names, domain=domain, **attributes))
        return name

    def copy(self, other: Any, samples: str, parameters: Mapping[str, Any]) -> str:
        """Add the nodes of another graph; return the name of its output.

        Args:
            other: Graph to copy.
            samples: Name of the value that becomes its first input.
            parameters: Values of its parameters, by name.
        """
        given = other.input[0]
        values = {"": "", given.name: self.add("Cast", samples, to=given.type.tensor_type.elem_type)}
        for entry in other.initializer:
            parameter = parameters.get(entry.name)
            values[entry.name] = self.constant(self._arrays.to_array(entry) if parameter is None else parameter)
        for node in other.node:
            settings = {entry.name: self.helper.get_attribute_value(entry) for entry in node.attribute}
            if node.op_type == "Constant":
                ((kind, value),) = settings.items()
                values[node.output[0]] = self.constant(self._arrays.to_array(value) if kind == "value" else value)
                continue
            inputs = [values[name] for name in node.input]
            name = self.add(node.op_type, *inputs, domain=node.domain, outputs=len(node.output), **settings)
            values |= {output: f"{name}/{number}" if number else name for number, output in enumerate(node.output)}
        return values[other.output[0].name]

    def cast(self, value: str, element: Any) -> str:
        """Add a cast to another number type; return its name."""
        return self.add("Cast", value, to=self.helper.np_dtype_to_tensor_dtype(np.dtype(element)))

    def sums(self, value: str) -> str:
        """Add the sum of each row, as a column; return its name."""
        return self.add("ReduceSum", value, self.constant(np.array([1], np.int64)), keepdims=1)

    def affine(self, value: str, weight: Any, bias: Any) -> str:
        """Add x W + b, with W of shape (in, out); return its name."""
        return self.add("Add", self.add("MatMul", value, self.constant(weight)), self.constant(bias))


@dataclass(frozen=True)
class Prepared:
    """Names of the model's inputs, and of a column that is true for the rows that can be predicted."""

    features: str
    valid: str
    shape: tuple[int, ...] = ()
    """Shape of the features of one sample."""


def prepared_inputs(graph: Graph, description: dict[str, Any], width: int | None) -> Prepared:
    """Add the inputs of a graph and the operations up to the model's features.

    Args:
        graph: Graph to extend.
        description: Description of the model.
        width: Number of inputs of a linear model or MLP, which takes flat rows, or None for other networks.
    """
    kind = description["features"]["kind"]
    if kind not in WRITTEN_MAPS:
        raise InputError(f"features of kind {kind!r} cannot be written as ONNX: {INSTEAD}")
    samples, shape = raw_samples(graph, description, width)
    if kind != "none" or description["task"] is not None:
        mapping = described_map(description, {}, shape)
        return replace(_mapped(graph, mapping, graph.cast(samples, np.float64)), shape=(mapping.features,))
    flat = samples if len(shape) == 1 else graph.add("Flatten", samples, axis=1)
    largest = float(np.finfo(description["dtype"]).max)
    return Prepared(samples, at_most(graph, flat, np.array(largest, description["dtype"])), shape)


def raw_samples(graph: Graph, description: dict[str, Any], width: int | None) -> tuple[str, tuple[int, ...]]:
    """Add samples in the form that a model or its feature map accepts; return their name and shape.

    Images are scaled and have their channels first, or are flat if `width` is given. The arguments are the same as for
    `prepared_inputs`.
    """
    if description["table"] is not None:
        return _coded_table(graph, description)
    stored, dtype = description["stored"], np.dtype(description["dtype"])
    if stored is None:
        if width is None or description["data"] == "npz" or description["features"]["kind"] != "none":
            remedy = "put the data file back where the spec says (data.file) and export again"
            if description["data"] == PYTHON:
                remedy = "export from a run that has its clients, sifu.open_run(folder, clients=..., model=...)"
            raise InputError(
                f"the shape of the samples is not known, so the model cannot be written as ONNX: {remedy}, or {INSTEAD}"
            )
        stored = {"shape": [width], "bytes": False}
    shape = list(stored["shape"])
    element = np.dtype(np.uint8 if stored["bytes"] else np.float64)
    samples = graph.input("x", graph.helper.np_dtype_to_tensor_dtype(element), shape)
    moves = description["data"] != PYTHON  # samples of clients passed from Python are used unchanged
    if moves and len(shape) == 2:
        shape = [1, *shape]
        samples = graph.add("Unsqueeze", samples, graph.constant(np.array([1], np.int64)))
    elif moves and len(shape) == 3 and shape[2] <= 4:  # `channels_first` has the same rule
        shape = [shape[2], *shape[:2]]
        samples = graph.add("Transpose", samples, perm=[0, 3, 1, 2])
    samples = _levels(graph, description, samples, shape) if stored["bytes"] else graph.cast(samples, dtype)
    if width is not None and len(shape) > 1:
        samples, shape = graph.add("Flatten", samples, axis=1), [math.prod(shape)]
    return samples, tuple(shape)


def at_most(graph: Graph, rows: str, largest: Any) -> str:
    """Add a column that is true if the absolute values of a row sum to at most `largest`, and false for NaN."""
    return graph.add("LessOrEqual", graph.sums(graph.add("Abs", rows)), graph.constant(largest))


def _coded_table(graph: Graph, description: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
    coding, columns = TableCoding.from_mapping(description["table"]), description["columns"]
    if columns is None:
        raise InputError(
            "the columns of the table are no longer known, so the model cannot be written as ONNX: put the table back "
            "to its path in the spec (data.file) and export again"
        )
    parts = [(_category if name in coding.categories else _number)(graph, name, coding) for name in columns]
    rows = parts[0] if len(parts) == 1 else graph.add("Concat", *parts, axis=1)
    return graph.cast(rows, description["dtype"]), (sum(map(coding.width, columns)),)


def _number(graph: Graph, name: str, coding: TableCoding) -> str:
    """Add a column of numbers, shifted and scaled, and an indicator of missing values (NaN) if it has a filler."""
    source = graph.input(name, graph.helper.np_dtype_to_tensor_dtype(np.dtype(np.float64)), [1])
    middle, spread = coding.scales.get(name, (0.0, 1.0))
    scaled = graph.add("Div", graph.add("Sub", source, graph.constant(middle)), graph.constant(spread))
    if name not in coding.missing:
        return scaled
    fill = coding.missing[name]
    absent = graph.add("IsNaN", source)
    value = graph.add("Where", absent, graph.constant(0.0 if fill is None else (fill - middle) / spread), scaled)
    return graph.add("Concat", value, graph.cast(absent, np.float64), axis=1)


def _category(graph: Graph, name: str, coding: TableCoding) -> str:
    """Add a categorical column: one feature per listed category, and an indicator of missing values if it has one.

    For an unlisted category, all these features are NaN.
    """
    from onnx import TensorProto

    words = coding.categories[name]
    absent = len(words) if name in coding.missing else -1
    positions = dict(_spellings(words, absent, coding.missing_words.get(name, ())))
    position = graph.add(
        "LabelEncoder",
        graph.input(name, TensorProto.STRING, [1]),
        domain="ai.onnx.ml",
        keys_strings=list(positions),
        values_int64s=list(positions.values()),
        default_int64=-1,
    )
    places = graph.constant(np.arange(coding.width(name), dtype=np.int64)[None, :])
    features = graph.cast(graph.add("Equal", position, places), np.float64)
    unlisted = graph.add("Less", position, graph.constant(np.array(0, np.int64)))
    return graph.add("Where", unlisted, graph.constant(math.nan), features)


def _spellings(words: tuple[str, ...], missing: int, also_missing: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """Yield each accepted spelling of a category or missing value, with its feature; later pairs take precedence."""
    position = {word: number for number, word in enumerate(words)}
    for word, number in position.items():
        if word.lstrip("-").isdecimal() and str(int(word)) == word:
            yield f"{word}.0", number
    for truth, digit in (("true", "1"), ("false", "0")):
        if digit in position:
            yield from ((text, position[digit]) for text in _cases(truth))
    yield from ((text, missing) for word in sorted(MISSING_WORDS) for text in _cases(word))
    yield from ((text, missing) for text in also_missing)
    yield from position.items()


def _cases(word: str) -> Iterator[str]:
    """Return every mixture of upper and lower case of a word, in a fixed order, so that graphs are reproducible."""
    return map("".join, itertools.product(*(dict.fromkeys((letter, letter.upper())) for letter in word)))


def _levels(graph: Graph, description: dict[str, Any], samples: str, shape: list[int]) -> str:
    """Add a lookup of the scaled value of each byte, channel by channel."""
    channels = shape[0] if len(shape) == 3 else 1
    every = np.arange(256, dtype=np.uint8).reshape(256, 1, 1, 1).repeat(channels, axis=3)  # one-pixel images
    values = scale_features(
        every, scale_of(description["data"]), dtype=description["dtype"], flat=True, normalise=description["normalise"]
    )
    offsets = np.arange(channels, dtype=np.int64).reshape(1, channels, *[1] * (len(shape) - 1)) * 256
    places = graph.add("Add", graph.cast(samples, np.int64), graph.constant(offsets))
    return graph.add("Gather", graph.constant(values.T.reshape(-1)), places, axis=0)


def _mapped(graph: Graph, mapping: FeatureMap, samples: str) -> Prepared:
    """Add the features of a map of rows, computed with the integer arithmetic of the map itself."""
    whole = graph.add("Round", graph.add("Mul", samples, graph.constant(2.0**INPUT_BITS)))
    if isinstance(mapping, PlainInputs):
        shortened = _shortened(graph, whole, mapping.norm, 2.0**INPUT_BITS)
        return Prepared(shortened, at_most(graph, samples, LARGEST_INPUT))
    if isinstance(mapping, Projection):
        sums = graph.add("MatMul", whole, graph.constant(mapping.signs))
        unit = 2.0**INPUT_BITS * math.sqrt(mapping.features)
        return Prepared(_shortened(graph, sums, mapping.norm, unit), at_most(graph, whole, LARGEST_WHOLE))
    assert isinstance(mapping, RandomFourier)  # no other kind of map can be exported
    turns = graph.add("MatMul", whole, graph.constant(mapping.turns))
    valid = at_most(graph, whole, LARGEST_WHOLE / float(np.abs(mapping.turns).max()))
    places = graph.add("Floor", graph.add("Mul", turns, graph.constant(2.0 ** -(INPUT_BITS + FREQUENCY_BITS))))
    # Invalid values need not be integers, and their positions could be outside the cosine table.
    phases = graph.cast(graph.add("Where", valid, places, graph.constant(0.0)), np.int64)
    quarter = graph.add("Sub", phases, graph.constant(np.array(2 ** (TURN_BITS - 2), np.int64)))
    turn = graph.constant(np.array(2**TURN_BITS, np.int64))
    looked_up = graph.add("Mod", graph.add("Concat", phases, quarter, axis=1), turn)
    wave = graph.add("Gather", graph.constant(mapping.wave), looked_up, axis=0)
    return Prepared(graph.add("Mul", wave, graph.constant(mapping.norm * math.sqrt(2.0 / mapping.features))), valid)


def _shortened(graph: Graph, rows: str, norm: float, unit: float) -> str:
    """Add nodes that divide integer rows by `unit` and shrink rows longer than `norm` to that length (see `scaled`)."""
    length = graph.add("Sqrt", graph.sums(graph.add("Mul", rows, rows)))
    # A nonzero row of integers has at least length 1.
    at_least_one = graph.add("Max", length, graph.constant(1.0))
    factor = graph.add("Min", graph.add("Div", graph.constant(norm), at_least_one), graph.constant(1.0 / unit))
    return graph.add("Mul", rows, factor)
