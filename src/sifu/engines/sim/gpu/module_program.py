"""Rounds of any module for many lanes at once, with ordinary torch operations.

A lane is one run, or one group of a run. Participants of all lanes are packed, each with its lane's model. Sums over
parameters are computed in float64. The models of a group are identical whenever the same lanes run together. With other
lanes, torch may choose other kernels, and models agree only up to rounding.

Unlike other programs, this one does not capture rounds as graphs, because it cannot detect steps that a graph would
replay incorrectly.

`torch.func` turns a module into a function of its flat parameter vector, differentiates it and maps it over models,
each with its own samples. Side effects, such as drawing random numbers or updating batch statistics, cannot be mapped.
Such modules are refused here; on a CPU the plain loop trains them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from sifu.engines.sim.embedded_clients import Objective
from sifu.engines.sim.gpu.lane_stream import PackedProgram, ProgramPlan
from sifu.engines.sim.gpu.schedule import Packing, Schedule
from sifu.engines.sim.models import TORCH_TYPES, ModuleModel
from sifu.errors import InputError
from sifu.theory.facts import BUFFERS

SAMPLES_AT_ONCE = 2048
"""Maximum number of samples whose activations are stored at once, so that memory is independent of the client count."""

AGREEMENT = {"float32": 1e-3, "tf32": 0.1}
"""Maximum deviation between the gradients of a device and of the CPU, relative to the largest entry."""

_PRODUCTS = threading.RLock()
_PLACES: tuple[tuple[str, str], ...] = (
    ("generic", "all"),
    *((backend, operator) for backend in ("cuda", "mkldnn") for operator in ("all", "matmul", "conv", "rnn")),
)
"""Places where torch keeps the precision of float32 products, from version 2.9 on."""


class ModulePass:
    """Gradients and scores of many models of one module on one device.

    With `precision` float32, products on a GPU are as precise as on a CPU; tf32 rounds their factors to 10 bits.
    """

    def __init__(self, model: ModuleModel, dtype: str, device: torch.device, precision: str = "float32") -> None:
        _refuse_unmapped(model, precision)
        self._module = model.build(dtype).to(device).train()
        self._objective, self._precision = model.objective, precision
        named = dict(self._module.named_parameters())
        self._names, self._shapes = list(named), [value.shape for value in named.values()]
        self._sizes = [value.numel() for value in named.values()]
        self._gradients: Callable[..., Tensor] = vmap(grad(self._loss))
        self._scores: Callable[..., Tensor] = vmap(self._scores_of)
        self._dtype = TORCH_TYPES[dtype]

    def try_out(self, sample: Tensor, outputs: int) -> int:
        """Run the module once and return its number of scores per sample.

        Raises:
            InputError: If the module cannot be mapped over models, or has fewer than `outputs` scores.
        """
        models = torch.zeros((2, sum(self._sizes)), dtype=self._dtype, device=sample.device)
        samples = sample.expand(2, 2, *sample.shape)
        buffers = [buffer.clone() for buffer in self._module.buffers()]
        try:
            scores = self.scores(models, samples)
            self.gradients(models, samples, torch.zeros_like(scores), torch.ones_like(scores[..., 0]))
        except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError) as error:
            raise _cannot_be_mapped(f"it fails ({str(error).splitlines()[0]})") from error
        if not all(map(torch.equal, buffers, self._module.buffers())):
            raise _cannot_be_mapped("it changes its buffers")
        if scores.shape[2] < outputs:
            raise InputError(f"the model has outputs of shape ({scores.shape[2]},), {outputs} are needed")
        return int(scores.shape[2])

    def gradients(self, models: Tensor, samples: Tensor, encoded: Tensor, shares: Tensor) -> Tensor:
        """Return d/d theta sum_b share_b f(theta; sample_b) of each of `models` (width, size).

        Args:
            models: Flat models (width, size).
            samples: Samples of each model (width, batch, ...).
            encoded: Encoded targets (width, batch, outputs).
            shares: Weight of each sample (width, batch).
        """
        together = max(1, SAMPLES_AT_ONCE // samples.shape[1])
        with self._settings():
            parts = [
                self._gradients(*(part[first : first + together] for part in (models, samples, encoded, shares)))
                for first in range(0, models.shape[0], together)
            ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def scores(self, models: Tensor, samples: Tensor) -> Tensor:
        """Return the scores of each model for its `samples`: (width, batch, outputs)."""
        together = max(1, SAMPLES_AT_ONCE // models.shape[0])
        with self._settings(), torch.no_grad():
            parts = [self._scores(models, part) for part in torch.split(samples, together, dim=1)]
        return torch.cat(parts, dim=1)

    def _loss(self, model: Tensor, samples: Tensor, encoded: Tensor, shares: Tensor) -> Tensor:
        losses: Tensor = self._objective.row_loss(self._scores_of(model, samples), encoded)
        return (losses * shares).sum()

    def _scores_of(self, model: Tensor, samples: Tensor) -> Tensor:
        parts = torch.split(model, self._sizes)
        parameters = {
            name: part.view(shape) for name, part, shape in zip(self._names, parts, self._shapes, strict=True)
        }
        scores: Tensor = functional_call(self._module, parameters, (samples,))
        return scores.flatten(1)

    @contextmanager
    def _settings(self) -> Iterator[None]:
        with products_in(self._precision), _PlainConvolutions():
            yield


def refuse_other_gradients(own: Tensor, reference: Tensor, precision: str) -> None:
    """Raise `InputError` if a device's gradients deviate from the CPU's gradients by more than `AGREEMENT` allows."""
    away = float((own.cpu() - reference).abs().max() / reference.abs().max().clamp(min=1e-30))
    if not away <= AGREEMENT[precision]:
        raise InputError(
            f"the model's gradients on this device differ from those on the CPU by {away:.2g}, more than the allowed "
            f"{AGREEMENT[precision]:g}: use device cpu"
        )


def _cannot_be_mapped(reason: str) -> InputError:
    return InputError(
        f"the model cannot be trained for many clients at once: {reason}. Use device cpu, where every client starts "
        "from a fresh copy of the model"
    )


def _refuse_unmapped(model: ModuleModel, precision: str) -> None:
    """Raise `InputError` if a module cannot be mapped over models, or if the precision is not supported."""
    module = model.build("float32")
    reason = ""
    if BUFFERS in model.outside or any(isinstance(part, _NormBase) for part in module.modules()):
        reason = "it has buffers, or normalises with statistics of a batch"
    elif any(isinstance(part, _DropoutNd) and part.p > 0 for part in module.modules()):
        reason = "it drops units at random"
    elif model.custom_loss is not None:
        reason = "it has its own loss, which cannot ignore the padding of a batch"
    elif len(list(module.parameters())) < len(list(module.named_parameters(remove_duplicate=False))):
        reason = "some of its layers share parameters"
    if reason:
        raise _cannot_be_mapped(reason)
    if precision not in ("float32", "tf32"):
        raise InputError(f"a module computes in float32 or tf32 on a GPU, found precision {precision!r}")


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Set the precision of float32 products on a GPU while the context is active.

    The setting applies to the whole process, so a lock prevents other threads from changing it meanwhile.
    """
    with _PRODUCTS:
        before, named = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32), _precisions()
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
            for place, now in _precisions().items():  # "none" and "ieee" are both False above
                if now != named[place]:
                    torch._C._set_fp32_precision_setter(*place, named[place])


def _precisions() -> dict[tuple[str, str], str]:
    """Return the precision of float32 products of each backend; empty before torch 2.9."""
    read = getattr(torch._C, "_get_fp32_precision_getter", None)
    return {} if read is None else {place: read(*place) for place in _PLACES}


class _PlainConvolutions(TorchFunctionMode):
    """Context in which convolutions are computed as matrix products.

    Mapped over models, a matrix product becomes a batched product, whereas a convolution would become a slow
    convolution with one group per model.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is functional.conv2d:
            product = _convolution(*args, **(kwargs or {}))
            if product is not None:
                return product
        return function(*args, **(kwargs or {}))


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    """Compute `functional.conv2d`, with its arguments, as a matrix product; return None for unsupported arguments."""
    if groups != 1 or isinstance(padding, str) or input.dim() != 4:
        return None
    kernel = weight.shape[2:]
    steps, border, spacing = (_pair(value) for value in (stride, padding, dilation))
    height, width = (
        (input.shape[2 + axis] + 2 * border[axis] - spacing[axis] * (kernel[axis] - 1) - 1) // steps[axis] + 1
        for axis in range(2)
    )
    if tuple(kernel) == (1, 1) and border == (0, 0):
        patches = input[:, :, :: steps[0], :: steps[1]].flatten(2)
    else:
        patches = functional.unfold(input, tuple(kernel), spacing, border, steps)
    values = weight.flatten(1) @ patches
    if bias is not None:
        values = values + bias[:, None]
    return values.reshape(*values.shape[:2], height, width)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


class ModuleProgram(PackedProgram):
    """Program that trains a module; rows of a schedule index `samples` (all clients' samples) and `encoded` targets."""

    def __init__(
        self,
        module: ModulePass,
        objective: Objective,
        samples: Tensor,
        encoded: Tensor,
        plan: ProgramPlan,
        size: int,
    ) -> None:
        super().__init__(plan, samples, size)
        self.module, self.objective, self.samples, self.encoded = module, objective, samples, encoded
        self._velocity = torch.zeros_like(self.params)
        self._shares = self._zeros(plan.chunk, self.lanes, self.width, kind=torch.float64)

    def _load_packed(self, schedule: Schedule, packing: Packing, rounds: int) -> None:
        super()._load_packed(schedule, packing, rounds)
        # Weight of each packed slot in each lane's mean: zero for empty slots and for slots of other lanes.
        flat = schedule.weights.flatten(1).gather(1, packing.order)
        lane = packing.order // self.slots
        own = lane[:, None, :] == torch.arange(self.lanes, device=self.device)[None, :, None]
        self._shares[:rounds] = torch.where(own, flat[:, None, :], 0.0)

    def run(self, rounds: int) -> None:
        """Run the rounds one by one, without captured graphs."""
        self.counter.zero_()
        for _ in range(rounds):
            self._round()

    def evaluate(
        self, models: Tensor, rows: Tensor, firsts: Sequence[int], upload: object = None
    ) -> tuple[Tensor, Tensor]:
        """Return whether each of `rows` (lanes, samples) is classified correctly by its lane's model, and its loss."""
        real, chosen = rows >= 0, rows.clamp(min=0)
        scores = self.module.scores(models, self.samples[chosen])
        targets = self.encoded[chosen]
        hits = self.objective.hits(scores, targets) & real
        return hits.to(torch.int32), torch.where(real, self.objective.row_loss(scores, targets), 0.0)

    def _round(self) -> None:
        now = self.counter
        self._local_steps(self.training.steps)
        exact = self.history.index_select(0, now)[0].to(torch.float64)
        shares = self._shares.index_select(0, now)[0]
        local = self.params.to(torch.float64)
        mean = torch.where(shares.sum(dim=1, keepdim=True) > 0.0, shares @ local, exact)
        lane = self._order.index_select(0, now)[0] // self.slots
        away = torch.linalg.vector_norm(local.sub_(mean[lane]), dim=1)
        places = self._places.index_select(0, now)[0]
        self._end_round(exact, mean, torch.where(places >= 0, away[places.clamp(min=0)], 0.0))

    def _local_steps(self, steps: int) -> None:
        """Distribute the models and train them by the schedule of the round that `counter` selects."""
        theta = self.history.index_select(0, self.counter)[0]
        rows_of_steps = self._rows.index_select(0, self.counter)[0]
        self.params.copy_(theta[self._order.index_select(0, self.counter)[0] // self.slots])
        for step in range(steps):
            rows = rows_of_steps[step]
            real = (rows >= 0).to(self.params.dtype)
            shares = real / real.sum(dim=1, keepdim=True).clamp(min=1.0)
            chosen = rows.clamp(min=0)
            gradient = self.module.gradients(self.params, self.samples[chosen], self.encoded[chosen], shares)
            self.training.clip_gradient(gradient, dim=(1,))
            self.training.descend_in_place(self.params, gradient, self._velocity, step)
