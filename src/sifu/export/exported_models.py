"""A released model outside its run: a safetensors or ONNX file, and the description that makes it usable."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sifu.core.allowed_code import allow_code
from sifu.core.ledger import read_json
from sifu.core.operator_words import NPZ, PYTHON, TABLE, way_to_go_on
from sifu.core.spec import Spec
from sifu.core.spec.sections import RIDGE
from sifu.data.dataset import channels_first
from sifu.data.npz import MOST_CLASSES, stored_samples
from sifu.data.sources import find_data, scale_of
from sifu.data.table import column_names
from sifu.data.table_coding import TableCoding
from sifu.data.table_keys import split_names
from sifu.errors import InputError, RunDamagedError, SifuWarning
from sifu.requests.what_remains import note_export
from sifu.run.clients_and_engine import takes_rows
from sifu.run.given import ModelGiven, as_model
from sifu.run.run_engines import RunEngines
from sifu.store.files import write_atomically
from sifu.store.projection import GroupModelRow
from sifu.store.reader import RunReader
from sifu.store.release_files import released_content, released_node, releases
from sifu.theory.arrays import Array
from sifu.theory.facts import BATCH_NORMALISATION
from sifu.verify.integrity import blaming_damage
from sifu.version import __version__

if TYPE_CHECKING:
    from torch import nn

    from sifu.engines.sim.models import Model
    from sifu.export.loaded_model import LoadedModel

FORMAT = "sifu-model-4"
LARGEST_DESCRIPTION = 1 << 20


def description_path(model: Path) -> Path:
    """Return the path of a model file's description."""
    return model.with_name(f"{model.name}.json")


def networks_path(model: Path) -> Path:
    """Return the path of the tuned networks that compute the features of an exported model."""
    return model.with_name(f"{model.name}.networks")


def networks_of_head(reader: RunReader) -> list[GroupModelRow]:
    """Return the groups' networks that the current head uses; empty if no network is tuned."""
    whole = next((row for row in reader.statistics().values() if row.is_sum), None)
    groups = reader.group_models()
    return [groups[node] for node in whole.trunks] if whole else []


def networks_bytes(reader: RunReader) -> bytes | None:
    """Return the parameters that each group tuned, as safetensors named GROUP/NAME; None if no network is tuned.

    All other parameters are in the public network.
    """
    from safetensors.numpy import save

    if not Spec.from_mapping(reader.spec).regime.tunes:
        return None
    arrays = {}
    for row in networks_of_head(reader):
        for name, values in reader.group_layout.unflatten(reader.load_model(row.node)).items():
            arrays[f"{row.grp}/{name}"] = np.ascontiguousarray(values)
    return save(arrays)


def describe(
    reader: RunReader, content: bytes, networks: bytes | None = None, given: Sequence[int] | None = None
) -> dict[str, Any]:
    """Return the description of a run's current model.

    Args:
        reader: Reader of the run.
        content: Bytes of its safetensors file.
        networks: Bytes of the file of its tuned networks.
        given: Shape of one sample, if a program gave the clients.
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
        "format": FORMAT,
        "software": f"sifu {__version__}",
        "model": kind,
        "task": spec.regime.described_task(),
        "dtype": layout.dtype,
        "parameters": {name: list(shape) for name, shape in zip(layout.names, layout.shapes, strict=True)},
        "outputs": int(layout.shapes[-1][-1]),
        "classes": list(coding.class_names) or None if coding else None,
        "features": features,
        "features_digest": str(reader.facts.get("features", "")),
        "networks": {
            "groups": spec.groups.count,
            "stretch": spec.groups.stretch,
            "samples": {str(row.grp): row.samples for row in networks_of_head(reader)},
            "sha256": hashlib.sha256(networks).hexdigest(),
        }
        if networks is not None
        else None,
        "data": spec.data.name,
        "input_shape": _input_shape(spec, stored),
        "stored": stored,
        "normalise": spec.data.normalise,
        "normalisation": _normalisation(spec),
        "table": coding.to_mapping() if coding else None,
        "columns": _feature_columns(spec, coding) if coding else None,
        # Last event of the ledger: the model predates every later request.
        "released": {"run": reader.value("run"), "event": seq, "head": head, "time": str(time)},
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def read_description(path: Path) -> dict[str, Any]:
    """Return a description written by `sifu export`, after checking the fields that using the model needs.

    Raises:
        InputError: If the file is not such a description.
    """
    try:
        content = read_json(read_bytes(path, LARGEST_DESCRIPTION))
        if content["format"] != FORMAT or not _is_whole(content):
            raise ValueError(content["format"])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise InputError(f"{path} does not describe a model of sifu: export it again") from error
    return content  # type: ignore[no-any-return]


MOST_GROUPS = 1 << 20


def _are_networks(tuned: dict[str, Any]) -> bool:
    """Return whether the description of tuned networks has the format of an export."""
    samples = tuned["samples"]
    return (
        isinstance(tuned["sha256"], str)
        and type(tuned["groups"]) is int
        and 0 < tuned["groups"] <= MOST_GROUPS
        and type(tuned["stretch"]) in (int, float)
        and bool(samples)
        and all(group.isascii() and group.isdecimal() and len(group) < 10 for group in samples)
        and all(type(count) is int and 0 < count < 1 << 53 for count in samples.values())
    )


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
        and (content.get("networks") is None or _are_networks(content["networks"]))
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
    """Return the bytes of a file that an export wrote.

    Args:
        path: The file.
        most: Largest size that is read.

    Raises:
        InputError: If the file cannot be read, is too large, or is an ONNX file.
    """
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
    """Return the shape of one sample in the data file and whether it consists of bytes, if known without the clients.

    For a table, `columns` holds this information.
    """
    named = find_data(spec.data.name)
    if named is not None and named.shape is not None:
        return {"shape": list(named.shape), "bytes": named.scale is not None}
    if spec.data.name != NPZ:
        return None
    try:
        shape, dtype = stored_samples(Path(spec.data.file).expanduser())
    except InputError:
        return None
    return {"shape": list(shape), "bytes": dtype == np.uint8}


def _input_shape(spec: Spec, stored: dict[str, Any] | None) -> list[int] | None:
    """Return the shape of one sample that the model or its feature map accepts, if known without the clients."""
    if stored is None:
        return None
    samples = np.zeros((0, *stored["shape"]))
    shape = (samples if spec.data.name == PYTHON else channels_first(samples)).shape[1:]
    return [math.prod(shape)] if takes_rows(spec) else list(shape)


def _normalisation(spec: Spec) -> dict[str, Any] | None:
    """Return the divisor of bytes, and mean and deviation by channel; None if numbers are used unchanged."""
    constants = scale_of(spec.data.name)
    if constants is None:
        return {"divide_bytes_by": 255.0, "mean": None, "deviation": None} if spec.data.name == NPZ else None
    scale = constants.of(spec.data.normalise)
    centred = spec.data.normalise != "unit"
    return {
        "divide_bytes_by": scale.largest,
        "mean": list(scale.mean) if centred else None,
        "deviation": list(scale.deviation) if centred else None,
    }


def _feature_columns(spec: Spec, coding: TableCoding) -> list[str] | None:
    """Return the feature columns in order, from the record or the table's header; None if both are missing."""
    if spec.data.columns:
        return split_names(spec.data.columns, "data.columns")
    try:
        return coding.features_of(column_names(Path(spec.data.file).expanduser(), coding))
    except InputError:
        return None


LARGEST_MODEL = 4 << 30


def load_model(path: str | Path, *, module: str | ModelGiven | None = None) -> LoadedModel:
    """Load the model at `path` that `sifu export` wrote; its description names its digest.

    A module is code, and a description alone must not make code run. A module for features must have the same weights
    and source text as in the run.

    Args:
        path: The safetensors file.
        module: Name of the user's module, `"package.file:function"`, if the model is a user's module or its features
            are computed by one. A model that is a module may also be given as for `train`.

    Raises:
        InputError: If the file does not match its description, or a module is needed and not given.
    """
    model = Path(path)
    description = read_description(description_path(model))
    parameters = _tensors(model, description["sha256"], description_path(model).name)
    if {name: list(values.shape) for name, values in parameters.items()} != description["parameters"]:
        raise InputError(f"{model} does not hold the parameters that its description names: export it again")
    own = _own_model(model, module) if description["model"] == PYTHON else None
    features = description["features"]
    if own is None and features.get("kind") == "module" and features.get("module") != module:
        raise InputError(
            f"{model} was trained on features of the module {features.get('module')!r}, which is code: name it to "
            "allow running it (sifu predict --module package.file:function, or load_model(..., module=...))"
        )
    if isinstance(module, str) and features.get("kind") == "module":
        allow_code(module)  # the caller consents by naming it
    from sifu.export.loaded_model import LoadedModel  # imports torch

    tuned = description.get("networks")
    networks = _tensors(networks_path(model), tuned["sha256"], description_path(model).name) if tuned else None
    return LoadedModel(parameters, description, networks, own)


def _own_model(model: Path, module: str | ModelGiven | None) -> Model | None:
    """Return the user's own model, from its function or the function's name."""
    from sifu.data.feature_maps.build import module_of

    if module is None:
        raise InputError(
            f"{model} has the parameters of your own module: name the function that makes it (sifu predict --module "
            "package.file:function, or load_model(..., module=...))"
        )
    if not isinstance(module, str):
        return as_model(module)
    allow_code(module)  # the caller consents by naming it
    return as_model(lambda: module_of(module)[0])


def _tensors(path: Path, sha256: str, described_by: str) -> dict[str, Array]:
    """Return the arrays of an exported file, after checking its digest."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    content = read_bytes(path, LARGEST_MODEL)
    if hashlib.sha256(content).hexdigest() != sha256:
        raise InputError(f"{path} is not the file that {described_by} describes: export it again")
    try:
        return load(content)
    except SafetensorError as error:
        raise InputError(f"{path} is not a safetensors file") from error


def export_model(reader: RunReader, target: Path, given: RunEngines) -> Path:
    """Write the current released model (see `Run.export`); `given` holds the arguments the run was opened with."""
    if target.is_dir():
        raise InputError(f"{target} is a folder: give the file to write, for example {target / 'model.safetensors'}")
    spec, content = Spec.from_mapping(reader.spec), released_bytes(reader)
    if not target.parent.is_dir():
        raise InputError(f"there is no folder {target.parent} to write {target.name} into")
    with blaming_damage(reader):
        networks = networks_bytes(reader)
    description = describe(reader, content, networks, _shape_given(spec, given))
    _warn_of_batches(spec, reader)
    if target.suffix.lower() == ".onnx":
        from sifu.export.onnx_graph import onnx_bytes  # imports torch

        own = as_model(given.model) if spec.model.kind == PYTHON else None
        write_atomically(target, onnx_bytes(description, content, networks, own))
    else:
        write_atomically(target, content)
        if networks is not None:
            write_atomically(networks_path(target), networks)
        write_atomically(description_path(target), json.dumps(description, indent=1).encode() + b"\n")
    note_export(reader.folder, released_node(reader) or reader.tip, target)
    return target


def released_module(reader: RunReader, model: ModelGiven | None) -> nn.Module:
    """Return the current released model as a torch module (see `Run.model`); `model` makes a user's own module."""
    from safetensors.numpy import load

    content = released_bytes(reader)
    networks = networks_bytes(reader)
    description = describe(reader, content, networks)
    if description["model"] != PYTHON:
        from sifu.export.loaded_model import LoadedModel

        return LoadedModel(load(content), description, None if networks is None else load(networks))
    own = as_model(model)
    if own is None:
        raise InputError(
            "this run was made from Python with its own model: open it with the function that makes it, "
            "sifu.open_run(folder, model=...)"
        )
    from sifu.engines.sim.models import evaluated_module

    return evaluated_module(own, reader.layout, load(content))


def released_bytes(reader: RunReader) -> bytes:
    """Return the safetensors bytes of the current released model.

    Raises:
        InputError: If the run is not ready, so that its current model is not released.
    """
    if reader.phase not in ("training", "retraining", "ready"):
        raise RunDamagedError(f"{reader.folder} is damaged: its phase is {reader.phase!r}")
    if reader.phase != "ready":
        way = way_to_go_on(Spec.from_mapping(reader.spec), reader.phase)
        raise InputError(
            f"the run is still {reader.phase}, and its current model is not released. Finish it first ({way})"
        )
    with blaming_damage(reader):
        content = released_content(reader)
    if released_node(reader) != reader.tip:
        warnings.warn(
            "the head changed since the last release, which is used here: publish the new head with sifu release",
            SifuWarning,
            stacklevel=4,
        )
    return content


def _shape_given(spec: Spec, given: RunEngines) -> tuple[int, ...] | None:
    """Return the shape of one sample if a program gave the clients; None for bytes, which feature maps scale."""
    if given.clients is None or spec.data.columns:
        return None
    client = given.clients()[0]
    samples = np.asarray(client.x)
    if samples.dtype == np.uint8 and spec.features.kind != "none":
        return None
    return getattr(client, "sample_shape", None) or samples.shape[1:]


def _warn_of_batches(spec: Spec, reader: RunReader) -> None:
    """Warn that batch normalisation makes the scores of a sample depend on the other samples of its batch."""
    if spec.model.kind == PYTHON and BATCH_NORMALISATION in reader.facts["outside"]:
        warnings.warn(
            "the module has batch normalisation, whose running statistics no round trains: the exported model "
            "uses the statistics of each batch, as the recorded accuracy does. Predict many samples at once, and load "
            "the parameters with sifu.load_model(..., module=...), not into a module in eval mode",
            SifuWarning,
            stacklevel=4,
        )
