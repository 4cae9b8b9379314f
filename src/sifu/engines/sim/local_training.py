"""Local training of a client: K steps of SGD, and the batches they use.

The samples of a step do not depend on the other participants of the round. A client processes a permutation of its n
samples in batches of b. The last batch of a permutation may be smaller; then a new permutation begins. The permutation
of epoch e is the stable order of

    scores(place_key(base_key(seed, "batches"), branch, round, client, e), 0..n-1)        (`sifu.theory.participation`),

so removing a client does not change the batches of other clients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from sifu.core.engine import Position
from sifu.core.round import keyed_generator
from sifu.errors import InputError
from sifu.theory.arrays import Booleans, Floats, Integers
from sifu.theory.participation import ClientIndices, base_key, place_key, scores


@dataclass(frozen=True)
class LocalTraining:
    """SGD as in `torch.optim.SGD`, with dampening 0 and the velocity reset each round.

    With eta = `rate`, rho = `momentum`, lambda = `weight_decay` and K = `steps`, step k does

        g = grad f(theta) + lambda theta,   v = rho v + g   (v = 0 before the first step),   theta = theta - eta v.

    Weight decay applies to every parameter, including the bias. `batch_size` None means all data of the client. For
    linear models `rate` is a limit, which may be infinite: each client takes its own safe step
    (docs/theory.md, section 5.8).
    """

    rate: float
    steps: int
    batch_size: int | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not self.rate > 0.0:
            raise InputError(f"the local rate must be a positive number, found {self.rate}")
        if not _whole(self.steps) or self.steps < 1:
            raise InputError(f"the number of local steps must be a whole number of at least 1, found {self.steps}")
        if self.batch_size is not None and (not _whole(self.batch_size) or self.batch_size < 1):
            raise InputError(
                f"the batch size must be a whole number of at least 1, or None for all data, found {self.batch_size}"
            )
        if not 0.0 <= self.momentum < 1.0:
            raise InputError(f"momentum must be at least 0 and below 1, found {self.momentum}")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0.0):
            raise InputError(f"weight decay must be a number of at least 0, found {self.weight_decay}")

    def smallest_batch(self, samples: Integers) -> Integers:
        """Return b_min of clients with `samples` samples: the size of the smallest batch that each can draw.

        >>> LocalTraining(rate=0.1, steps=5, batch_size=4).smallest_batch(np.array([10, 8, 3])).tolist()
        [2, 4, 3]
        """
        size = np.minimum(samples, self.batch_size or samples)
        return np.where(samples % size == 0, size, samples % size)

    def whole_batches(self, samples: int) -> bool:
        """Return whether a client with `samples` samples uses all of them in every step."""
        return self.batch_size is None or self.batch_size >= samples

    def descend(
        self, value: torch.Tensor, push: torch.Tensor, velocity: torch.Tensor | None, decay: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Take one step and return the new value and velocity, both multiplied by the rate.

        Args:
            value: The parameters before the step.
            push: Gradient of the loss times the client's rate, without weight decay.
            velocity: Velocity of the previous step, or None in the first step.
            decay: Weight decay times the client's rate, in a shape that broadcasts with the value.
        """
        if self.weight_decay:
            push = push + decay * value
        if not self.momentum:
            return value - push, None
        velocity = push if velocity is None else self.momentum * velocity + push
        return value - velocity, velocity


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class Batches:
    """Batches of many clients, with dimensions (steps, clients, positions in a batch).

    `rows` are sample indices, padded with 0; `counts` (steps, clients) are the batch sizes.
    """

    rows: Integers
    counts: Integers

    @property
    def real(self) -> Booleans:
        """Mask of the entries of `rows` that are samples, not padding."""
        return np.arange(self.rows.shape[2]) < self.counts[..., None]


def draw_batches(
    batch_size: int | None, samples: Integers, seed: int, position: Position, clients: ClientIndices, steps: int
) -> Batches:
    """Draw the batches of several clients in one round."""
    largest = int(samples.max())
    size = np.minimum(batch_size or largest, samples)
    in_epoch = -(-samples // size)
    epochs = -(-steps // int(in_epoch.min()))
    key = place_key(base_key(seed, "batches"), position.branch, position.round)
    keys = place_key(key, clients[:, None], np.arange(epochs))
    drawn = scores(keys[..., None], np.arange(largest))
    # Padding sorts after every sample: it has the largest possible score, and the sort is stable.
    drawn[np.broadcast_to(np.arange(largest) >= samples[:, None, None], drawn.shape)] = np.iinfo(np.uint64).max
    order = np.argsort(drawn, axis=2, kind="stable")
    order[size == samples] = np.arange(largest)  # a whole batch keeps the original order
    step = np.arange(steps)[:, None]
    epoch, first = step // in_epoch, step % in_epoch * size
    counts = np.minimum(size, samples - first)
    places = first[..., None] + np.arange(int(size.max()))
    rows = order[np.arange(clients.size)[:, None], epoch[..., None], np.minimum(places, largest - 1)]
    rows[np.arange(rows.shape[2]) >= counts[..., None]] = 0
    return Batches(rows, counts)


def batch_sequence(
    batch_size: int | None, samples: int, seed: int, position: Position, client: int, steps: int
) -> list[Integers]:
    """Return the batches of one client in one round; the arguments are those of `draw_batches`."""
    if batch_size is None or batch_size >= samples:
        return [np.arange(samples, dtype=np.int64)] * steps
    drawn = draw_batches(batch_size, np.array([samples]), seed, position, np.array([client]), steps)
    return [rows[0, :count] for rows, (count,) in zip(drawn.rows, drawn.counts, strict=True)]


@dataclass(frozen=True)
class TrainingPlan:
    """Parameters that all trainers need besides the clients' data.

    `samples` are |D_i|. `rates` are the clients' steps eta_i. `numbers` are the client indices that key batches and
    dropout. `outputs` is the number of outputs that the targets need.
    """

    samples: Integers
    rates: Floats
    numbers: Integers
    outputs: int
    training: LocalTraining
    dtype: str
    seed: int

    def batches(self, position: Position, client: int) -> list[Integers]:
        """Return the batches of a client's steps in one round."""
        training, samples, number = self.training, int(self.samples[client]), int(self.numbers[client])
        return batch_sequence(training.batch_size, samples, self.seed, position, number, training.steps)


def torch_seed(seed: int, purpose: str, *key: int) -> int:
    """Return a seed for torch's generator, derived from the run's seed, a purpose and a key."""
    return int(keyed_generator(seed, purpose, *key).integers(2**63))
