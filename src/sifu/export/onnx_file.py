"""A released model as an ONNX file, from prepared samples to scores and predictions, written by torch's exporter.

The input `x` holds rows or images as the data file stores them; a table is coded first, as `sifu predict` codes it
(`LoadedModel.inputs_of`). A sample that `sifu predict` refuses as too large has the scores NaN and the prediction -1
(NaN for regression). The metadata of the file holds the description, under the key `sifu`; it names the classes.
"""

from __future__ import annotations

import json
import logging
import math
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from sifu.core.operator_words import PYTHON
from sifu.data.dataset import scale_features
from sifu.data.digits import largest_of
from sifu.data.feature_maps import FeatureMap, PlainInputs, RandomFourier
from sifu.data.feature_maps.fixed_networks import NetworkFeatures
from sifu.data.feature_maps.row_maps import FREQUENCY_BITS, INPUT_BITS, LARGEST_INPUT, LARGEST_WHOLE, TURN_BITS
from sifu.engines.sim.models import TORCH_TYPES, Model
from sifu.errors import InputError, install_extra
from sifu.export.loaded_model import LoadedModel, channels_first, described_map

OPSET = 18
INSTEAD = "export it as safetensors, which sifu predict and sifu.load_model use"
NEEDED = f"to write ONNX files, install onnx, onnxscript and torch 2.7 or later: {install_extra('onnx')}"


def onnx_bytes(description: dict[str, Any], content: bytes, own: Model | None = None) -> bytes:
    """Return the ONNX file of a model; refuse one that torch cannot export, or with samples of unknown shape."""
    try:
        import onnx
        import onnxscript  # noqa: F401  torch's exporter needs it
    except ModuleNotFoundError as error:
        raise InputError(NEEDED) from error
    from safetensors.numpy import load

    if TorchVersion(torch.__version__) < "2.7":
        raise InputError(f"{NEEDED} (torch {torch.__version__} is installed)")
    if description["model"] == PYTHON and own is None:
        raise InputError(
            "this model is your own module: to write it as ONNX, open the run with the function that makes it, "
            "sifu.open_run(folder, model=..., clients=...).export(...)"
        )
    model = LoadedModel(load(content), description, own=own)
    preparation = _Preparation(model)
    graph = _ExportedModel(model, preparation, _features(model, preparation.shape)).eval()
    program = _exported(graph, preparation.example())
    proto = program.model_proto
    onnx.helper.set_model_props(proto, {"sifu": json.dumps(description)})
    onnx.checker.check_model(proto, full_check=True)
    return bytes(proto.SerializeToString())


class _Preparation(nn.Module):
    """Step from stored samples to the type and shape that the model or its feature map takes."""

    levels: Tensor
    channels: Tensor

    def __init__(self, model: LoadedModel) -> None:
        super().__init__()
        description = model.description
        self.stored, self.bytes = _stored_shape(model)
        self.moves = description["data"] != PYTHON  # samples of clients passed from Python are used unchanged
        self.flat, self.dtype = model.takes_rows, TORCH_TYPES[description["dtype"]]
        samples = torch.zeros(1, *self.stored)
        self.shape = (channels_first(samples) if self.moves else samples).shape[1:]
        if self.bytes:  # every byte is looked up, so its value is the one that training used
            channels = self.shape[0] if len(self.shape) == 3 else 1
            every = np.arange(256, dtype=np.uint8).reshape(256, 1, 1, 1).repeat(channels, axis=3)
            scaled = scale_features(
                every,
                largest_of(description["data"]),
                dtype=description["dtype"],
                flat=True,
                normalise=description["normalise"],
            )
            self.register_buffer("levels", torch.from_numpy(scaled.T.copy()))
            self.register_buffer("channels", torch.arange(channels).reshape(1, -1, *[1] * (len(self.shape) - 1)))
        if self.flat:
            self.shape = torch.Size([math.prod(self.shape)])

    def forward(self, x: Tensor) -> Tensor:
        samples = channels_first(x) if self.moves else x
        if not self.bytes:
            samples = samples.to(self.dtype)
        elif samples.dim() == 4:
            samples = self.levels[self.channels, samples.long()]
        else:
            samples = self.levels[0][samples.long()]
        return samples.flatten(1) if self.flat else samples

    def example(self) -> Tensor:
        """Return two samples of zeros as they are stored."""
        return torch.zeros(2, *self.stored, dtype=torch.uint8 if self.bytes else torch.float64)


class RowMap(nn.Module):
    """Torch form of a map of rows, with the integer arithmetic of the map itself."""

    turns: Tensor
    wave: Tensor
    largest: Tensor

    def __init__(self, mapping: PlainInputs | RandomFourier) -> None:
        super().__init__()
        self.norm, self.count = mapping.norm, mapping.features
        self.fourier, largest = isinstance(mapping, RandomFourier), LARGEST_INPUT
        if isinstance(mapping, RandomFourier):
            largest = LARGEST_WHOLE / float(np.abs(mapping.turns).max())
            self.register_buffer("turns", torch.from_numpy(mapping.turns))
            self.register_buffer("wave", torch.from_numpy(mapping.wave))
        self.register_buffer("largest", torch.tensor(largest, dtype=torch.float64))

    def forward(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features, and for each row whether its values are small enough."""
        samples = samples.double()
        whole = torch.round(samples * 2.0**INPUT_BITS)
        if not self.fourier:
            length = (whole * whole).sum(1, keepdim=True).sqrt().clamp(min=1.0)  # a nonzero row of integers has 1
            shortened = whole * (self.norm / length).clamp(max=2.0**-INPUT_BITS)
            return shortened, samples.abs().sum(1, keepdim=True) <= self.largest
        valid = whole.abs().sum(1, keepdim=True) <= self.largest
        # Invalid rows become zero: their phases need not be integers.
        whole = torch.where(valid, whole, torch.zeros_like(whole))
        phases = torch.floor((whole @ self.turns) * 2.0 ** -(INPUT_BITS + FREQUENCY_BITS)).long()
        places = torch.cat([phases, phases - 2 ** (TURN_BITS - 2)], dim=1) % 2**TURN_BITS
        return self.wave[places] * (self.norm * math.sqrt(2.0 / self.count)), valid


class _NetworkMap(nn.Module):
    """Output of a public network, with each row scaled to the length `norm`; a row of zeros stays zero."""

    def __init__(self, mapping: NetworkFeatures) -> None:
        super().__init__()
        self.module, self.norm = mapping.module.cpu(), mapping.norm
        self.dtype = next((value.dtype for value in mapping.module.parameters()), torch.float32)

    def forward(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.module(samples.to(self.dtype)).flatten(1).double()
        length = (rows * rows).sum(1, keepdim=True).sqrt()
        features = rows * self.norm / torch.where(length == 0.0, torch.ones_like(length), length)
        return features, _finite(samples.float())


class _ExportedModel(nn.Module):
    """All steps from stored samples to scores and predictions."""

    def __init__(self, model: LoadedModel, preparation: _Preparation, features: nn.Module | None) -> None:
        super().__init__()
        self.preparation, self.features, self.network = preparation, features, model.network
        task = model.description["task"] or {}
        self.task, self.decides_as = task.get("task", ""), model.decides_as
        self.scale, self.shift = float(task.get("scale", 1.0)), float(task.get("shift", 0.0))
        # CPU runtimes have no convolution of doubles, and no GELU or other layers that an own module may contain.
        narrow = model.description["model"] == PYTHON or any(value.dim() > 2 for value in model.network.parameters())
        self.dtype = torch.float32 if narrow else TORCH_TYPES[model.description["dtype"]]
        self.network.to(self.dtype)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        samples = self.preparation(x)
        if self.features is None:
            valid = _finite(samples)
        else:
            samples, valid = self.features(samples)
        scores = self.network(samples.to(self.dtype)).flatten(1)
        scores = torch.where(valid, scores, torch.full_like(scores, math.nan))
        return scores, self._prediction(scores, valid)

    def _prediction(self, scores: Tensor, valid: Tensor) -> Tensor:
        """Return the prediction that `LoadedModel.predict` makes."""
        if self.task == "regression":
            return scores * self.scale + self.shift
        if self.task == "multi_label":
            labels = (scores + self.shift > 0.5).long()
            return torch.where(valid, labels, torch.full_like(labels, -1))
        if self.decides_as == "least_squares" and not self.task:
            return scores.clone()
        classes = (scores > 0.0).long() if self.decides_as == "logistic" else scores.argmax(1, keepdim=True)
        return torch.where(valid, classes, torch.full_like(classes, -1)).squeeze(1)


def _finite(samples: Tensor) -> Tensor:
    """Return whether the absolute values of each row have a finite sum."""
    return torch.isfinite(samples.flatten(1).abs().sum(1, keepdim=True))


def _features(model: LoadedModel, shape: tuple[int, ...]) -> nn.Module | None:
    """Return the torch form of the model's feature map, or None if it has none."""
    description = model.description
    if not model.has_map:
        return None
    if description["features"]["kind"] == "transformers" and len(description["input_shape"] or ()) != 3:
        raise InputError(f"the tokenizer of a text cannot be part of an ONNX graph: {INSTEAD}")
    mapping: FeatureMap = described_map(description, tuple(shape))
    if isinstance(mapping, PlainInputs | RandomFourier):
        return RowMap(mapping)
    if not isinstance(mapping, NetworkFeatures):
        raise InputError(f"features of kind {mapping.kind!r} cannot be written as ONNX: {INSTEAD}")
    return _NetworkMap(mapping)


def _stored_shape(model: LoadedModel) -> tuple[tuple[int, ...], bool]:
    """Return the shape of a stored sample, and whether it consists of bytes; rows of a table are coded."""
    description, stored = model.description, model.description["stored"]
    if description["table"] is not None:
        width = model.coded_width
        if width is None:
            raise InputError(
                "the columns of the table are no longer known, so the model cannot be written as ONNX: put the table "
                "back to its path in the spec (data.file) and export again"
            )
        return (width,), False
    if stored is not None:
        return tuple(stored["shape"]), bool(stored["bytes"])
    row = model.row_shape()
    if row is None or description["data"] == "npz":
        remedy = "put the data file back where the spec says (data.file) and export again"
        if description["data"] == PYTHON:
            remedy = "export from a run that has its clients, sifu.open_run(folder, clients=..., model=...)"
        raise InputError(
            f"the shape of the samples is not known, so the model cannot be written as ONNX: {remedy}, or {INSTEAD}"
        )
    return tuple(row), False


def _exported(graph: nn.Module, example: Tensor) -> torch.onnx.ONNXProgram:
    """Export a module with torch, or raise an `InputError` with the first cause."""
    exporter = logging.getLogger("torch.onnx")
    level = exporter.level
    exporter.setLevel(logging.ERROR)  # hides warnings about missing optional libraries
    try:
        with warnings.catch_warnings(action="ignore"), torch.no_grad():
            program = torch.onnx.export(
                graph,
                (example,),
                dynamo=True,
                opset_version=OPSET,
                input_names=["x"],
                output_names=["scores", "prediction"],
                dynamic_shapes=({0: torch.export.Dim("samples")},),
                verbose=False,
            )
    except Exception as error:  # a user's module may raise any exception
        cause: BaseException = error
        while cause.__cause__ is not None:  # the first error in the chain names the operation
            cause = cause.__cause__
        why = " ".join(str(cause).split())[:300]
        raise InputError(f"torch cannot export the network ({why}): {INSTEAD}") from error
    finally:
        exporter.setLevel(level)
    assert program is not None
    return program
