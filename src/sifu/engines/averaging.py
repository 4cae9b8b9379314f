"""Mean of the clients' models in a round and each client's drift, computed in one pass over the models.

The models are read in place, in blocks that fit into the processor's cache. Before the next block is read, the mean of
the block is computed and every client's distance to it is accumulated. The drifts thus need no second pass through
memory. Threads share the blocks, and partial sums are combined in the order of the blocks, so results do not depend on
the number of threads. The bounds are the same as for `RowUpdates` in `sifu.engines.sim.client_updates`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from threadpoolctl import threadpool_limits

from sifu.core.layout import ModelPieces, Vector
from sifu.core.round import Average
from sifu.theory.arrays import Floats, Integers
from sifu.theory.rounding import UNIT_ROUNDOFF, enlargement, norm_up, root_up, sum_of_squares, up

BLOCK_WORDS = 2**19
"""Number of float64 values in a block over all replies (four megabytes)."""
MOST_THREADS = 4
"""Maximum number of threads; more threads would only wait for memory."""


@dataclass(frozen=True)
class _BlockSums:
    """Sums over one block: squared distance of each row to the mean, ||mean||^2 and ||mean - start||^2."""

    distances: Floats
    mean: float
    step: float


def average_replies(
    replies: Sequence[Vector | ModelPieces],
    start: Vector,
    samples: Integers,
) -> Average:
    """Return the mean of `replies` minus `start`, and an upper bound on each reply's distance to the mean."""
    rows = [reply if isinstance(reply, ModelPieces) else ModelPieces((reply,)) for reply in replies]
    count, size = len(rows), start.size
    weights = samples / samples.sum()
    step = np.empty(size)
    blocks = _sum_blocks(rows, weights, start, step)
    distances = np.zeros(count)
    with np.errstate(over="ignore", invalid="ignore"):
        for block in blocks:
            distances += block.distances
        norms = np.sqrt(distances) * enlargement(size)
    trusted = (norms > 1e-140) & (norms < 1e140)
    mean_norm = root_up(sum(block.mean for block in blocks), size)
    step_norm = root_up(sum(block.step for block in blocks), size)
    if mean_norm is None or step_norm is None or not trusted.all():  # a square over- or underflowed
        mean = _whole_mean(rows, weights, size)
        doubtful = np.flatnonzero(~np.isfinite(norms)).tolist()
        bad = tuple(place for place in doubtful if not np.isfinite(np.asarray(rows[place])).all())
        if bad or not np.isfinite(mean).all():
            return Average(step, np.full(count, np.inf), np.inf, bad)
        for place in np.flatnonzero(~trusted).tolist():
            norms[place] = norm_up(np.asarray(rows[place], dtype=np.float64) - mean)
        mean_norm, step_norm = norm_up(mean), norm_up(step)
    if count == 1:  # a single model equals its mean exactly
        return Average(step, np.zeros(1), step_norm, ())
    # The error of a float64 sum of M weighted rows is at most (M + 2) u max ||row||.
    error = (count + 2) * UNIT_ROUNDOFF * (mean_norm + float(norms.max())) * 1.001
    drifts = np.where(norms + error > 0.0, np.nextafter(norms + error, np.inf), 0.0)
    return Average(step, drifts, up(step_norm + error), ())


def _sum_blocks(
    rows: Sequence[ModelPieces],
    weights: Floats,
    start: Vector,
    step: Floats,
) -> list[_BlockSums]:
    """Return the sums of all blocks in order; write mean - start into `step`."""

    def add_up(firsts: range) -> list[_BlockSums]:
        sums = []
        with np.errstate(over="ignore", invalid="ignore"):
            for first, block, mean in _blocks(rows, weights, start.size, firsts):
                here = slice(first, first + mean.size)
                np.subtract(mean, start[here].astype(np.float64), out=step[here])
                lengths = sum_of_squares(mean), sum_of_squares(step[here])
                block -= mean
                distances = np.matmul(block[:, None, :], block[:, :, None])[:, 0, 0]
                sums.append(_BlockSums(distances, *lengths))
        return sums

    firsts = range(0, start.size, _width(rows, start.size))
    if len(firsts) < 2:
        return add_up(firsts)
    threads = min(len(firsts), len(os.sched_getaffinity(0)), MOST_THREADS)
    share = -(-len(firsts) // threads)
    shares = [firsts[begin : begin + share] for begin in range(0, len(firsts), share)]
    with threadpool_limits(limits=1), ThreadPoolExecutor(threads) as pool:
        return [block for blocks in pool.map(add_up, shares) for block in blocks]


def _blocks(
    rows: Sequence[ModelPieces], weights: Floats, size: int, firsts: range
) -> Iterator[tuple[int, Floats, Floats]]:
    """Yield each block's first index, rows in float64, and weighted mean; the next block overwrites both arrays."""
    width = _width(rows, size)
    held, means = np.empty((len(rows), width)), np.empty(width)
    for first in firsts:
        length = min(width, size - first)
        block, mean = held[:, :length], means[:length]
        for place, row in enumerate(rows):
            row.read(first, block[place])
        np.matmul(weights, block, out=mean)
        yield first, block, mean


def _width(rows: Sequence[ModelPieces], size: int) -> int:
    return max(1, min(size, BLOCK_WORDS // len(rows)))


def _whole_mean(rows: Sequence[ModelPieces], weights: Floats, size: int) -> Floats:
    whole = np.empty(size)
    with np.errstate(over="ignore", invalid="ignore"):
        firsts = range(0, size, _width(rows, size))
        for first, _, mean in _blocks(rows, weights, size, firsts):
            whole[first : first + mean.size] = mean
    return whole
