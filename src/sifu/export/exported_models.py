"""Export of a released model as a safetensors file with a description, or as ONNX, and loading of exported files."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sifu.checking.integrity import blaming_damage
from sifu.core.allowed_code import allow_code
from sifu.core.operator_words import PYTHON, way_to_go_on
from sifu.core.spec import Spec
from sifu.errors import InputError, RunDamagedError, SifuWarning
from sifu.export.description import describe, description_path, read_bytes, read_description
from sifu.requests.what_remains import note_export
from sifu.run.given import ModelGiven, as_model
from sifu.run.run_engines import RunEngines
from sifu.store.files import write_output
from sifu.store.reader import RunReader
from sifu.store.release_files import released_content, released_node
from sifu.theory.arrays import Array

if TYPE_CHECKING:
    from torch import nn

    from sifu.engines.sim.models import Model
    from sifu.export.loaded_model import LoadedModel


LARGEST_MODEL = 4 << 30


def load_model(path: str | Path, *, module: str | ModelGiven | None = None) -> LoadedModel:
    """Load the model at `path` that `sifu export` wrote, and check it against the digest in its description.

    A module is code, and a description alone must not make code run: the caller has to name the module. A module that
    computes features must have the same weights and source text as in the run.

    Args:
        path: The safetensors file.
        module: Name of your module, `"package.file:function"`, if the model or its features are computed by one. A
            model of your own may also be passed in the forms that `train` accepts.

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
        allow_code(module)  # naming a module is the caller's consent
    from sifu.export.loaded_model import LoadedModel  # this import needs torch

    return LoadedModel(parameters, description, own)


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
    allow_code(module)  # naming a module is the caller's consent
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
    description = describe(reader, content, _shape_given(spec, given))
    if target.suffix.lower() == ".onnx":
        from sifu.export.onnx_file import onnx_bytes  # this import needs torch

        own = as_model(given.model) if spec.model.kind == PYTHON else None
        write_output(target, onnx_bytes(description, content, own))
    else:
        write_output(target, content)
        write_output(description_path(target), json.dumps(description, indent=1).encode() + b"\n")
    note_export(reader.folder, released_node(reader) or reader.tip, target)
    return target


def released_module(reader: RunReader, model: ModelGiven | None) -> nn.Module:
    """Return the current released model as a torch module (see `Run.model`); `model` makes a user's own module."""
    from safetensors.numpy import load

    content = released_bytes(reader)
    description = describe(reader, content)
    if description["model"] != PYTHON:
        from sifu.export.loaded_model import LoadedModel

        return LoadedModel(load(content), description)
    own = as_model(model)
    if own is None:
        raise InputError(
            "this run was made from Python with its own model: open it with the function that makes it, "
            "sifu.open_run(folder, model=...)"
        )
    from sifu.engines.sim.models import evaluated_module

    return evaluated_module(own, reader.layout, load(content))


def released_bytes(reader: RunReader) -> bytes:
    """Return the safetensors bytes of the current released model; a run that is not ready has none."""
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
            "the head changed since the last release, which is used here: publish the new head with sifu update",
            SifuWarning,
            stacklevel=4,
        )
    return content


def _shape_given(spec: Spec, given: RunEngines) -> tuple[int, ...] | None:
    """Return the shape of a sample if the clients were passed from Python, else None.

    It is also None for tables, and for bytes that a feature map scales.
    """
    if given.clients is None or spec.data.columns:
        return None
    client = given.clients()[0]
    samples = np.asarray(client.x)
    if samples.dtype == np.uint8 and spec.features.kind != "none":
        return None
    return getattr(client, "sample_shape", None) or samples.shape[1:]
