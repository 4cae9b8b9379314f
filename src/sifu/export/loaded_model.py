"""Exported models as torch modules that compute scores and predictions from raw samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sifu.core.layout import ModelLayout
from sifu.core.operator_words import PYTHON
from sifu.core.spec import IMAGE_FEATURES, LINEAR_KINDS, Spec
from sifu.core.spec.sections import HEAD_KINDS, ROW_KINDS, FeaturesSpec
from sifu.data.dataset import scale_features
from sifu.data.digits import largest_of
from sifu.data.feature_maps import FeatureMap
from sifu.data.feature_maps.build import texts_as_tokens
from sifu.data.feature_maps.row_maps import LARGEST_INPUT
from sifu.data.npz import REAL_KINDS, read_arrays
from sifu.data.table import read_features
from sifu.data.table_coding import TableCoding
from sifu.engines.sim.models import TORCH_TYPES, Model, evaluated_module, make_model
from sifu.engines.sim.networks import cnn
from sifu.errors import InputError
from sifu.run.features import map_for
from sifu.theory.arrays import Array
from sifu.theory.closed_form import Targets

BATCH = 256
LARGEST_SIDE = 1024
"""Largest side that is tried for images of unknown shape."""


@dataclass(frozen=True)
class PredictedRow:
    """Prediction of a model for one row of a file.

    A row with a value that cannot be coded has a `reason` instead: its prediction is None, and it has no scores.

    Attributes:
        id: Identity of the row (`data.id`), or its number, counted from 0.
        prediction: A class (its name if the spec names the classes), a number, or a list of these for several outputs.
        scores: Scores of the outputs, by class.
        reason: Reason why the row cannot be predicted.
    """

    id: str | int
    prediction: Any
    scores: dict[str, float]
    reason: str = ""

    def to_mapping(self) -> dict[str, Any]:
        """Return the row as plain values, ready for JSON.

        The key of the prediction is `class`, `value`, `labels` or `values`.
        """
        if self.reason:
            return {"id": self.id, "reason": self.reason}
        several = isinstance(self.prediction, list)
        real = isinstance(self.prediction[0] if several else self.prediction, float)
        called = ("values" if real else "labels") if several else ("value" if real else "class")
        return {"id": self.id, called: self.prediction, "scores": self.scores}


class LoadedModel(nn.Module):
    """A released model with the feature map that its description names; `model(x)` returns the scores of a batch."""

    def __init__(self, parameters: dict[str, Array], description: dict[str, Any], own: Model | None = None) -> None:
        super().__init__()
        self.description = description
        self.network = _network(parameters, description, own)
        self.decides_as = self.kind if own is None else own.kind
        self._maps: dict[tuple[int, ...], FeatureMap] = {}
        self.eval()

    @property
    def kind(self) -> str:
        """Kind of the model as a spec names it."""
        return str(self.description["model"])

    @property
    def takes_rows(self) -> bool:
        """True if a sample is a row of numbers; otherwise it is an image (channels, height, width)."""
        features = self.description["features"].get("kind")
        return self.kind in ROW_KINDS and features not in IMAGE_FEATURES

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of raw samples `x`, one row each.

        Bytes are scaled like the clients' bytes; other numbers are used unchanged. The channels of images may be the
        first axis, or the axis that holds them in the data file. Rows of a table must have the form that `inputs_of`
        returns.
        """
        samples = self._mapped(self._samples(x))
        try:
            scores: Tensor = self.network(samples)
        except RuntimeError as error:
            raise InputError(
                f"the parameters do not fit a {self.kind} for samples of shape {tuple(samples.shape[1:])}: give "
                "samples of the shape that it was trained on"
            ) from error
        return scores.flatten(1)

    def features(self, x: Any) -> Array:
        """Return the features that the model receives for raw samples `x`, which are given as in `forward`."""
        return np.asarray(self._mapped(self._samples(_tensor(x))).numpy())

    def scores(self, x: Any) -> Array:
        """Return the scores of raw samples `x`, which may be strings, as an array; see `forward`."""
        if self.description["features"].get("kind") == "transformers":
            x = texts_as_tokens(x, _public_features(self.description["features"]))
        samples = _tensor(x)
        with torch.no_grad():
            parts = [self(batch).numpy() for batch in torch.split(samples, BATCH)] if len(samples) else []
        return np.concatenate(parts) if parts else np.zeros((0, int(self.description["outputs"])))

    def predict(self, x: Any) -> Array:
        """Return the predictions for raw samples `x` (see `forward`).

        These are class numbers, numbers in the unit of the targets (least_squares and ridge regression), or 0 or 1 for
        each label.
        """
        return self._decided(self.scores(x))

    def predict_rows(self, path: str | Path) -> list[PredictedRow]:
        """Return the predictions for the rows of the npz, CSV or Parquet file at `path`, with ids and scores."""
        refused: dict[int, str] = {}
        x, identities = self.inputs_of(path, refused)
        scores = self.scores(x[[row not in refused for row in range(len(x))]])
        names = self._score_names(scores.shape[1])
        predicted = iter(zip(self._named(self._decided(scores)), scores, strict=True))
        rows = []
        ids: Sequence[str | int] = identities or range(len(x))
        for number, identity in enumerate(ids):
            if number in refused:
                rows.append(PredictedRow(identity, None, {}, refused[number]))
            else:
                prediction, row = next(predicted)
                rows.append(PredictedRow(identity, prediction, dict(zip(names, row.tolist(), strict=True))))
        return rows

    def inputs_of(self, path: str | Path, refused: dict[int, str] | None = None) -> tuple[Array, list[str]]:
        """Return the samples of the file at `path` in the form that `forward` accepts, and their identities.

        Args:
            path: An npz, CSV or Parquet file.
            refused: If given, it receives the reason for each row of a table that cannot be coded, and no exception is
                raised.

        Returns:
            The samples, and their identities; these are empty if the file has none.

        Raises:
            InputError: If the file cannot be read, or if `refused` is None and a row cannot be coded.
        """
        path = Path(path)
        if path.suffix.lower() != ".npz":
            if self.description["table"] is None:
                raise InputError(f"{path}: this model was not trained on a table, give an npz file with x")
            coding = TableCoding.from_mapping(self.description["table"])
            x, identities = read_features(path, coding, self.description["columns"], refused)
            if refused is not None:
                for row in np.flatnonzero(np.abs(x).max(axis=1, initial=0.0) > self._largest_input):
                    refused.setdefault(int(row), f"{path}, row {row}: a number is too large for the model: correct it")
            return x, identities
        arrays = read_arrays(path)
        if "x" not in arrays:
            raise InputError(f"{path} has no array x; it has {', '.join(sorted(arrays)) or 'none'}")
        x = arrays["x"]
        if x.dtype.kind not in REAL_KINDS or x.ndim == 0:
            raise InputError(f"array x of {path} holds {x.dtype} of shape {x.shape}; store rows of real numbers")
        return x if x.dtype == np.uint8 else x.astype(np.float64), []

    def _decided(self, scores: Array) -> Array:
        task = self.description["task"]
        if task is not None:
            targets = Targets(task["task"], scores.shape[1], (task["shift"],), (task["scale"],))
            decided = targets.decode(scores)
            return decided[:, 0] if task["task"] == "regression" and decided.shape[1] == 1 else decided
        if self.decides_as == "least_squares":
            return scores if scores.shape[1] > 1 else scores[:, 0]
        return (scores[:, 0] > 0.0).astype(np.int64) if self.decides_as == "logistic" else scores.argmax(axis=1)

    def _named(self, predicted: Array) -> list[Any]:
        classes = self.description["classes"]
        if not classes or predicted.ndim != 1:
            return list(predicted.tolist())
        return [classes[index] if index < len(classes) else str(index) for index in predicted]

    def _score_names(self, outputs: int) -> list[str]:
        """Return the names of the outputs; the single output of a logistic model is the score of the second class."""
        classes = list(self.description["classes"] or ())
        classes += [str(number) for number in range(len(classes), max(outputs, 2))]
        return classes[1:2] if outputs == 1 and self.decides_as == "logistic" else classes[:outputs]

    def _mapped(self, samples: Tensor) -> Tensor:
        """Return the features of prepared samples, or the samples themselves if there is no feature map."""
        if not self.has_map:
            return samples
        shape = tuple(samples.shape[1:])
        if shape not in self._maps:
            self._maps[shape] = described_map(self.description, shape)
        mapping = self._maps[shape]
        rows = [features for _, features in mapping.chunks(samples.detach().cpu().numpy())]
        return torch.from_numpy(np.concatenate(rows) if rows else np.zeros((0, mapping.features))).to(samples)

    def _samples(self, x: Tensor) -> Tensor:
        """Return samples in the type and, if it is known, the shape that the model accepts."""
        dtype, expected = self.description["dtype"], self.description["input_shape"] or self.row_shape()
        handed_over = self.description["data"] == PYTHON  # samples of clients passed from Python are used unchanged
        if x.dtype == torch.uint8 and not handed_over:
            largest, normalise = largest_of(self.description["data"]), self.description["normalise"]
            scaled = scale_features(x.cpu().numpy(), largest, dtype=dtype, flat=self.takes_rows, normalise=normalise)
            samples = torch.from_numpy(scaled).to(x.device)
        else:
            samples = (x if handed_over else channels_first(x, expected)).to(TORCH_TYPES[dtype])
            if samples.dim() > 2 and self.takes_rows:
                samples = samples.reshape(len(samples), math.prod(samples.shape[1:]))
        if samples.dim() < 2 or (expected is not None and list(samples.shape[1:]) != expected):
            shape = f"samples of shape {expected}" if expected else "one row a sample"
            shape = f"rows of {expected[0]} features" if expected and len(expected) == 1 else shape
            raise InputError(f"the model takes {shape}, found shape {tuple(x.shape)}")
        if not bool(torch.isfinite(samples).all()):
            raise InputError("samples hold NaN or infinity: nothing was predicted from them")
        return samples

    @property
    def coded_width(self) -> int | None:
        """Number of features of a coded row of the table, or None if its columns are unknown."""
        if self.description["table"] is None or self.description["columns"] is None:
            return None
        coding = TableCoding.from_mapping(self.description["table"])
        return sum(coding.width(name) for name in self.description["columns"])

    @property
    def has_map(self) -> bool:
        """True if a feature map computes the model's inputs; a head in closed form always has one."""
        return self.description["features"].get("kind") != "none" or self.description["task"] is not None

    @property
    def _largest_input(self) -> float:
        """Largest number in a row that the feature map accepts or, without one, that the model's type represents."""
        return LARGEST_INPUT if self.has_map else float(np.finfo(self.description["dtype"]).max)

    def row_shape(self) -> list[int] | None:
        """Return the shape of a row if the parameters determine it, otherwise None."""
        if self.kind in LINEAR_KINDS and self.description["features"].get("kind") == "none":
            return [int(self.network.get_parameter("weight").shape[0])]
        return [int(self.network.get_parameter("1.weight").shape[1])] if self.kind == "mlp" else None


def described_map(description: dict[str, Any], shape: tuple[int, ...]) -> FeatureMap:
    """Return the feature map that a description names, if it is the one that the model was trained on."""
    mapping = map_for(_public_features(description["features"]), shape)
    if mapping.digest() != description["features_digest"]:
        raise InputError(
            f"the feature map for samples of shape {shape} is not the one that the model was trained on (digest "
            f"{description['features_digest'][:12]}...): give samples of the same shape, and the same module with the "
            "same weights"
        )
    return mapping


def _public_features(section: dict[str, Any]) -> FeaturesSpec:
    """Return the section `[features]` of a description."""
    return Spec.from_mapping({"features": section}).features


def _tensor(x: Any) -> Tensor:
    return x.detach() if isinstance(x, Tensor) else torch.from_numpy(np.ascontiguousarray(x))


def channels_first(x: Tensor, expected: list[int] | None = None) -> Tensor:
    """Return images with channels first, by the rule of `scale_features`; keep images of the expected shape."""
    if x.dim() == 3:
        return x.unsqueeze(1)
    if x.dim() == 4 and x.shape[3] <= 4 and list(x.shape[1:]) != expected:
        return x.permute(0, 3, 1, 2)
    return x


def _network(parameters: dict[str, Array], description: dict[str, Any], own: Model | None) -> nn.Module:
    """Return the module that maps features to scores, with its parameters loaded."""
    if own is not None:
        shapes = tuple(tuple(shape) for shape in description["parameters"].values())
        layout = ModelLayout(tuple(description["parameters"]), shapes, description["dtype"])
        return evaluated_module(own, layout, parameters).requires_grad_(False)
    kind, outputs = description["model"], int(description["outputs"])
    shape = description["input_shape"]
    try:
        if kind in HEAD_KINDS:
            linear = kind if description["task"] is None else "least_squares"
            model = make_model(linear, (int(parameters["weight"].shape[0]),), outputs)
        elif kind == "mlp":
            model = make_model(kind, (int(parameters["1.weight"].shape[1]),), outputs)
        else:
            model = make_model(kind, tuple(shape or _shape_that_fits(parameters, outputs)), outputs)
        network = model.build(description["dtype"])
        network.load_state_dict({name: torch.from_numpy(values.copy()) for name, values in parameters.items()})
    except (RuntimeError, KeyError, IndexError) as error:
        raise InputError(f"the parameters do not fit a {kind} for samples of shape {shape}: export it again") from error
    return network.requires_grad_(False)


def _shape_that_fits(parameters: dict[str, Array], outputs: int) -> tuple[int, int, int]:
    """Return the smallest square image shape that fits the first linear layer; other shapes may fit as well."""
    channels = int(parameters["conv1.weight"].shape[1])
    for side in range(1, LARGEST_SIDE + 1):
        try:
            network = cnn((channels, side, side), outputs)
        except InputError:  # the image is too small
            continue
        if network.linear_layers[0].features_in == parameters["fc1.weight"].shape[1]:
            return (channels, side, side)
    raise InputError(
        "the shape of the images is no longer known: put the data file back to its path in the spec (data.file) and "
        "export the model again"
    )
