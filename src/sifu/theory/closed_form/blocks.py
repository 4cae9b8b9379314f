"""Blocks of features from networks that groups tuned separately, and their removal from the statistics.

A sample's features are [phi_0(x), P phi_1(x), ..., P phi_S(x)]: the features of the public backbone, then a block from
each group's tuned backbone, projected by a public P (docs/theory.md, section 15.5). The norm of each part is at most c,
independently of the other parts. Without any group, only the public backbone's features remain. The block of a group
without a backbone is zero in every row of Phi^, and so are its rows and columns of G and its rows of H. Dropping a
block from the statistics gives the same zeros, bit for bit. The head is solved on the remaining features.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from sifu.errors import InputError
from sifu.theory.arrays import Floats, Integers
from sifu.theory.closed_form.fixed_point import FixedPoint
from sifu.theory.closed_form.ridge import Head, fit_head
from sifu.theory.closed_form.sums import Statistics
from sifu.theory.participation import base_key, scores

Part = tuple[int, ...]
"""Key of a part of (G, H, n, q): the ascending indices of the groups (at most two) whose networks it depends on."""


@dataclass(frozen=True)
class Blocks:
    """Layout of features: `frozen` numbers of the public backbone, then `block` numbers of each of `count` groups.

    >>> Blocks(frozen=1280, block=400, count=10).features
    5280
    """

    frozen: int
    block: int
    count: int

    @property
    def features(self) -> int:
        """Number k of all features, without the constant."""
        return self.frozen + self.block * self.count

    def columns(self, group: int) -> slice:
        """Return the columns of a group's block.

        >>> Blocks(4, 2, 3).columns(1)
        slice(6, 8, None)
        """
        if not 0 <= group < self.count:
            raise InputError(f"there are {self.count} groups, numbered from 0: found group {group}")
        start = self.frozen + group * self.block
        return slice(start, start + self.block)

    def norm(self, part: float) -> float:
        """Return the largest norm of a sample if each of its S + 1 parts has a norm of at most `part`.

        >>> Blocks(4, 2, 3).norm(10.0)
        20.0
        """
        return part * math.sqrt(self.count + 1)

    def left(self, groups: Iterable[int]) -> Integers:
        """Return the indices of the public features, of the blocks of `groups` and of the constant.

        >>> Blocks(4, 2, 3).left([1])
        array([ 0,  1,  2,  3,  6,  7, 10])
        """
        spans = [slice(0, self.frozen), *(self.columns(group) for group in sorted(groups)), slice(self.features, None)]
        return np.concatenate([np.arange(self.features + 1)[span] for span in spans])


def projection(seed: int, inputs: int, block: int) -> Floats:
    """Return the `inputs` x `block` matrix P of signs divided by sqrt(block), drawn from a public seed.

    One P serves every group. A P fitted to data would contain information about clients that leave.

    >>> projection(0, 3, 4)
    array([[-0.5,  0.5, -0.5, -0.5],
           [-0.5, -0.5,  0.5,  0.5],
           [-0.5, -0.5,  0.5,  0.5]])
    """
    if inputs < 1 or block < 1:
        raise InputError(f"a projection of {inputs} features to {block} needs at least one of each")
    words = scores(base_key(seed, "projection of tuned features"), np.arange(inputs * block))
    return np.where(words >> np.uint64(63), 1.0, -1.0).reshape(inputs, block) / math.sqrt(block)


def drop(statistics: Statistics, blocks: Blocks, groups: Iterable[int]) -> Statistics:
    """Return the statistics without the blocks of `groups`: their rows and columns of G and rows of H are zero.

    The result equals the statistics of the same samples if those groups have no backbone (docs/theory.md, section
    15.6).

    >>> from sifu.theory.closed_form import FixedPoint, statistics_of
    >>> fixed = FixedPoint(features=3, outputs=1, feature_bits=1)
    >>> data = statistics_of(fixed, np.array([[1.0, 2.0, 3.0]]), np.array([[1.0]]))
    >>> drop(data, Blocks(frozen=1, block=1, count=2), [0]).gram
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
    gone = np.zeros(statistics.fixed.width, dtype=bool)
    for group in groups:
        gone[blocks.columns(group)] = True
    cross = statistics.cross.copy()
    cross[gone] = 0
    rows = [
        np.zeros_like(entries) if gone[row] else np.where(gone[: row + 1], 0, entries)
        for row, entries in statistics.rows_of_gram()
    ]
    return Statistics(statistics.fixed, np.concatenate([*rows, cross.ravel(), statistics.words[-2:]]))


def head_at(statistics: Statistics, places: Integers, relative: float | None) -> Head:
    """Return the head fitted on the features at the indices `places` alone; its other weights are zero.

    Without any block, it is, bit for bit, the head of the public backbone alone (docs/theory.md, section 15.5).

    Args:
        statistics: Statistics of all features.
        places: Indices of the features to use, including the constant.
        relative: Relative penalty r, or None for generalised cross-validation.

    >>> from sifu.theory.closed_form import FixedPoint, statistics_of
    >>> data = statistics_of(FixedPoint(features=2, outputs=1), np.array([[1.0, 2.0]]), np.array([[1.0]]))
    >>> head_at(data, Blocks(frozen=1, block=1, count=1).left([]), 1.0).weights.ravel().round(3)
    array([0.333, 0.   , 0.333])
    """
    head = fit_head(at_places(statistics, places), relative)
    weights = np.zeros((statistics.fixed.width, statistics.fixed.outputs))
    weights[places] = head.weights
    return replace(head, fixed=statistics.fixed, weights=weights)


def at_places(statistics: Statistics, places: Integers) -> Statistics:
    """Return the statistics of the features at the indices `places`, which include the constant."""
    if places.size == statistics.fixed.width:
        return statistics
    fixed = replace(statistics.fixed, features=places.size - 1)
    kept = dict(zip(places.tolist(), range(1, places.size + 1), strict=True))
    rows = [entries[places[: kept[row]]] for row, entries in statistics.rows_of_gram() if row in kept]
    return Statistics(fixed, np.concatenate([*rows, statistics.cross[places].ravel(), statistics.words[-2:]]))


def is_dropped(statistics: Statistics, blocks: Blocks, group: int) -> bool:
    """Return whether a group's block is zero in G and H."""
    columns = blocks.columns(group)
    rows = (
        entries if columns.start <= row < columns.stop else entries[columns]
        for row, entries in statistics.rows_of_gram()
    )
    return not (np.any(statistics.cross[columns]) or any(np.any(entries) for entries in rows))


def parts_through(groups: Iterable[int]) -> tuple[Part, ...]:
    """Return the keys of all parts of statistics for these `groups`; dropping a group drops every part that names it.

    >>> parts_through([0, 2])
    ((), (0,), (2,), (0, 2))
    """
    ordered = sorted(groups)
    return ((), *((group,) for group in ordered), *itertools.combinations(ordered, 2))


def parts_of_rows(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Return the keys of the parts of rows needed for these parts of statistics: the public part, and one per group.

    Products of two groups' blocks are computed from the rows of both groups.

    >>> parts_of_rows([(2,), (0, 2)])
    ((), (0,), (2,))
    """
    return ((), *((group,) for group in sorted({group for part in parts for group in part})))


def places_of_rows(blocks: Blocks, part: Part) -> Integers:
    """Return the indices of the features in a part of rows, without the constant.

    >>> places_of_rows(Blocks(4, 2, 3), ()), places_of_rows(Blocks(4, 2, 3), (1,))
    (array([0, 1, 2, 3]), array([6, 7]))
    """
    return np.arange(blocks.features)[slice(0, blocks.frozen) if not part else blocks.columns(part[0])]


def words_of_part(fixed: FixedPoint, blocks: Blocks, part: Part) -> int:
    """Return the number of words in a part; the parts together have as many words as the statistics.

    >>> fixed, blocks = FixedPoint(features=8, outputs=2), Blocks(frozen=4, block=2, count=2)
    >>> [words_of_part(fixed, blocks, part) for part in parts_through([0, 1])]
    [27, 17, 17, 4]
    """
    public, block = blocks.frozen + 1, blocks.block
    if not part:
        return public * (public + 1) // 2 + public * fixed.outputs + 2
    return block * (public + fixed.outputs) + block * (block + 1) // 2 if len(part) == 1 else block * block


def cut(statistics: Statistics, blocks: Blocks, part: Part) -> Integers:
    """Return the words of one part, which depend only on the tuned networks of the part's groups.

    For the public features and the constant, part () holds the lower triangle of G and the rows of H, followed by n and
    q. Part (g,) holds the rows of block g of G in these columns, the lower triangle of the block, and its rows of H.
    Part (g, h) holds the rows of block h of G in the columns of block g.
    """
    gram, cross = statistics.gram, statistics.cross
    if len(part) == 2:
        return gram[blocks.columns(part[1]), blocks.columns(part[0])].ravel()
    public = blocks.left([])
    if not part:
        triangle = gram[np.ix_(public, public)][np.tril_indices(public.size)]
        return np.concatenate([triangle, cross[public].ravel(), [statistics.samples, statistics.target_energy]])
    rows = gram[blocks.columns(part[0])]
    triangle = rows[:, blocks.columns(part[0])][np.tril_indices(blocks.block)]
    return np.concatenate([rows[:, public].ravel(), triangle, cross[blocks.columns(part[0])].ravel()])


def joined(fixed: FixedPoint, blocks: Blocks, parts: Mapping[Part, Integers]) -> Statistics:
    """Return the statistics with these parts; entries that belong to no part are zero.

    >>> from sifu.theory.closed_form import statistics_of
    >>> fixed, blocks = FixedPoint(features=3, outputs=1), Blocks(frozen=1, block=1, count=2)
    >>> data = statistics_of(fixed, np.array([[1.0, 2.0, 3.0]]), np.array([[1.0]]))
    >>> left = {part: cut(data, blocks, part) for part in parts_through([1])}
    >>> joined(fixed, blocks, left) == drop(data, blocks, [0])
    True
    """
    gram = np.zeros((fixed.width, fixed.width), dtype=np.int64)
    cross = np.zeros((fixed.width, fixed.outputs), dtype=np.int64)
    samples, energy, public = 0, 0, blocks.left([])
    for part, words in parts.items():
        if words.size != words_of_part(fixed, blocks, part):
            raise InputError(
                f"part {part} of statistics has {words.size} words, not {words_of_part(fixed, blocks, part)}"
            )
        if not part:
            split = public.size * (public.size + 1) // 2
            gram[np.ix_(public, public)] = _symmetric(public.size, words[:split])
            cross[public] = words[split:-2].reshape(public.size, fixed.outputs)
            samples, energy = int(words[-2]), int(words[-1])
            continue
        own, block = blocks.columns(part[0]), blocks.block
        if len(part) == 2:
            rows = words.reshape(block, block)
            gram[blocks.columns(part[1]), own], gram[own, blocks.columns(part[1])] = rows, rows.T
            continue
        first, split = block * public.size, block * public.size + block * (block + 1) // 2
        gram[own, public], gram[public, own] = (rows := words[:first].reshape(block, public.size)), rows.T
        gram[own, own] = _symmetric(block, words[first:split])
        cross[own] = words[split:].reshape(block, fixed.outputs)
    return Statistics.of(fixed, gram, cross, samples, energy)


def _symmetric(size: int, triangle: Integers) -> Integers:
    lower = np.zeros((size, size), dtype=np.int64)
    lower[np.tril_indices(size)] = triangle
    return lower + np.tril(lower, -1).T
