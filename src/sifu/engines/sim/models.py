"""Models to train: a linear model with one of three losses, or any `torch.nn.Module`.

A spec names a model (`make_model`); a program can pass a module factory (`ModuleModel`). The flat vector of a linear
model is its weight (features x outputs) followed by its bias. It is thus also the matrix of the bias-extended problem:
`vector.reshape(features + 1, outputs)`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils import vector_to_parameters

from sifu.core.layout import ModelLayout, Vector
from sifu.core.round import keyed_generator
from sifu.data.own_modules import check_trainable, declared, declared_function, fixed_generators, fresh_copy, is_known
from sifu.engines.sim.embedded_clients import OBJECTIVES, Objective, ObjectiveName
from sifu.engines.sim.local_training import torch_seed
from sifu.engines.sim.networks import ConvNet, LinearScores, cnn, image_shape, mlp
from sifu.errors import InputError
from sifu.theory.arrays import Array
from sifu.theory.facts import (
    BUFFERS,
    DRAWN_FROM_SEED,
    MADE_BY_OPERATOR,
    MODULE_KNOWN,
    MODULE_NOT_DECLARED,
)

_SEEDING = threading.Lock()

TORCH_TYPES = {"float64": torch.float64, "float32": torch.float32}
"""Element types a model may have."""
HIDDEN_UNITS = 64
"""Number of hidden units of the model `mlp`."""


@dataclass(frozen=True)
class LinearModel:
    """Linear model x W + b with a convex, smooth loss, whose smoothness constants can be bounded from the data."""

    kind: ObjectiveName
    features: int
    outputs: int
    init: Literal["zeros", "random"] = "zeros"
    smooth = True
    initial_source = DRAWN_FROM_SEED
    outside: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in OBJECTIVES:
            raise InputError(f"linear model {self.kind!r} is unknown: use one of {sorted(OBJECTIVES)}")
        if self.init not in ("zeros", "random"):
            raise InputError(f"a linear model starts from 'zeros' or 'random', found init {self.init!r}")
        if self.features < 1 or self.outputs < 1:
            raise InputError(f"a linear model needs features and outputs, found {self.features} and {self.outputs}")
        if self.kind == "logistic" and self.outputs != 1:
            raise InputError(f"the model 'logistic' has one output, found {self.outputs}; use 'softmax' for classes")

    @property
    def objective(self) -> Objective:
        """Loss of the model."""
        return OBJECTIVES[self.kind]

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Mean loss of a batch."""
        return self.objective.mean_loss

    def layout(self, dtype: str) -> ModelLayout:
        """Return the names and shapes of the parameters."""
        shapes = ((self.features, self.outputs), (self.outputs,))
        return ModelLayout(("weight", "bias"), shapes, dtype)

    def build(self, dtype: str) -> nn.Module:
        """Return the module that the plain loop trains."""
        return LinearScores(self.features, self.outputs).to(TORCH_TYPES[dtype])

    def initial(self, seed: int, branch: int, dtype: str) -> Vector:
        """Return the initial vector of a branch: zeros, or uniform on +-1/sqrt(features) as in torch's Linear."""
        generator = keyed_generator(seed, "initial model", branch)
        bound = 1.0 / math.sqrt(self.features) if self.init == "random" else 0.0
        return generator.uniform(-bound, bound, size=self.layout(dtype).size).astype(dtype)


@dataclass(frozen=True)
class ModuleModel:
    """Model given by a module factory; `kind` is the type of targets and names the default loss.

    `loss(outputs, targets)` is a mean over the samples of a batch. Persistent buffers of floating type, such as running
    statistics of batch normalisation, belong to the model (`flat_state`). Modules from the factory are copied before
    use. A factory whose modules share parameters is refused, because training one module would train the others.
    """

    factory: Callable[[], nn.Module]
    kind: ObjectiveName = "softmax"
    custom_loss: Callable[[Tensor, Tensor], Tensor] | None = None
    smooth = False
    outside: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        if self.kind not in OBJECTIVES:
            raise InputError(f"targets are read as one of {sorted(OBJECTIVES)}, found kind {self.kind!r}")
        try:
            module = self._made(0)
        except TypeError as error:
            raise InputError(
                f"the model could not be made ({error}): give a function that takes no arguments, for example "
                "model=lambda: Net(10)"
            ) from error
        if not isinstance(module, nn.Module) or not any(True for _ in module.parameters()):
            raise InputError(
                f"the factory must make a torch.nn.Module with parameters, it made {type(module).__name__}"
            )
        check_trainable(module)
        shared = _shared_storage(module, self._made(1))
        if shared:
            raise InputError(
                f"the factory returns modules that share their parameters ({shared}), so training one would change "
                "fresh ones. Make a new module in every call, or return copy.deepcopy(module)"
            )
        object.__setattr__(self, "outside", _outside_the_theory(module))

    @property
    def initial_source(self) -> str:
        """Origin of the initial model (`TrainingFacts.initial`)."""
        return DRAWN_FROM_SEED if is_sifus(self.factory) and self.custom_loss is None else MADE_BY_OPERATOR

    @property
    def conv_net(self) -> ConvNet | None:
        """Description of the network if it is a `ConvNet` with softmax loss, which trains faster; else None."""
        plain = self.kind == "softmax" and self.custom_loss is None
        return self.factory if plain and isinstance(self.factory, ConvNet) else None

    @property
    def objective(self) -> Objective:
        """Loss that `kind` names."""
        return OBJECTIVES[self.kind]

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Mean loss of a batch."""
        return self.custom_loss or self.objective.mean_loss

    def layout(self, dtype: str) -> ModelLayout:
        """Return the names and shapes of the parameters, in the module's order, and of the buffers of the model."""
        module = self._seeded(0)
        named = dict(module.named_parameters()) | _buffers(module)
        return ModelLayout(tuple(named), tuple(tuple(value.shape) for value in named.values()), dtype)

    def build(self, dtype: str) -> nn.Module:
        """Return a module to train."""
        return self._seeded(0).to(TORCH_TYPES[dtype])

    def initial(self, seed: int, branch: int, dtype: str) -> Vector:
        """Return the model of a module made with torch's generator seeded by (seed, branch)."""
        return flat_state(self._seeded(torch_seed(seed, "initial model", branch)).to(TORCH_TYPES[dtype])).numpy()

    def _seeded(self, seed: int) -> nn.Module:
        """Return a copy of a new module, so that changes never reach a module that the factory may have kept."""
        return fresh_copy(self._made(seed))

    def _made(self, seed: int) -> nn.Module:
        # torch's generator is global to the process: only one thread at a time may make a model.
        with _SEEDING, fixed_generators(seed):
            return self.factory()


def is_sifus(factory: Callable[[], nn.Module]) -> bool:
    """Return whether a factory makes one of sifu's own networks, which keep no state between clients."""
    return type(factory) is ConvNet or (type(factory) is partial and factory.func is mlp)


Model = LinearModel | ModuleModel


def make_model(
    name: str, input_shape: tuple[int, ...], outputs: int, *, init: Literal["zeros", "random"] = "zeros"
) -> Model:
    """Make the model that a spec names.

    Raises:
        InputError: If the name is unknown or the shape does not fit the model.
    """
    if name in OBJECTIVES:
        return LinearModel(name, math.prod(input_shape), outputs, init)  # type: ignore[arg-type]
    if name == "cnn":
        return ModuleModel(cnn(image_shape(name, tuple(input_shape)), outputs))
    if name == "mlp":
        return ModuleModel(partial(mlp, tuple(input_shape), outputs, HIDDEN_UNITS))
    raise InputError(f"model {name!r} is unknown: use one of {', '.join((*OBJECTIVES, 'mlp', 'cnn'))}")


def module_of_model(model: Model, is_pure: bool) -> str:
    """Return `TrainingFacts.module` for a model: "" for sifu's own, or what is known or declared about the operator's.

    `is_pure` is True if the operator declares that the model computes from its inputs and parameters alone.
    """
    if type(model) is LinearModel:
        return ""
    if type(model) is ModuleModel and model.custom_loss is None:
        if is_sifus(model.factory):
            return ""
        if is_known(model.build("float32")):
            return MODULE_KNOWN
    if not is_pure:
        return MODULE_NOT_DECLARED
    if not isinstance(model, ModuleModel):
        return declared(declared_function(type(model)))
    functions = (model.factory, model.custom_loss) if model.custom_loss else (model.factory,)
    return declared(*map(declared_function, functions))


def evaluated_module(model: Model, layout: ModelLayout, parameters: Mapping[str, Array]) -> nn.Module:
    """Return a module in evaluation mode with the parameters and buffers of a model.

    Raises:
        InputError: If the layout of the model differs from the run's.
    """
    module = model.build(layout.dtype).eval()
    if model.layout(layout.dtype) != layout:
        raise InputError(
            "the parameters of the model are not those of the run: give the function that made the run's model"
        )
    load_state(module, torch.from_numpy(layout.flatten(parameters)))
    return module


def flat_state(module: nn.Module) -> Tensor:
    """Return a copy of the parameters and buffers of a model as one vector."""
    parts = (*module.parameters(), *_buffers(module).values())
    return torch.cat([part.detach().reshape(-1) for part in parts])


def load_state(module: nn.Module, state: Tensor) -> None:
    """Set the parameters and buffers of a model from a vector of `flat_state`, which they may share afterwards."""
    vector_to_parameters(state, module.parameters())
    at = sum(parameter.numel() for parameter in module.parameters())
    for buffer in _buffers(module).values():
        buffer.copy_(state[at : at + buffer.numel()].view_as(buffer))
        at += buffer.numel()


def train_mode(module: nn.Module) -> None:
    """Set a module to training mode, but keep normalisation whose parameters are all frozen in evaluation mode."""
    module.train()
    for part in filter(_is_frozen, module.modules()):
        part.eval()


def _is_frozen(part: nn.Module) -> bool:
    """Return whether a part normalises with the statistics of a pretrained network."""
    weights = list(part.parameters(recurse=False))
    return isinstance(part, _NormBase) and bool(weights) and not any(weight.requires_grad for weight in weights)


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the persistent floating buffers by name, except those of frozen normalisation."""
    persistent = module.state_dict().keys()
    frozen = {name for name, part in module.named_modules() if _is_frozen(part)}
    return {
        name: buffer
        for name, buffer in module.named_buffers()
        if buffer.is_floating_point() and name in persistent and name.rpartition(".")[0] not in frozen
    }


def _shared_storage(first: nn.Module, second: nn.Module) -> str:
    """Return the name of a shared parameter or buffer, or a phrase if both are the same module; empty if neither."""
    if first is second:
        return "it returns the same module again"
    held = {tensor.untyped_storage().data_ptr() for tensor in (*first.parameters(), *first.buffers()) if tensor.numel()}
    for name, tensor in (*second.named_parameters(), *second.named_buffers()):
        if tensor.numel() and tensor.untyped_storage().data_ptr() in held:
            return name
    return ""


def _outside_the_theory(module: nn.Module) -> tuple[str, ...]:
    reasons = [BUFFERS] if _buffers(module) else []
    if any(isinstance(part, _DropoutNd) and part.p > 0 for part in module.modules()):
        reasons.append("dropout")
    return tuple(reasons)
