"""Which samples each local step looks at, independent of who else takes part in the round.

A client walks through a permutation of its n samples in batches of b; the last batch of a permutation may be
smaller, and a new one begins when one is used up. The permutation of epoch e is the stable order of

    scores(place_key(base_key(seed, "batches"), branch, round, client, e), 0..n-1)        (`sifu.theory.draws`),

keyed by nothing else: taking a client out leaves everyone else's batches as they were.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sifu.core.engine import Position
from sifu.engines.sim.local_training import LocalTraining
from sifu.theory.arrays import Booleans, Integers
from sifu.theory.draws import base_key, place_key, scores
from sifu.theory.participation import ClientIndices

SampleIndices = Integers


@dataclass(frozen=True)
class Batches:
    """The batches of many clients: K steps, clients, places of a batch.

    `rows` are sample indices, 0 beyond the end of a batch; `counts` are the sizes (K, clients).
    """

    rows: SampleIndices
    counts: SampleIndices

    @property
    def real(self) -> Booleans:
        """Which places of `rows` are samples and not padding."""
        return np.arange(self.rows.shape[2]) < self.counts[..., None]


def draw_batches(
    training: LocalTraining,
    samples: Integers,
    seed: int,
    position: Position,
    clients: ClientIndices,
    steps: int | None = None,
) -> Batches:
    """The K batches (or the first `steps`) of each of `clients` with `samples` samples in one round."""
    steps = training.steps if steps is None else steps
    largest = int(samples.max())
    size = np.minimum(training.batch_size or largest, samples)
    in_epoch = -(-samples // size)
    epochs = -(-steps // int(in_epoch.min()))
    key = place_key(base_key(seed, "batches"), position.branch, position.round)
    keys = place_key(key, clients[:, None], np.arange(epochs))
    drawn = scores(keys[..., None], np.arange(largest))
    # Padding sorts behind every sample: no score is larger, and the sort is stable.
    drawn[np.broadcast_to(np.arange(largest) >= samples[:, None, None], drawn.shape)] = np.iinfo(np.uint64).max
    order = np.argsort(drawn, axis=2, kind="stable")
    order[size == samples] = np.arange(largest)  # a whole batch is taken as it lies
    step = np.arange(steps)[:, None]
    epoch, first = step // in_epoch, step % in_epoch * size
    counts = np.minimum(size, samples - first)
    places = first[..., None] + np.arange(int(size.max()))
    rows = order[np.arange(clients.size)[:, None], epoch[..., None], np.minimum(places, largest - 1)]
    rows[np.arange(rows.shape[2]) >= counts[..., None]] = 0
    return Batches(rows, counts)


def batch_sequence(
    training: LocalTraining, samples: int, seed: int, position: Position, client: int, steps: int | None = None
) -> list[SampleIndices]:
    """The K batches of one client in one round, or the first `steps` of them."""
    steps = training.steps if steps is None else steps
    if training.whole_batches(samples):
        return [np.arange(samples, dtype=np.int64)] * steps
    drawn = draw_batches(training, np.array([samples]), seed, position, np.array([client]), steps)
    return [rows[0, :count] for rows, (count,) in zip(drawn.rows, drawn.counts, strict=True)]
