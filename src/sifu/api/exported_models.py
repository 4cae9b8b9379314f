"""A released model outside its run: a safetensors file, and beside it a description that says what it is.

The description has the model's kind, its parameters, how inputs were made (features, normalisation, the coding of a
table) and the digest of the file, and nothing of any client. The safetensors file itself stays byte for byte what the
run certified, so that its digest can be compared.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sifu.core.ledger import read_json
from sifu.core.spec import LINEAR_KINDS, Spec
from sifu.data.table import TableCoding, feature_names, parse_categories, parse_words, read_features
from sifu.errors import InputError
from sifu.launch.federation import TABLE
from sifu.store.reader import RunReader
from sifu.theory.arrays import Array
from sifu.version import __version__

FORMAT = "sifu-model-1"
LARGEST_DESCRIPTION = 1 << 20


def description_path(model: Path) -> Path:
    """Where the description of a model file lies."""
    return model.with_name(f"{model.name}.json")


def describe(reader: RunReader, content: bytes) -> dict[str, Any]:
    """What a run's current model is; `content` are the bytes of its file."""
    spec, layout = Spec.from_mapping(reader.spec), reader.layout
    table = spec.data.name == TABLE
    return {
        "format": FORMAT,
        "software": f"sifu {__version__}",
        "model": spec.model.kind,
        "dtype": layout.dtype,
        "parameters": {name: list(shape) for name, shape in zip(layout.names, layout.shapes, strict=True)},
        "classes": list(parse_words(spec.data.classes, "data.classes")) if table and spec.data.classes else None,
        "features": asdict(spec.features),
        "data": spec.data.name,
        "normalise": spec.data.normalise,
        "label": spec.data.label if table else None,
        "client": spec.data.client if table else None,
        "categories": {name: list(words) for name, words in parse_categories(spec.data.categories).items()},
        "columns": _columns_at_hand(spec) if table else None,
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def _columns_at_hand(spec: Spec) -> list[str] | None:
    """The columns that were features, in their order, if the table is still there."""
    try:
        return feature_names(Path(spec.data.file).expanduser(), TableCoding(spec.data.label, spec.data.client))
    except InputError:
        return None


@dataclass(frozen=True)
class LoadedModel:
    """A linear model that can be used: scores are x W + b.

    `description` is what its file says it is. Other models are loaded with torch, from the same safetensors file.
    """

    weight: Array
    bias: Array
    description: dict[str, Any]

    def scores(self, x: Any) -> Array:
        """The scores of samples in rows, made as the clients' were (`description` says how)."""
        rows = np.asarray(x, dtype=np.float64)
        if rows.ndim != 2 or rows.shape[1] != self.weight.shape[0]:
            raise InputError(f"the model takes rows of {self.weight.shape[0]} features, found shape {rows.shape}")
        return rows @ self.weight + self.bias

    def predict(self, x: Any) -> Array:
        """Class numbers; of least_squares the values themselves."""
        scores, kind = self.scores(x), self.description["model"]
        if kind == "least_squares":
            return scores if scores.shape[1] > 1 else scores[:, 0]
        return (scores[:, 0] > 0.0).astype(np.int64) if kind == "logistic" else scores.argmax(axis=1)

    def predict_file(self, path: str | Path) -> list[Any]:
        """What it says of the rows of an npz, CSV or Parquet file: words where the spec named the classes."""
        predicted = self.predict(self._inputs(Path(path)))
        classes = self.description["classes"]
        return [classes[index] for index in predicted] if classes else predicted.tolist()

    def _inputs(self, path: Path) -> Array:
        if path.suffix.lower() == ".npz":
            from sifu.data.npz import read_arrays

            arrays = read_arrays(path)
            if "x" not in arrays:
                raise InputError(f"{path} has no array x; it has {', '.join(sorted(arrays)) or 'none'}")
            return arrays["x"].reshape(len(arrays["x"]), -1)
        words = {name: tuple(listed) for name, listed in self.description["categories"].items()}
        coding = TableCoding(self.description["label"] or "", self.description["client"] or "", (), words)
        features: Array = read_features(path, coding, self.description["columns"])
        return features


def load_model(path: str | Path) -> LoadedModel:
    """A model that `sifu export` wrote, by its description; its digest must be the one that the description names."""
    model = Path(path)
    description = _description(description_path(model))
    content = _bytes(model, 4 << 30)
    if hashlib.sha256(content).hexdigest() != description.get("sha256"):
        raise InputError(f"{model} is not the file that {description_path(model).name} describes: export it again")
    kind, features = description.get("model"), description.get("features", {})
    if kind not in LINEAR_KINDS or features.get("kind") != "none":
        raise InputError(
            f"{model} is a model of kind {kind!r} on features {features.get('kind')!r}: sifu loads linear models on "
            "plain inputs; load its parameters with safetensors, and build the rest as its description says"
        )
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        tensors = load(content)
        return LoadedModel(tensors["weight"], tensors["bias"], description)
    except (SafetensorError, KeyError) as error:
        raise InputError(f"{model} does not hold a linear model ({type(error).__name__})") from error


def _description(path: Path) -> dict[str, Any]:
    try:
        content = read_json(_bytes(path, LARGEST_DESCRIPTION))
        if content["format"] != FORMAT or not isinstance(content["categories"], dict):
            raise ValueError(content["format"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path} does not describe a model of sifu: export it again") from error
    described: dict[str, Any] = content
    return described


def _bytes(path: Path, most: int) -> bytes:
    try:
        if not path.is_file() or path.stat().st_size > most:
            raise InputError(f"{path} is not a file that sifu export wrote")
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error


def description_bytes(reader: RunReader, content: bytes) -> bytes:
    """The description as the file beside the model holds it."""
    return json.dumps(describe(reader, content), indent=1).encode() + b"\n"
