"""Plain loop: one client at a time, with torch's autograd and SGD.

The loop is slow, but short and easy to verify. It trains modules supplied by users, and is the reference against which
the faster implementations are tested.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from sifu.core.engine import Position
from sifu.core.layout import Vector
from sifu.core.round import Average
from sifu.data.own_modules import Loss, fixed_generators, fresh_copy
from sifu.engines.sim.client_updates import average_models
from sifu.engines.sim.embedded_clients import CheckedClient
from sifu.engines.sim.local_training import TrainingPlan, torch_seed
from sifu.engines.sim.models import Model, flat_state, load_state, train_mode
from sifu.engines.sim.networks import KeyedDropout, dropout_key
from sifu.engines.sim.threads import few_threads
from sifu.errors import InputError
from sifu.theory.arrays import Integers
from sifu.theory.participation import ClientIndices

_EVALUATION_CHUNK = 4096


class LoopTrainer:
    """Trainer and evaluator of one client at a time.

    Every client trains in a deep copy of the module and the loss, with seeded generators. Before its first round, the
    trainer trains one client twice, with another training in between, and the two results must be equal.
    """

    def __init__(self, model: Model, clients: Sequence[CheckedClient], plan: TrainingPlan, device: str = "cpu") -> None:
        self._model, self._plan, self._training = model, plan, plan.training
        self._device = torch.device(device)
        self._data = [
            (torch.tensor(client.x, device=device), torch.tensor(client.y, device=device)) for client in clients
        ]
        self._pristine = model.build(plan.dtype).to(device)
        """Module as the model made it; only copies of it are run."""
        self._repeats = False
        """True once a repeated training gave equal bits."""
        self._try_forward(clients[0], plan.outputs)

    def average(self, start: Vector, position: Position, participants: ClientIndices, samples: np.ndarray) -> Average:
        """Train the participants and average their models."""
        return average_models(
            lambda: self.train(start, position, participants),
            start.astype(np.float64),
            samples,
            start.itemsize,
        )

    def train(self, start: Vector, position: Position, participants: ClientIndices) -> Iterator[tuple[slice, Tensor]]:
        """Yield (place among the participants, model as one row) of each participant after its local training."""
        if len(participants) and not self._repeats:
            self._check_repeats(start, position, participants.tolist())
        for place, client in enumerate(participants.tolist()):
            with few_threads(start.size):
                trained = self._train_client(start, position, client)
            yield slice(place, place + 1), trained[None, :].cpu()

    def _check_repeats(self, start: Vector, position: Position, clients: list[int]) -> None:
        """Train one client twice, with another one (or half of its own samples) in between; refuse other bits."""
        samples = self._plan.samples
        # Some layers need more than one sample; otherwise prefer small clients, which train fast.
        client, *others = sorted(clients, key=lambda client: (samples[client] < 2, samples[client]))
        x, y = self._data[client]
        half = slice(None, (len(x) + 1) // 2)
        with few_threads(start.size):
            first = self._train_client(start, position, client)
            if others:
                self._train_client(start, position, others[0])
            else:
                batches = [np.arange(len(x[half]))] * self._training.steps
                self._train_on(x[half], y[half], start, position, client, batches)
            again = self._train_client(start, position, client)
        if not torch.allclose(first, again, rtol=0.0, atol=0.0, equal_nan=True):
            raise InputError(
                "repeating a client's local training gave different parameters (up to "
                f"{float((first - again).abs().max()):.3g} away): the model keeps state between clients, or draws "
                "random numbers outside the generators of torch, numpy and Python. Keep state in attributes of the "
                "module, of which every client has its own copy"
            )
        self._repeats = True

    def _train_client(self, start: Vector, position: Position, client: int) -> Tensor:
        """Return the client's model after its local steps."""
        return self._train_on(*self._data[client], start, position, client, self._plan.batches(position, client))

    def _train_on(
        self, x: Tensor, y: Tensor, start: Vector, position: Position, client: int, batches: Sequence[Integers]
    ) -> Tensor:
        """Return the model after one local step on each of these batches of rows."""
        training, plan = self._training, self._plan
        module, loss = self._copies_at(start)
        train_mode(module)
        dropouts = [part for part in module.modules() if isinstance(part, KeyedDropout)]
        optimizer = torch.optim.SGD(
            module.parameters(),
            lr=float(plan.rates[client]),
            momentum=training.momentum,
            weight_decay=training.weight_decay,
        )
        key = position.branch, position.round, int(plan.numbers[client])
        with fixed_generators(torch_seed(plan.seed, "layers", *key), self._device):  # so that random layers repeat
            for step, rows in enumerate(batches):
                for layer, dropout in enumerate(dropouts):
                    dropout.key = int(dropout_key(plan.seed, position, int(plan.numbers[client]), step, layer))
                optimizer.zero_grad()
                loss(module(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        return flat_state(module)

    def evaluate(self, model: Vector, clients: ClientIndices) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of correct predictions and the summed loss of each client."""
        objective, correct = self._model.objective, np.zeros(len(clients), dtype=np.int64)
        loss_sum = np.zeros(len(clients))
        module, loss = self._copies_at(model)
        module.eval()
        for place, client in enumerate(clients):
            x, y = self._data[int(client)]
            with torch.no_grad(), fixed_generators(self._plan.seed % 2**63, self._device), few_threads(model.size):
                for rows in torch.split(torch.arange(x.shape[0]), _EVALUATION_CHUNK):
                    scores = module(x[rows])
                    loss_sum[place] += float(loss(scores, y[rows])) * len(rows)
                    if objective.labels:
                        flat = scores.reshape(scores.shape[0], -1)
                        encoded = objective.encode(y[rows], flat.shape[1], flat.dtype)
                        correct[place] += int(objective.hits(flat, encoded).sum())
        return correct, loss_sum

    def _copies_at(self, model: Vector) -> tuple[nn.Module, Loss]:
        """Return copies of the module, with the parameters and buffers `model`, and of the loss."""
        module, loss = fresh_copy((self._pristine, self._model.loss))
        load_state(module, torch.tensor(model, device=self._device))
        return module, loss

    def _try_forward(self, client: CheckedClient, outputs: int) -> None:
        """Refuse a module that cannot process the clients' samples."""
        x, y = self._data[0][0][:2].clone(), self._data[0][1][:2].clone()  # a module may change its input
        module, loss = fresh_copy((self._pristine, self._model.loss))
        try:
            with torch.no_grad(), fixed_generators(0, self._device):
                scores = module.eval()(x)
                if not isinstance(scores, Tensor):
                    raise InputError(
                        f"the model gives a {type(scores).__name__} for a batch of samples: its forward must return "
                        "only a tensor of scores, one row per sample"
                    )
                enough = scores.numel() // scores.shape[0] >= outputs
                if enough:
                    loss(scores, y)
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise InputError(
                f"the model cannot take the samples of client {client.name!r} (shape {client.x.shape[1:]}, "
                f"targets of shape {client.y.shape}): {error}"
            ) from error
        if not enough:
            raise InputError(f"the model has outputs of shape {tuple(scores.shape[1:])}, {outputs} are needed")
