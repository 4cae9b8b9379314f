"""Description of an exported model: the data that a program needs to use it, in a JSON file next to the model."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from sifu.core.ledger import read_json
from sifu.core.operator_words import NPZ, PYTHON, TABLE
from sifu.core.spec import Spec
from sifu.core.spec.sections import RIDGE
from sifu.data.dataset import MIDDLE, SPREAD, channels_first
from sifu.data.digits import DIGITS, SHAPE, largest_of
from sifu.data.npz import MOST_CLASSES, stored_samples
from sifu.data.table import column_names
from sifu.data.table_coding import TableCoding
from sifu.data.table_keys import split_names
from sifu.errors import InputError
from sifu.run.clients_and_engine import takes_rows
from sifu.store.reader import RunReader
from sifu.store.release_files import releases
from sifu.version import FORMAT, __version__

LARGEST_DESCRIPTION = 1 << 20


def description_path(model: Path) -> Path:
    """Return the path of a model file's description."""
    return model.with_name(f"{model.name}.json")


def describe(reader: RunReader, content: bytes, given: Sequence[int] | None = None) -> dict[str, Any]:
    """Return the description of a run's current model, whose safetensors bytes are `content`.

    The shape of one sample is `given` if the clients were passed from Python.
    """
    spec, layout = Spec.from_mapping(reader.spec), reader.layout
    kind, (seq, head) = spec.model.kind, reader.last_event()
    if published := releases(reader):
        seq, head = published[-1].seq, reader.hashes()[published[-1].seq]
    ((time,),) = reader.query("SELECT time FROM events WHERE seq = ?", (seq,))
    coding = TableCoding.from_spec(spec.data, spec.features) if spec.data.columns or spec.data.name == TABLE else None
    features = {key: value for key, value in asdict(spec.features).items() if key != "cache"}
    stored = _stored(spec) if given is None else {"shape": list(given), "bytes": False}
    return {
        "format": f"sifu model {FORMAT}",
        "software": f"sifu {__version__}",
        "model": kind,
        "task": {key: getattr(spec.ridge, key) for key in ("task", "shift", "scale")} if spec.regime.solves else None,
        "dtype": layout.dtype,
        "parameters": {name: list(shape) for name, shape in zip(layout.names, layout.shapes, strict=True)},
        "outputs": int(layout.shapes[-1][-1]),
        "classes": list(coding.class_names) or None if coding else None,
        "features": features,
        "features_digest": str(reader.facts.get("features", "")),
        "data": spec.data.name,
        "input_shape": _input_shape(spec, stored),
        "stored": stored,
        "normalise": spec.data.normalise,
        "normalisation": _normalisation(spec),
        "table": coding.to_mapping() if coding else None,
        "columns": _feature_columns(spec, coding) if coding else None,
        # The event of the latest release or, without one, the last event. Later requests are not in the model.
        "released": {"run": reader.value("run"), "event": seq, "head": head, "time": str(time)},
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def read_description(path: Path) -> dict[str, Any]:
    """Return a description written by `sifu export`, after checking the fields that are needed to use the model."""
    try:
        content = read_json(read_bytes(path, LARGEST_DESCRIPTION))
        if content["format"] != f"sifu model {FORMAT}" or not _is_whole(content):
            raise ValueError(content["format"])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise InputError(f"{path} does not describe a model of this version of sifu: export it again") from error
    return content  # type: ignore[no-any-return]


def _is_whole(content: dict[str, Any]) -> bool:
    """Return whether all fields that are needed to use a model have the format of an export."""
    texts = ("model", "dtype", "data", "normalise", "features_digest", "sha256")
    objects = ("parameters", "features")
    lists = {"classes": str, "columns": str, "input_shape": int}
    outputs, classes, task, stored = (content[key] for key in ("outputs", "classes", "task", "stored"))
    return (
        all(isinstance(content[key], str) for key in texts)
        and all(isinstance(content[key], dict) for key in objects)
        and all(content[key] is None or _is_list_of(content[key], kind) for key, kind in lists.items())
        and (stored is None or (_is_list_of(stored["shape"], int) and type(stored["bytes"]) is bool))
        and (content["table"] is None or TableCoding.from_mapping(content["table"]).label != "")
        and content["dtype"] in ("float32", "float64")
        and isinstance(content["features"].get("kind"), str)
        and type(outputs) is int
        and 0 < outputs <= MOST_CLASSES
        and (not classes or len(classes) >= max(outputs, 2) or content["model"] == PYTHON)
        and (content["model"] == RIDGE) == (task is not None)
        and (task is None or isinstance(task["task"], str))
        and (task is None or {type(task["shift"]), type(task["scale"])} <= {int, float})
    )


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def read_bytes(path: Path, most: int) -> bytes:
    """Return the bytes of a file that an export wrote; refuse one that is too large, or an ONNX file."""
    try:
        exported = path.name.removesuffix(".json")
        if exported.endswith(".onnx"):
            raise InputError(f"{exported} is for ONNX runtimes only: export the model to a .safetensors file as well")
        if not path.is_file() or path.stat().st_size > most:
            raise InputError(f"{path} is not a file that sifu export wrote")
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error


def _stored(spec: Spec) -> dict[str, Any] | None:
    """Return the shape of a stored sample and whether it consists of bytes, or None if unknown without the clients.

    A table is described by its columns instead.
    """
    if spec.data.name == DIGITS:
        return {"shape": list(SHAPE), "bytes": True}
    if spec.data.name != NPZ:
        return None
    try:
        shape, dtype = stored_samples(Path(spec.data.file).expanduser())
    except InputError:
        return None
    return {"shape": list(shape), "bytes": dtype == np.uint8}


def _input_shape(spec: Spec, stored: dict[str, Any] | None) -> list[int] | None:
    """Return the shape of a sample that the model or its feature map accepts, or None if only the clients know it."""
    if stored is None:
        return None
    samples = np.zeros((0, *stored["shape"]))
    shape = (samples if spec.data.name == PYTHON else channels_first(samples)).shape[1:]
    return [math.prod(shape)] if takes_rows(spec) else list(shape)


def _normalisation(spec: Spec) -> dict[str, Any] | None:
    """Return the divisor of bytes and each channel's mean and deviation, or None if numbers are used unchanged."""
    largest = largest_of(spec.data.name)
    if largest is None:
        return {"divide_bytes_by": 255.0, "mean": None, "deviation": None} if spec.data.name == NPZ else None
    centred = spec.data.normalise != "unit"
    return {
        "divide_bytes_by": largest,
        "mean": [MIDDLE] if centred else None,
        "deviation": [SPREAD] if centred else None,
    }


def _feature_columns(spec: Spec, coding: TableCoding) -> list[str] | None:
    """Return the feature columns in order, from the record or the table's header, or None if both are missing."""
    if spec.data.columns:
        return split_names(spec.data.columns, "data.columns")
    try:
        return coding.features_of(column_names(Path(spec.data.file).expanduser(), coding))
    except InputError:
        return None
