"""A released model outside its run: a safetensors file with its description, or an ONNX file that holds both.

The safetensors file is byte for byte what the run certified, so that its digest can be compared.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sifu.api.model_description import description_path, networks_path, read_bytes, read_description
from sifu.core.allowed_code import allow_code
from sifu.errors import InputError
from sifu.theory.arrays import Array

if TYPE_CHECKING:
    from sifu.api.loaded_model import LoadedModel

LARGEST_MODEL = 4 << 30


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
    from sifu.api.loaded_model import LoadedModel  # imports torch

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
