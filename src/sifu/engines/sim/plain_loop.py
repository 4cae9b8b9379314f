"""Plain loop: one client at a time, with torch's autograd and SGD.

The loop is slow, but short and easy to verify. It trains modules supplied by users, and is the reference against which
the faster implementations are tested.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from sifu.core.engine import Position
from sifu.core.layout import Vector
from sifu.core.round import Average
from sifu.data.forked import forked, in_this_process
from sifu.data.fresh_modules import Loss, fixed_generators, fresh_copy, fresh_loss
from sifu.data.shared_state import refuse_changed_state, shared_state
from sifu.engines.sim.client_updates import average_models
from sifu.engines.sim.embedded_clients import CheckedClient
from sifu.engines.sim.local_training import LocalTraining, TrainingPlan
from sifu.engines.sim.models import Model, ModuleModel, is_users, set_to_evaluate
from sifu.engines.sim.networks import KeyedDropout, dropout_key
from sifu.engines.sim.threads import few_threads
from sifu.errors import InputError
from sifu.theory.participation import ClientIndices

_EVALUATION_CHUNK = 4096
PROBED_SEPARATELY = 0.01
"""Offset of all parameters from their initial values at the start of trainings that are repeated and compared."""
COMPARED = 3
"""Number of clients whose training is repeated before the first round."""


class LoopTrainer:
    """Trainer and evaluator of one client at a time.

    A user's module and loss may keep state, so every client starts with a fresh copy of them (`fresh_copy`). On the
    CPU, each round and each evaluation also runs in a forked copy of this process (`forked`), which leaves no state for
    the next one. In addition, local training is repeated, and its results must not change. Before the first round, a
    few clients are compared: they train, one of them trains on other data, and all train again in reverse order. After
    every round, the first client of the round and the first compared client train again.
    """

    forks = True
    """True if users' modules run in forked processes, which is impossible on a GPU."""

    def __init__(self, model: Model, clients: Sequence[CheckedClient], plan: TrainingPlan, device: str = "cpu") -> None:
        self._model, self._plan, self._training = model, plan, plan.training
        self._device = torch.device(device)
        self._data = self._put_samples(clients)
        self._pristine = model.build(plan.dtype).to(self._device)
        """Module as the model made it; it is copied but never run."""
        users = is_users(model)
        self._reused = None if users else fresh_copy(self._pristine)
        self._users = (model.custom_loss,) if isinstance(model, ModuleModel) and model.custom_loss else ()
        """A tuple with the user's own loss, or an empty tuple if there is none."""
        self._run = forked if users and self.forks else in_this_process
        """Function that runs an iterator and yields its items: `forked` for a user's module on the CPU."""
        self._shared = shared_state(self._pristine, *self._users) if users and not self.forks else None
        """Digests of variables that all copies of a user's module share and must not change, or None if not checked."""
        self._compared: dict[int, Tensor] = {}
        """First training result of some clients, starting from `_compared_from`."""
        (self._score_width,) = self._run(partial(self._try_forward, clients[0], plan.outputs))
        """Number of scores that the module gives for a sample."""

    def _put_samples(self, clients: Sequence[CheckedClient]) -> list[tuple[Tensor, Tensor]]:
        """Return each client's samples and targets on the device."""
        pairs = ((torch.tensor(client.x), torch.tensor(client.y)) for client in clients)
        return [(x.to(self._device), y.to(self._device)) for x, y in pairs]

    def average(
        self, start: Vector, position: Position, participants: ClientIndices, samples: np.ndarray, want_gram: bool
    ) -> Average:
        """Train the participants and average their models."""
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
        """Yield (place among the participants, model as one row) of each participant after `steps` local steps."""
        self.check_repeats(participants)
        rows = self._run(partial(self._train_in_order, start, position, participants.tolist(), steps))
        for place, trained in enumerate(rows):
            yield slice(place, place + 1), torch.from_numpy(trained)

    def _train_in_order(
        self, start: Vector, position: Position, clients: Sequence[int], steps: int
    ) -> Iterator[NDArray[np.floating]]:
        """Yield each client's model as a matrix of one row. For a user's module, then repeat trainings and compare."""
        first = None
        for client in clients:
            with few_threads(start.size):
                trained = self._train_client(start, position, client, steps)
            first = trained.clone() if first is None else first
            yield trained[None, :].cpu().numpy()
        if first is not None and self._reused is None:
            with few_threads(start.size):
                refuse_another_result(first, self._train_client(start, position, clients[0], steps))
            self._compare_again(list(self._compared)[:1])

    def check_repeats(self, clients: ClientIndices | None = None) -> None:
        """Refuse a user's module whose local training gives a different result when it is repeated.

        Up to `COMPARED` of `clients`, or of all clients, train. The first of them then trains on other labels, and all
        of them train again in reverse order.
        """
        if self._reused is not None or self._compared or (clients is not None and not len(clients)):
            return
        samples = self._plan.samples
        chosen = np.arange(len(samples)) if clients is None else np.asarray(clients)
        # Some layers need more than one sample; otherwise prefer small clients, which train fast.
        order = sorted(chosen.tolist(), key=lambda client: (samples[client] < 2, samples[client]))[:COMPARED]
        (self._compared,) = self._run(partial(self._train_repeatedly, order))

    def _train_repeatedly(self, order: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Yield the training results of some clients, after repeating the training and comparing the results."""
        self._compared = {client: self._train_to_compare(client) for client in order}
        self._train_on_other_labels(order[0])
        self._compare_again(order[::-1])
        yield self._compared

    def _compare_again(self, clients: Sequence[int]) -> None:
        if self._shared is not None:
            refuse_changed_state(self._shared, self._pristine, *self._users)
        for client in clients:
            refuse_another_result(self._compared[client], self._train_to_compare(client))

    def _compared_from(self) -> Vector:
        """Return the initial parameters plus an offset: a last layer of zeros would hide differences."""
        # reshape, because parameters on a GPU may be stored with channels last
        parts = [parameter.detach().reshape(-1) for parameter in self._pristine.parameters()]
        first: Vector = torch.cat(parts).cpu().numpy()
        return first + np.asarray(PROBED_SEPARATELY, dtype=first.dtype)

    def _train_to_compare(self, client: int, data: tuple[Tensor, Tensor] | None = None) -> Tensor:
        start = self._compared_from()
        with few_threads(start.size):
            return self._train_client(start, Position(0, 0), client, self._training.steps, data)

    def _train_on_other_labels(self, client: int) -> None:
        """Train a client on its samples in reverse order with other targets, which give larger gradients."""
        x, y = self._data[client]
        other = y.flip(0) if y.is_floating_point() else (y + 1) % max(2, self._plan.outputs)
        self._train_to_compare(client, (x.flip(0), other))

    def _train_client(
        self,
        start: Vector,
        position: Position,
        client: int,
        steps: int,
        data: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Return the client's model after `steps` local steps on its data, or on `data` if given."""
        x, y = self._data[client] if data is None else data
        training, module, loss = self._training, self._module_at(start), self._loss()
        module.train()
        dropouts = [part for part in module.modules() if isinstance(part, KeyedDropout)]
        optimizer = torch.optim.SGD(
            module.parameters(),
            lr=training.rate,
            momentum=training.momentum,
            nesterov=training.nesterov,
            weight_decay=training.weight_decay,
        )
        whole, plan = training.whole_batches(x.shape[0]), self._plan
        with fixed_generators(plan.layer_seed(position, client), self._device):
            for step, batch in enumerate(plan.batches(position, client, steps)):
                for layer, dropout in enumerate(dropouts):
                    dropout.key = int(dropout_key(plan.seed, position, int(plan.numbers[client]), step, layer))
                optimizer.zero_grad()
                inputs, targets = (x, y) if whole else (x[batch], y[batch])
                if whole and self._reused is None:  # a user's module may change its input
                    inputs, targets = x.clone(), y.clone()
                loss(module(inputs), targets).backward()  # type: ignore[no-untyped-call]
                if training.clip:
                    _clip(list(module.parameters()), training)
                optimizer.step()
        return parameters_to_vector(module.parameters()).detach().clone()

    def evaluate(self, model: Vector, clients: ClientIndices) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of correct predictions and the summed loss of each client."""
        (found,) = self.evaluate_several([model], clients)
        return found

    def evaluate_several(
        self, models: Iterable[Vector], clients: ClientIndices
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the result of `evaluate` for each model; a user's module on the CPU runs in one forked process."""
        return self._run(lambda: (self._evaluate_in_order(model, clients) for model in models))

    def _evaluate_in_order(self, model: Vector, clients: ClientIndices) -> tuple[np.ndarray, np.ndarray]:
        objective, correct = self._model.objective, np.zeros(len(clients), dtype=np.int64)
        loss_sum = np.zeros(len(clients))
        for place, client in enumerate(clients):
            x, y = self._data[int(client)]
            if place == 0 or self._reused is None:
                module, loss = self._module_at(model), self._loss()
                set_to_evaluate(module)
            with torch.no_grad(), fixed_generators(self._plan.seed % 2**63, self._device), few_threads(model.size):
                for rows in torch.split(torch.arange(x.shape[0]), _EVALUATION_CHUNK):
                    scores = module(x[rows])
                    loss_sum[place] += float(loss(scores, y[rows])) * len(rows)
                    if objective.labels:
                        flat = scores.reshape(scores.shape[0], -1)
                        encoded = objective.encode(y[rows], flat.shape[1], flat.dtype)
                        correct[place] += int(objective.hits(flat, encoded).sum())
        return correct, loss_sum

    def _module_at(self, model: Vector) -> nn.Module:
        """Return a module with a copy of the parameters `model` and the initial buffers; users' modules are copied."""
        module = fresh_copy(self._pristine) if self._reused is None else self._reused
        vector_to_parameters(torch.tensor(model, device=self._device), module.parameters())
        if self._reused is not None:
            with torch.no_grad():
                for buffer, initial in zip(module.buffers(), self._pristine.buffers(), strict=True):
                    buffer.copy_(initial)
        return module

    def _loss(self) -> Loss:
        """Return the loss; a user's own loss is copied."""
        return fresh_loss(self._users[0]) if self._users else self._model.loss

    @contextmanager
    def _settings(self) -> Iterator[None]:
        """Set the device's options inside the `with` block; this class sets none."""
        yield

    def _first_batch(self) -> tuple[Tensor, Tensor]:
        """Return copies of up to two samples of the first client and their targets, for a trial.

        A module may change its input in place, and changed data would depend on which client is the first.
        """
        x, y = self._data[0]
        return x[:2].clone(), y[:2].clone()

    def _try_forward(self, client: CheckedClient, outputs: int) -> Iterator[int]:
        """Yield the number of scores per sample; refuse a module that cannot process the clients' samples."""
        x, y = self._first_batch()
        module = fresh_copy(self._pristine).eval()
        try:
            with torch.no_grad(), fixed_generators(0, self._device):
                with self._settings():
                    scores = module(x)
                if not isinstance(scores, Tensor):
                    raise InputError(
                        f"the model gives a {type(scores).__name__} for a batch of samples: its forward must return "
                        "only a tensor of scores, one row per sample"
                    )
                enough = scores.numel() // scores.shape[0] >= outputs
                if enough:
                    self._loss()(scores.to(x.dtype) if x.is_floating_point() else scores, y)
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise InputError(
                f"the model cannot take the samples of client {client.name!r} (shape {client.x.shape[1:]}, "
                f"targets of shape {client.y.shape}): {error}"
            ) from error
        if not enough:
            raise InputError(f"the model has outputs of shape {tuple(scores.shape[1:])}, {outputs} are needed")
        yield scores.shape[1] if scores.ndim > 1 else 1


def refuse_another_result(first: Tensor, again: Tensor) -> None:
    """Refuse a module whose local training gave different bits when it was repeated."""
    if torch.allclose(first, again, rtol=0.0, atol=0.0, equal_nan=True):
        return
    away = float((first - again).abs().max())
    raise InputError(
        f"repeating a client's local training gave different parameters (up to {away:.3g} away): the model keeps "
        "state between clients, or draws random numbers outside the generators of torch, numpy and Python"
        + (", or the GPU sums in another order (then use --device cpu)" if first.is_cuda else "")
        + ". State of a client would remain after the client is forgotten: keep state in the module itself, which "
        "every client starts from afresh"
    )


def _clip(parameters: Sequence[Tensor], training: LocalTraining) -> None:
    """Scale the gradient of all parameters together to a norm of at most `training.clip`."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([part.flatten() for part in gradients])
    factor = training.clip_factor(torch.linalg.vector_norm(flat, dtype=torch.float64))
    for part in gradients:
        part.mul_(factor.to(part.dtype))
