"""A released model outside its run: a safetensors file with its description, or an ONNX file that holds both.

The safetensors file is byte for byte what the run certified, so that its digest can be compared.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sifu.api.model_description import description_path, networks_path, read_bytes, read_description
from sifu.core.allowed_code import allow_code
from sifu.core.closed_form import Trunk
from sifu.core.spec import IMAGE_FEATURES, LINEAR_KINDS, RIDGE, Spec
from sifu.core.spec.sections import FeaturesSpec
from sifu.data.dataset import scale_features
from sifu.data.table import read_features
from sifu.data.table_coding import TableCoding
from sifu.errors import InputError
from sifu.launch.features import map_for, tuned_map
from sifu.theory.arrays import Array
from sifu.theory.closed_form import Targets

if TYPE_CHECKING:
    from sifu.data.feature_maps import FeatureMap

LARGEST_MODEL = 4 << 30
BATCH = 256


@dataclass(frozen=True)
class LoadedModel:
    """A released model that can be used: every named kind, also on features that its description says how to make.

    `parameters` are its arrays by name, `description` is what its file says it is.
    """

    parameters: dict[str, Array]
    description: dict[str, Any]
    networks: dict[str, Array] = field(default_factory=dict)
    """What groups tuned of the network that features go through, GROUP/NAME."""

    @property
    def kind(self) -> str:
        """The kind of the model as a spec names it."""
        return str(self.description["model"])

    @property
    def takes_rows(self) -> bool:
        """Whether a sample is a row of numbers; otherwise it is an image (channels, height, width)."""
        features = self.description["features"].get("kind")
        return self.kind in (*LINEAR_KINDS, RIDGE, "mlp") and features not in IMAGE_FEATURES

    def scores(self, x: Any) -> Array:
        """The scores of samples, one row each: rows of numbers, or images (channels, height, width), scaled as the
        clients' were (`description` says how). Features are made here."""
        samples = self._checked(np.asarray(x, dtype=self.description["dtype"]))
        if self.kind in (*LINEAR_KINDS, RIDGE):
            return self._linear(samples)
        return self._network(samples)

    def predict(self, x: Any) -> Array:
        """Class numbers; numbers in their own unit for least_squares and a ridge regression; 0 or 1 for each label."""
        scores = self.scores(x)
        if self.kind == RIDGE:
            task = self.description["task"]
            targets = Targets(task["task"], scores.shape[1], (task["shift"],), (task["scale"],))
            decided = targets.decode(scores)
            return decided[:, 0] if task["task"] == "regression" and decided.shape[1] == 1 else decided
        if self.kind == "least_squares":
            return scores if scores.shape[1] > 1 else scores[:, 0]
        return (scores[:, 0] > 0.0).astype(np.int64) if self.kind == "logistic" else scores.argmax(axis=1)

    def predict_file(self, path: str | Path) -> list[Any]:
        """What it says of the rows of an npz, CSV or Parquet file: words where the spec named the classes."""
        predicted = self.predict(self._inputs(Path(path)))
        classes = self.description["classes"]
        return [classes[index] for index in predicted] if classes else predicted.tolist()

    def _inputs(self, path: Path) -> Array:
        """The samples of a file, made into inputs as the clients' were."""
        if path.suffix.lower() != ".npz":
            if self.description["table"] is None:
                raise InputError(f"{path}: this model was not trained on a table, give an npz file with x")
            coding = TableCoding.from_mapping(self.description["table"])
            return read_features(path, coding, self.description["columns"])[0]
        from sifu.data.npz import REAL_KINDS, read_arrays

        arrays = read_arrays(path)
        if "x" not in arrays:
            raise InputError(f"{path} has no array x; it has {', '.join(sorted(arrays)) or 'none'}")
        x, dtype = arrays["x"], self.description["dtype"]
        if x.dtype.kind not in REAL_KINDS or x.ndim == 0:
            raise InputError(f"array x of {path} holds {x.dtype} of shape {x.shape}; store rows of real numbers")
        if x.dtype != np.uint8:  # scaled already
            return scale_features("", x, dtype=dtype, flat=self.takes_rows)
        data, normalise = self.description["data"], self.description["normalise"]
        return scale_features(data, x, dtype=dtype, flat=self.takes_rows, normalise=normalise)

    def _checked(self, samples: Array) -> Array:
        """Samples of the shape that the model was made for, as far as that is known; rows may come as images."""
        if samples.ndim == 3 and not self.takes_rows:
            samples = samples[:, None]
        if samples.ndim > 2 and self.takes_rows:
            samples = samples.reshape(len(samples), math.prod(samples.shape[1:]))
        wanted = self.description["input_shape"] or self._rows_wanted()
        if samples.ndim < 2 or (wanted is not None and list(samples.shape[1:]) != list(wanted)):
            shape = f"rows of {wanted[0]} features" if wanted and len(wanted) == 1 else f"samples of shape {wanted}"
            raise InputError(f"the model takes {shape if wanted else 'one row a sample'}, found shape {samples.shape}")
        if not np.all(np.isfinite(samples)):
            raise InputError("samples hold NaN or infinity: nothing was predicted from them")
        return samples

    def _rows_wanted(self) -> list[int] | None:
        """The length of a row, where the parameters tell it."""
        if self.kind in LINEAR_KINDS and self.description["features"].get("kind") == "none":
            return [int(self.parameters["weight"].shape[0])]
        return [int(self.parameters["1.weight"].shape[1])] if self.kind == "mlp" else None

    def _linear(self, samples: Array) -> Array:
        weight, bias = self.parameters["weight"], self.parameters["bias"]
        mapping = self._map(samples.shape[1:])
        if mapping is None:
            return np.asarray(samples @ weight + bias)
        blocks = [phi.astype(weight.dtype) @ weight + bias for _, phi in mapping.chunks(samples)]
        return np.concatenate(blocks) if blocks else np.zeros((0, weight.shape[1]))

    def _map(self, shape: tuple[int, ...]) -> FeatureMap | None:
        """The feature map, drawn again for samples of a shape; it must be the one that the run was trained on."""
        described = self.description["features"]
        if described.get("kind") == "none" and self.kind != RIDGE:
            return None
        # What is tuned needs groups and a head, which the description says in its own place.
        public = Spec.from_mapping({"features": described | {"tune": "none"}}).features
        mapping, tuned = map_for(public, shape), self.description.get("networks")
        if tuned is not None:
            mapping = self._tuned(replace(public, tune=described["tune"]), mapping, tuned)
        if mapping.digest() != self.description["features_digest"]:
            raise InputError(
                f"the feature map drawn for samples of shape {shape} is not the one that the model was trained on "
                f"(digest {self.description['features_digest'][:12]}...): give samples of the same shape, and the same "
                "module with the same weights"
            )
        return mapping

    def _tuned(self, features: FeaturesSpec, public: FeatureMap, tuned: dict[str, Any]) -> FeatureMap:
        """The map through the networks that groups tuned."""
        mapping = tuned_map(
            features, public, int(self.description["outputs"]), int(tuned["groups"]), float(tuned["stretch"])
        )
        names = [name for name, _ in mapping.network.named_parameters()]
        trunks = [
            Trunk(
                int(group), int(samples), np.concatenate([self.networks[f"{group}/{name}"].ravel() for name in names])
            )
            for group, samples in tuned["samples"].items()
        ]
        return mapping.with_trunks(trunks)

    def _network(self, samples: Array) -> Array:
        import torch

        from sifu.engines.sim.models import make_model

        model = make_model(self.kind, samples.shape[1:], int(self.description["outputs"]))
        network = model.build(self.description["dtype"]).eval()
        state = {name: torch.from_numpy(values) for name, values in self.parameters.items()}
        try:
            network.load_state_dict(state)
        except RuntimeError as error:
            raise InputError(
                f"the parameters do not fit a {self.kind} for samples of shape {samples.shape[1:]}: give samples of "
                "the shape that it was trained on"
            ) from error
        with torch.no_grad():
            parts = [
                network(torch.from_numpy(samples[start : start + BATCH])).numpy()
                for start in range(0, len(samples), BATCH)
            ]
        return np.concatenate(parts) if parts else np.zeros((0, int(self.description["outputs"])))


def load_model(path: str | Path, *, module: str | None = None) -> LoadedModel:
    """A model that `sifu export` wrote, by its description; its digest must be the one that the description names.

    A model on features of a module of the user's needs its name, `module="package.file:function"`: the module is a
    program, and no description is reason enough to run one. Weights and text of the module must be those of the run.
    """
    model = Path(path)
    description = read_description(description_path(model))
    content = read_bytes(model, LARGEST_MODEL)
    if hashlib.sha256(content).hexdigest() != description["sha256"]:
        raise InputError(f"{model} is not the file that {description_path(model).name} describes: export it again")
    if description["model"] == "python":
        raise InputError(
            f"{model} is a model of a program of your own: read its parameters with safetensors and put them into it"
        )
    features = description["features"]
    if features.get("kind") == "module" and features.get("module") != module:
        raise InputError(
            f"{model} was trained on features of the module {features.get('module')!r}, which is a program: name it "
            "yourself to have it run (sifu predict --module package.file:function, or load_model(..., module=...))"
        )
    if module is not None and features.get("kind") == "module":
        allow_code(module)  # naming it is the consent
    return LoadedModel(_parameters(model, content, description), description, _networks(model, description))


def _networks(model: Path, description: dict[str, Any]) -> dict[str, Array]:
    """What groups tuned, from the file beside the model; nothing where no network was tuned."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    tuned = description.get("networks")
    if tuned is None:
        return {}
    content = read_bytes(networks_path(model), LARGEST_MODEL)
    if hashlib.sha256(content).hexdigest() != tuned["sha256"]:
        raise InputError(f"{networks_path(model)} is not the file that belongs to {model.name}: export it again")
    try:
        return load(content)
    except SafetensorError as error:
        raise InputError(f"{networks_path(model)} is not a safetensors file") from error


def _parameters(model: Path, content: bytes, description: dict[str, Any]) -> dict[str, Array]:
    """The arrays of the file, which must be the ones described."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        tensors = load(content)
    except SafetensorError as error:
        raise InputError(f"{model} is not a safetensors file") from error
    shapes = {name: list(values.shape) for name, values in tensors.items()}
    if shapes != description["parameters"]:
        raise InputError(f"{model} does not hold the parameters that its description names: export it again")
    return tensors
