"""The plain loop: one client after the other, torch's autograd and torch's own SGD.

Slow, short, and obviously right: it is what any module that a user brings is trained by, and the oracle that the
faster paths are tested against.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from sifu.core.engine import Position
from sifu.core.layout import Vector
from sifu.core.round import Average
from sifu.engines.sim.client_updates import average_models
from sifu.engines.sim.embedded_clients import CheckedClient
from sifu.engines.sim.local_training import LocalTraining, TrainingPlan
from sifu.engines.sim.models import Model, ModuleModel, set_to_evaluate
from sifu.engines.sim.networks import KeyedDropout, dropout_key
from sifu.engines.sim.threads import few_threads
from sifu.errors import InputError
from sifu.theory.facts import MADE_BY_OPERATOR
from sifu.theory.participation import ClientIndices

_EVALUATION_CHUNK = 4096
PROBED_APART = 0.01
"""How far from its first parameters a module is probed."""


class LoopTrainer:
    """Trains and evaluates clients one by one in a single module that is reset for each of them."""

    def __init__(self, model: Model, clients: Sequence[CheckedClient], plan: TrainingPlan, device: str = "cpu") -> None:
        self._model, self._plan, self._training = model, plan, plan.training
        self._device = torch.device(device)
        self._data = self._put_samples(clients)
        self._module = model.build(plan.dtype).to(self._device)
        self._dropouts = [part for part in self._module.modules() if isinstance(part, KeyedDropout)]
        self._buffers = [buffer.clone() for buffer in self._module.buffers()]
        self._try_forward(clients[0], plan.outputs)
        self._may_remember = isinstance(model, ModuleModel) and model.initial_source == MADE_BY_OPERATOR
        if self._may_remember:
            # Not a last layer of zeros, under which nothing shows.
            self._probed_with = parameters_to_vector(self._module.parameters()).detach().cpu() + PROBED_APART
            self._first_probe = self._probe()
            self._check_memory()

    def _put_samples(self, clients: Sequence[CheckedClient]) -> list[tuple[Tensor, Tensor]]:
        """Each client's samples and targets, on the device."""
        pairs = ((torch.tensor(client.x), torch.tensor(client.y)) for client in clients)
        return [(x.to(self._device), y.to(self._device)) for x, y in pairs]

    def average(
        self, start: Vector, position: Position, participants: ClientIndices, samples: np.ndarray, want_gram: bool
    ) -> Average:
        """Train and average the participants."""
        return average_models(
            lambda: self.train(start, position, participants, self._training.steps),
            start.astype(np.float64),
            samples,
            start.itemsize,
            want_gram,
        )

    def train(
        self, start: Vector, position: Position, participants: ClientIndices, steps: int
    ) -> Iterator[tuple[slice, Tensor]]:
        """The local models after `steps` steps, client by client: (place among the participants, rows of models)."""
        for place, client in enumerate(participants):
            with few_threads(start.size):
                trained = self._train_client(start, position, int(client), steps)
            yield slice(place, place + 1), trained[None, :].cpu()
        if self._may_remember:
            self._check_memory()

    def _train_client(self, start: Vector, position: Position, client: int, steps: int) -> Tensor:
        x, y = self._data[client]
        training, module = self._training, self._module
        self._reset(start)
        module.train()
        optimizer = torch.optim.SGD(
            module.parameters(),
            lr=training.rate,
            momentum=training.momentum,
            nesterov=training.nesterov,
            weight_decay=training.weight_decay,
        )
        whole, plan = training.whole_batches(x.shape[0]), self._plan
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(plan.layer_seed(position, client))
            for step, batch in enumerate(plan.batches(position, client, steps)):
                for layer, dropout in enumerate(self._dropouts):
                    dropout.key = int(dropout_key(plan.seed, position, int(plan.numbers[client]), step, layer))
                optimizer.zero_grad()
                scores = module(x if whole else x[batch])
                self._model.loss(scores, y if whole else y[batch]).backward()  # type: ignore[no-untyped-call]
                if training.clip:
                    _clip(list(module.parameters()), training)
                optimizer.step()
        return parameters_to_vector(module.parameters()).detach().clone()

    def evaluate(self, model: Vector, clients: ClientIndices) -> tuple[np.ndarray, np.ndarray]:
        """Correct predictions and sum of losses of each client."""
        self._reset(model)
        set_to_evaluate(self._module)
        objective, correct = self._model.objective, np.zeros(len(clients), dtype=np.int64)
        loss_sum = np.zeros(len(clients))
        with torch.no_grad(), torch.random.fork_rng(devices=[]), few_threads(model.size):
            torch.manual_seed(self._plan.seed % 2**63)
            for place, client in enumerate(clients):
                x, y = self._data[int(client)]
                for rows in torch.split(torch.arange(x.shape[0]), _EVALUATION_CHUNK):
                    scores = self._module(x[rows])
                    loss_sum[place] += float(self._model.loss(scores, y[rows])) * len(rows)
                    if objective.labels:
                        flat = scores.reshape(scores.shape[0], -1)
                        encoded = objective.encode(y[rows], flat.shape[1], flat.dtype)
                        correct[place] += int(objective.hits(flat, encoded).sum())
        return correct, loss_sum

    def _reset(self, model: Vector) -> None:
        """Load a copy of `model` and the initial buffers."""
        vector_to_parameters(torch.tensor(model, device=self._device), self._module.parameters())
        with torch.no_grad():
            for buffer, initial in zip(self._module.buffers(), self._buffers, strict=True):
                buffer.copy_(initial)

    def _probe(self) -> Tensor | None:
        """Outputs and loss of two samples in training, near the parameters the module was made with."""
        (x, y), module = self._data[0], self._module
        self._reset(self._probed_with.numpy())
        module.train()
        for dropout in self._dropouts:
            dropout.key = 0
        with torch.no_grad(), torch.random.fork_rng(devices=[]), few_threads(self._probed_with.numel()):
            torch.manual_seed(0)
            try:
                scores = module(x[:2])
            except ValueError:  # batch normalisation of a single sample
                return None
            return torch.cat([scores.flatten(), self._model.loss(scores, y[:2]).reshape(1).to(scores.dtype)])

    def _check_memory(self) -> None:
        """Refuse a module that carries something from one client to the next: no one could be forgotten by it."""
        refuse_other_outputs(self._first_probe, self._probe())

    def _try_forward(self, client: CheckedClient, outputs: int) -> None:
        """Refuse a module that cannot take the clients' samples before any round has begun."""
        x, y = self._data[0]
        self._module.eval()
        try:
            with torch.no_grad():
                scores = self._module(x[:2])
                if not isinstance(scores, Tensor):
                    raise InputError(
                        f"the model gives a {type(scores).__name__} for a batch of samples: its forward must return a "
                        "tensor of scores alone, one row a sample"
                    )
                enough = scores.numel() // scores.shape[0] >= outputs
                if enough:
                    self._model.loss(scores, y[:2])
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise InputError(
                f"the model cannot take the samples of client {client.name!r} (shape {client.x.shape[1:]}, "
                f"targets of shape {client.y.shape}): {error}"
            ) from error
        if not enough:
            raise InputError(f"the model has outputs of shape {tuple(scores.shape[1:])}, {outputs} are needed")


def refuse_other_outputs(first: Tensor | None, now: Tensor | None) -> None:
    """A sentence where a module gives other outputs than at first for the same samples and parameters."""
    if first is not None and now is not None and not torch.allclose(first, now, rtol=0.0, atol=0.0, equal_nan=True):
        raise InputError(
            "the model gives other outputs than before for the same samples and parameters: it remembers samples, "
            "or draws at random outside torch's generator. What it remembers of a client would stay when the "
            "client is forgotten: keep state in parameters and buffers alone, which every client begins with anew"
        )


def _clip(parameters: Sequence[Tensor], training: LocalTraining) -> None:
    """Scale the gradient of all parameters together to a norm of at most `training.clip`."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([part.flatten() for part in gradients])
    factor = training.clip_factor(torch.linalg.vector_norm(flat, dtype=torch.float64))
    for part in gradients:
        part.mul_(factor.to(part.dtype))
