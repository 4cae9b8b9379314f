"""Local training of several participants at once on a device, each in a branch of one captured graph.

Every branch has a stream, a flat copy of the model whose views are the parameters of a module of its own, and a flat
velocity. A batch has the size of the plan; for whole data it has the client's number of samples, rounded up to a power
of two. Missing rows repeat the client's first sample with weight zero. Kernels follow from shapes alone: nothing is
tuned, and an allocation that fails is an error, never another algorithm. A client's model therefore depends on its own
samples, the model it started from and the plan, not on the other branches.

A graph has at most `BRANCHES` branches and `STEPS` steps; more participants or steps are further replays. On a CPU the
same functions run without a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from sifu.data.own_modules import fresh_copy, is_known
from sifu.engines.sim.gpu.device_queue import capture
from sifu.engines.sim.local_training import LocalTraining
from sifu.engines.sim.models import LinearModel, Model, ModuleModel, flat_state

BRANCHES = 16
"""Maximum number of branches of a graph."""
STEPS = 10
"""Maximum number of steps of a graph."""
FILLED = 32
"""Smallest batch of a client's whole data, in rows."""
CHUNK = 128
"""Number of rows that a branch evaluates at a time; they belong to one client, and missing rows do not count."""
ALIGNMENT = 64
"""Multiple of parameters to which the vectors of branches are padded."""
LAYERS = (
    nn.Sequential, nn.Flatten, nn.Identity, nn.Linear, nn.Conv1d, nn.Conv2d, nn.Embedding, nn.LayerNorm, nn.GroupNorm,
    nn.MaxPool2d, nn.AvgPool2d, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU,
)  # fmt: skip
"""Layers of torch that compute the same operations for all samples, without random numbers or statistics of a batch."""


def is_captured(model: Model) -> bool:
    """Return whether training of a model is captured: linear models, and networks of sifu's own parts and `LAYERS`.

    >>> is_captured(LinearModel("softmax", 4, 3)), is_captured(ModuleModel(lambda: nn.Sequential(nn.Linear(4, 3))))
    (True, True)
    >>> is_captured(ModuleModel(lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))))
    False
    """
    if type(model) is LinearModel:
        return True
    if type(model) is not ModuleModel or model.custom_loss is not None:
        return False
    module = model.build("float32")
    parts = list(module.modules())
    draws = any(isinstance(part, _DropoutNd) and part.p > 0 for part in parts)
    trains = all(parameter.requires_grad for parameter in module.parameters())
    plain = all(type(part) in LAYERS or type(part).__module__.startswith("sifu.") for part in parts)
    return plain and trains and not draws and is_known(module)


class Branches:
    """Branches of a device that train and evaluate a model on rows of `samples` with `encoded` targets."""

    def __init__(
        self, model: Model, dtype: str, training: LocalTraining, samples: Tensor, encoded: Tensor, count: int
    ) -> None:
        self._training, self._objective = training, model.objective
        self._samples, self._encoded, self._device = samples, encoded, samples.device
        pristine = model.build(dtype).to(self._device)
        self._evaluated, count = flat_state(pristine), max(1, min(count, BRANCHES))
        size = self._evaluated.numel()
        # Libraries choose kernels by the alignment of addresses too: the rows of all branches are aligned alike.
        room = self._evaluated.new_zeros((3, count, -(-size // ALIGNMENT) * ALIGNMENT))
        self._models, self._gradients, self._velocities = room[:, :, :size].unbind()
        self._models.copy_(self._evaluated)
        self._rates = self._evaluated.new_ones((count, 1))
        self._modules = [_viewing(pristine, row) for row in self._models]
        self._scorers = [_viewing(pristine, self._evaluated) for _ in range(count)]
        on_gpu = self._device.type == "cuda"
        self._streams = [torch.cuda.Stream(self._device) for _ in range(count)] if on_gpu else []  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle() if on_gpu else None
        self._trainings: dict[tuple[int, int], tuple[Callable[[], None], Tensor, Tensor]] = {}
        self._rows = torch.zeros((count, CHUNK), dtype=torch.int64, device=self._device)
        self._real = torch.zeros((count, CHUNK), dtype=torch.bool, device=self._device)
        self._hits = torch.zeros(count, dtype=torch.int64, device=self._device)
        self._losses = torch.zeros(count, dtype=torch.float64, device=self._device)
        self._evaluate: Callable[[], None] | None = None

    def train(self, starts: Sequence[Tensor], rates: Tensor, rows: Tensor, shares: Tensor, into: Tensor) -> None:
        """Train participants and write their models into `into` (participants, size).

        Args:
            starts: The model that each participant starts from.
            rates: Step of each participant.
            rows: Rows of each step's batch (participants, steps, batch).
            shares: Weight of each row in the mean loss of its batch, 0 for rows that fill the batch.
            into: Output.
        """
        count, steps = len(self._modules), rows.shape[1]
        parts = [slice(step, min(step + STEPS, steps)) for step in range(0, steps, STEPS)]
        works = [self._training_of(part.stop - part.start, rows.shape[2]) for part in parts]
        for first in range(0, len(starts), count):
            some = slice(first, min(first + count, len(starts)))
            here = some.stop - first
            torch.stack(list(starts[some]), out=self._models[:here])
            self._rates[:here, 0] = rates[some]
            self._velocities.zero_()
            for part, (work, own_rows, own_shares) in zip(parts, works, strict=True):
                own_rows[:here] = rows[some, part]
                own_shares[:here] = shares[some, part]
                work()
            into[some] = self._models[:here]

    def evaluate(self, model: Tensor, rows: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """Return the number of correct predictions and the summed loss of each chunk (chunks, `CHUNK`) of rows."""
        count = len(self._modules)
        if self._evaluate is None:
            self._evaluate = self._captured([lambda at=at: self._score(at) for at in range(count)])  # type: ignore[misc]
        self._evaluated.copy_(model)
        hits, losses = [], []
        for first in range(0, len(rows), count):
            here = min(count, len(rows) - first)
            self._rows[:here] = rows[first : first + here]
            self._real[:here] = real[first : first + here]
            self._evaluate()
            hits.append(self._hits[:here].clone())
            losses.append(self._losses[:here].clone())
        return torch.cat(hits), torch.cat(losses)

    def _training_of(self, steps: int, width: int) -> tuple[Callable[[], None], Tensor, Tensor]:
        """Return the work that trains all branches for some steps, and the buffers it reads: rows and shares."""
        if (steps, width) not in self._trainings:
            shape = (len(self._modules), steps, width)
            rows = torch.zeros(shape, dtype=torch.int64, device=self._device)
            shares = torch.zeros(shape, dtype=self._models.dtype, device=self._device)

            def train(branch: int) -> None:
                for step in range(steps):
                    self._step(branch, rows[branch, step], shares[branch, step])

            branches = range(len(self._modules))
            work = self._captured([lambda branch=branch: train(branch) for branch in branches])  # type: ignore[misc]
            self._trainings[steps, width] = work, rows, shares
        return self._trainings[steps, width]

    def _step(self, branch: int, rows: Tensor, shares: Tensor) -> None:
        module, gradient = self._modules[branch], self._gradients[branch]
        scores = module(self._samples.index_select(0, rows)).flatten(1)
        encoded = self._encoded.index_select(0, rows)
        residual = self._objective.residual(scores.detach(), encoded, dim=1).mul_(shares[:, None])
        parts = torch.autograd.grad(scores, list(module.parameters()), residual)
        with torch.no_grad():
            torch.cat([part.reshape(-1) for part in parts], out=gradient)
            if self._training.weight_decay:
                gradient.add_(self._models[branch], alpha=self._training.weight_decay)
            if self._training.momentum:
                gradient = self._velocities[branch].mul_(self._training.momentum).add_(gradient)
            self._models[branch].addcmul_(gradient, self._rates[branch], value=-1.0)

    def _score(self, branch: int) -> None:
        rows, real = self._rows[branch], self._real[branch]
        with torch.no_grad():
            scores = self._scorers[branch](self._samples.index_select(0, rows)).flatten(1)
            encoded = self._encoded.index_select(0, rows)
            self._hits[branch] = (self._objective.hits(scores, encoded) & real).sum()
            losses = self._objective.row_loss(scores, encoded)
            self._losses[branch] = losses.masked_fill(~real, 0.0).sum(dtype=torch.float64)

    def _captured(self, branches: Sequence[Callable[[], None]]) -> Callable[[], None]:
        """Return a function that runs all branches in parallel: as a graph on a GPU, one by one on a CPU."""

        def work() -> None:
            if not self._streams:
                for branch in branches:
                    branch()
                return
            here = torch.cuda.current_stream(self._device)
            begun = here.record_event()
            for stream, branch in zip(self._streams, branches, strict=True):
                stream.wait_event(begun)
                with torch.cuda.stream(stream):
                    branch()
            for stream in self._streams:
                here.wait_stream(stream)

        return capture(self._device, work, pool=self._pool).replay if self._streams else work


def _viewing(pristine: nn.Module, flat: Tensor) -> nn.Module:
    """Return a copy of a module whose parameters are views of a flat vector."""
    module = fresh_copy(pristine).train()
    parameters = list(module.parameters())
    parts = flat.split([parameter.numel() for parameter in parameters])  # type: ignore[no-untyped-call]
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part.view(parameter.shape)
    return module
