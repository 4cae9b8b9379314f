"""Which samples each local step looks at, independent of who else takes part in the round."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sifu.core.engine import Position
from sifu.core.randomness import keyed_generator
from sifu.sim.local_training import LocalTraining

SampleIndices = NDArray[np.int64]


def batch_sequence(
    training: LocalTraining, samples: int, seed: int, position: Position, client: int, steps: int | None = None
) -> list[SampleIndices]:
    """The K batches of one client in one round, or the first `steps` of them.

    A client walks through a permutation of its samples in batches of `batch_size`; the last one of a
    permutation may be smaller, and a new permutation begins when one is used up. The stream is keyed by
    (seed, branch, round, client) alone: taking a client out leaves everyone else's batches as they were.
    """
    steps = training.steps if steps is None else steps
    if training.whole_batches(samples):
        return [np.arange(samples, dtype=np.int64)] * steps
    size = training.batch_size or samples
    generator = keyed_generator(seed, "batches", position.branch, position.round, client)
    batches: list[SampleIndices] = []
    while len(batches) < steps:
        order = generator.permutation(samples)
        batches.extend(order[start : start + size] for start in range(0, samples, size))
    return batches[:steps]
