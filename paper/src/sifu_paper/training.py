"""One round of FedAvg, by sifu's embedded engine where it does what an experiment needs, else by a plain loop.

The engine trains softmax regression. The plain loop also does what sifu leaves out: the paper's networks, clipped local
gradients as in the authors' code, clipped and noised updates (DP), and updates that are handed out (FedEraser).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional

from sifu.core.engine import Position
from sifu.data import ClientData
from sifu.engines.sim import SimulatedFederation, SimulationSettings
from sifu.engines.sim.local_training import LocalTraining
from sifu.engines.sim.models import ModuleModel
from sifu.engines.sim.networks import LinearScores
from sifu.errors import RoundRejectedError
from sifu.theory.participation import Participation, base_key, place_key
from sifu_paper.draws import keyed
from sifu_paper.federation import Federation
from sifu_paper.settings import Settings

Place = tuple[int, int]
"""Number of the request that a round belongs to (0: the first training), and of the round within it."""
ROWS_AT_ONCE = 2000


class DivergedError(Exception):
    """Training ended in NaN or Inf, usually because of its noise: that is a result."""


@dataclass(frozen=True)
class Round:
    """Result of a round: the new model, and the distance of each participant's model from their mean.

    `updates` are what the participants sent, where the trainer hands them out.
    """

    model: np.ndarray
    participants: np.ndarray
    drifts: np.ndarray
    updates: np.ndarray | None = None


class Trainer(Protocol):
    """Rounds and evaluations of one federation."""

    federation: Federation

    def round(self, model: np.ndarray, place: Place, participants: np.ndarray) -> Round:
        """Train the participants from a model, and average what they return."""
        ...

    def accuracy(self, model: np.ndarray, clients: np.ndarray) -> float:
        """Return the share of these clients' samples that a model classifies correctly."""
        ...


def draw(settings: Settings, seed: int, place: Place, active: np.ndarray) -> np.ndarray:
    """Return the participants of a round, as many as the settings say if there are so many."""
    key = place_key(base_key(seed, "participation"), *place)
    return Participation("fixed", count=settings.participants).draw(active, key)


def trainer_for(
    federation: Federation,
    settings: Settings,
    seed: int,
    device: str = "cpu",
    dp_noise: float = 0.0,
    *,
    hand_out: bool = False,
) -> Trainer:
    """Return the embedded engine if it can train this on this device, else the plain loop.

    `hand_out` asks for a trainer whose rounds hand out the participants' updates.
    """
    engine_can = settings.network == "softmax" and int(federation.samples.max()) <= settings.batch and device == "cpu"
    if engine_can and not (settings.clip or dp_noise or hand_out):
        return EmbeddedTrainer(federation, settings, seed)
    return PlainTrainer(federation, settings, seed, device, dp_noise)


class EmbeddedTrainer:
    """Rounds by sifu's embedded engine, of softmax regression on whole batches."""

    def __init__(self, federation: Federation, settings: Settings, seed: int) -> None:
        self.federation = federation
        clients = [
            ClientData(f"client-{number:03}", x, y)
            for number, (x, y) in enumerate(zip(federation.x, federation.y, strict=True))
        ]
        # A module, because the engine takes its own safe steps with a linear model, and the paper's rates are larger.
        model = ModuleModel(partial(LinearScores, federation.network.shape[0], federation.network.classes))
        training = LocalTraining(settings.rate, settings.steps, momentum=settings.momentum)
        self._engine = SimulatedFederation(clients, model, training, SimulationSettings(dtype="float32", seed=seed))

    def round(self, model: np.ndarray, place: Place, participants: np.ndarray) -> Round:
        """Run a round in which everyone of `participants` takes part."""
        try:
            result = self._engine.run_round(model, Position(*place), participants)
        except RoundRejectedError as error:
            raise DivergedError(str(error)) from error
        return Round(np.asarray(result.model), result.participants, result.drifts)

    def accuracy(self, model: np.ndarray, clients: np.ndarray) -> float:
        """Return the accuracy on these clients' samples."""
        return float(self._engine.evaluate(model, clients).accuracy)


class PlainTrainer:
    """Rounds by a loop over local steps, all participants of a round at once.

    With g the gradient of a batch, clipped to norm `clip` if that is not 0, a step does v = momentum v + g and
    theta = theta - rate v, from v = 0 in every round. With `dp_noise` z, each update is clipped to norm C = `dp_clip`
    and gets Gaussian noise of standard deviation z C.
    """

    def __init__(
        self, federation: Federation, settings: Settings, seed: int, device: str = "cpu", dp_noise: float = 0.0
    ) -> None:
        self.federation, self._settings, self._seed, self._dp_noise = federation, settings, seed, dp_noise
        self._device, self._network = torch.device(device), federation.network
        self._x = torch.from_numpy(np.concatenate(federation.x)).to(self._device)
        self._y = torch.from_numpy(np.concatenate(federation.y)).to(self._device)
        self._first = np.cumsum(federation.samples) - federation.samples
        together = device != "cpu" or not self._network.convolutions  # on a CPU, one convolution at a time is faster
        one, places = grad(self._loss), (0, 0, 0, 0 if self._network.dropout else None)
        self._gradients = vmap(one, in_dims=places) if together else one_after_another(one)

    def round(self, model: np.ndarray, place: Place, participants: np.ndarray) -> Round:
        """Train the participants and average their models, weighted by samples."""
        if not participants.size:
            return Round(model, participants, np.zeros(0))
        updates = self.updates(model, place, participants, self._settings.steps)
        if self._dp_noise:
            updates = self._private(updates, place, participants)
        mean, drifts = average(updates, self.federation.samples[participants])
        new = (model + mean).astype(np.float32)
        if not np.isfinite(new).all():
            raise DivergedError(f"the model of round {place} has NaN or Inf")
        return Round(new, participants, drifts, updates)

    def updates(self, model: np.ndarray, place: Place, participants: np.ndarray, steps: int) -> np.ndarray:
        """Return how far each participant's model moves in `steps` local steps, one row each."""
        start = torch.from_numpy(model).to(self._device)
        sizes = np.minimum(self.federation.samples[participants], self._settings.batch)
        result = np.zeros((participants.size, model.size))
        for size in np.unique(sizes):
            here = np.flatnonzero(sizes == size)
            trained = self._train(start, place, participants[here], steps, int(size))
            result[here] = (trained.double() - start.double()).cpu().numpy()
        return result

    def accuracy(self, model: np.ndarray, clients: np.ndarray) -> float:
        """Return the accuracy on these clients' samples."""
        rows = np.concatenate([self._first[client] + np.arange(self.federation.samples[client]) for client in clients])
        right = 0
        vector = torch.from_numpy(model).to(self._device)
        for first in range(0, rows.size, ROWS_AT_ONCE):
            here = torch.from_numpy(rows[first : first + ROWS_AT_ONCE]).to(self._device)
            right += count_right(self.federation, vector, self._x[here], self._y[here])
        return right / rows.size

    def _loss(self, vector: Tensor, x: Tensor, y: Tensor, kept: Tensor | None) -> Tensor:
        return functional.cross_entropy(self._network.scores(vector, x, kept), y)

    def _train(self, start: Tensor, place: Place, clients: np.ndarray, steps: int, size: int) -> Tensor:
        """Return the models of clients whose batches have the same size."""
        settings = self._settings
        batches = np.stack([self._batches(place, int(client), steps, size) for client in clients])
        rows = torch.from_numpy(batches).to(self._device)
        masks = [
            self._network.keep_units(keyed(self._seed, "dropout", *place, int(client)), steps, size)
            for client in clients
        ]
        kept = torch.from_numpy(np.stack(masks)).to(self._device) if self._network.dropout else None  # type: ignore[arg-type]
        models = start.expand(clients.size, -1).clone()
        velocity = torch.zeros_like(models)
        for step in range(steps):
            batch = rows[:, step]
            gradient = self._gradients(models, self._x[batch], self._y[batch], None if kept is None else kept[:, step])
            if settings.clip:
                gradient = _clipped(gradient, settings.clip)
            velocity = settings.momentum * velocity + gradient
            models = models - settings.rate * velocity
        return models

    def _batches(self, place: Place, client: int, steps: int, size: int) -> np.ndarray:
        """Return the rows of each step: permutations of the client's samples, one after another, cut into batches."""
        generator, samples = keyed(self._seed, "batches", *place, client), int(self.federation.samples[client])
        passes = math.ceil(steps * size / samples)
        order = np.concatenate([generator.permutation(samples) for _ in range(passes)])
        rows: np.ndarray = self._first[client] + order[: steps * size].reshape(steps, size)
        return rows

    def _private(self, updates: np.ndarray, place: Place, participants: np.ndarray) -> np.ndarray:
        bound = self._settings.dp_clip
        lengths = np.linalg.norm(updates, axis=1, keepdims=True)
        noise = [
            keyed(self._seed, "training noise", *place, client).standard_normal(updates.shape[1])
            for client in participants.tolist()
        ]
        clipped: np.ndarray = updates * np.minimum(1.0, bound / np.maximum(lengths, 1e-300))
        return clipped + self._dp_noise * bound * np.stack(noise)


def one_after_another(gradient: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of stacked arguments that calls `gradient` for one client after another."""

    def stacked(models: Tensor, x: Tensor, y: Tensor, kept: Tensor | None) -> Tensor:
        masks = [None] * len(models) if kept is None else kept
        return torch.stack([gradient(*arguments) for arguments in zip(models, x, y, masks, strict=True)])

    return stacked


def average(updates: np.ndarray, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean of updates, weighted by samples, and the distance of each from it.

    >>> average(np.array([[0.0], [4.0]]), np.array([3, 1]))
    (array([1.]), array([1., 3.]))
    """
    mean = samples @ updates / samples.sum()
    return mean, np.linalg.norm(updates - mean, axis=1)


def count_right(federation: Federation, vector: Tensor, x: Tensor, y: Tensor) -> int:
    """Return the number of samples that a model classifies correctly."""
    with torch.no_grad():
        return int((federation.network.scores(vector, x).argmax(1) == y).sum())


def test_accuracy(federation: Federation, model: np.ndarray) -> float:
    """Return the accuracy on the test samples, which belong to no client."""
    return accuracy_on(federation, model, federation.x_test, federation.y_test)


def accuracy_on(federation: Federation, model: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
    """Return the accuracy on some samples."""
    right = 0
    for first in range(0, len(y), ROWS_AT_ONCE):
        here = slice(first, first + ROWS_AT_ONCE)
        right += count_right(federation, torch.from_numpy(model), torch.from_numpy(x[here]), torch.from_numpy(y[here]))
    return right / len(y)


def _clipped(gradients: Tensor, bound: float) -> Tensor:
    lengths = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
    return gradients * torch.clamp(bound / lengths.clamp_min(1e-30), max=1.0)
