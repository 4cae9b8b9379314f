"""Features of networks that groups tuned apart: where each group's block lies, and striking it out of the statistics.

A sample's features are [phi_0(x), P phi_1(x), ..., P phi_S(x)]: those of the public trunk, then a block of each group's
tuned trunk, projected by a public P (docs/theory.md, section 15.5). Every part has the same length, so a sample has at
most the agreed norm whichever parts there are. A block whose group has no trunk (any more) is zero in every row of
Phi^, and so are its rows and columns of G and its rows of H: striking a block makes it so, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from sifu.errors import InputError
from sifu.theory.arrays import Floats
from sifu.theory.closed_form.sums import Statistics
from sifu.theory.draws import base_key, scores


@dataclass(frozen=True)
class Blocks:
    """Places of features: `frozen` numbers of the public trunk, then `block` numbers of each of `count` groups.

    >>> Blocks(frozen=1280, block=200, count=10).features
    3280
    """

    frozen: int
    block: int
    count: int

    @property
    def features(self) -> int:
        """k: all of them, without the constant."""
        return self.frozen + self.block * self.count

    def columns(self, group: int) -> slice:
        """Where the block of a group lies.

        >>> Blocks(4, 2, 3).columns(1)
        slice(6, 8, None)
        """
        if not 0 <= group < self.count:
            raise InputError(f"there are {self.count} groups, numbered from 0: found group {group}")
        start = self.frozen + group * self.block
        return slice(start, start + self.block)

    def part_norm(self, norm: float) -> float:
        """The length of each of the S + 1 parts of a sample whose length is at most `norm`, whichever parts there are.

        >>> Blocks(4, 2, 3).part_norm(10.0)
        5.0
        """
        return norm / math.sqrt(self.count + 1)


def projection(seed: int, inputs: int, block: int) -> Floats:
    """P: `inputs` x `block` signs over sqrt(block), from a public seed alone, the same on every machine.

    One P serves every group. A P fitted to data would be a trace of the clients that leave.

    >>> projection(0, 3, 4)
    array([[-0.5,  0.5, -0.5, -0.5],
           [-0.5, -0.5,  0.5,  0.5],
           [-0.5, -0.5,  0.5,  0.5]])
    """
    if inputs < 1 or block < 1:
        raise InputError(f"a projection of {inputs} features to {block} needs at least one of each")
    words = scores(base_key(seed, "projection of tuned features"), np.arange(inputs * block))
    return np.where(words >> np.uint64(63), 1.0, -1.0).reshape(inputs, block) / math.sqrt(block)


def strike(statistics: Statistics, blocks: Blocks, groups: Iterable[int]) -> Statistics:
    """The statistics without the blocks of `groups`: their rows and columns of G and rows of H are zero.

    What is left is what the same samples give where those groups have no trunk (docs/theory.md, section 15.6).

    >>> from sifu.theory.closed_form import FixedPoint, statistics_of
    >>> fixed = FixedPoint(features=3, outputs=1, feature_bits=1)
    >>> data = statistics_of(fixed, np.array([[1.0, 2.0, 3.0]]), np.array([[1.0]]))
    >>> strike(data, Blocks(frozen=1, block=1, count=2), [0]).gram
    array([[ 4,  0, 12,  4],
           [ 0,  0,  0,  0],
           [12,  0, 36, 12],
           [ 4,  0, 12,  4]])
    """
    if statistics.fixed.features != blocks.features:
        raise InputError(
            f"statistics of {statistics.fixed.features} features have no blocks of "
            f"{blocks.frozen} + {blocks.count} x {blocks.block}"
        )
    gram, cross = statistics.gram.copy(), statistics.cross.copy()
    for group in groups:
        columns = blocks.columns(group)
        gram[columns, :] = 0
        gram[:, columns] = 0
        cross[columns] = 0
    return Statistics(statistics.fixed, gram, cross, statistics.samples, statistics.target_energy)


def is_struck(statistics: Statistics, blocks: Blocks, group: int) -> bool:
    """Whether nothing is left of a group's block in G and H."""
    columns = blocks.columns(group)
    parts = (statistics.gram[columns, :], statistics.gram[:, columns], statistics.cross[columns])
    return not any(bool(np.any(part)) for part in parts)
