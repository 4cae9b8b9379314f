"""Active history of a run as a path of models, and Psi at each model (docs/theory.md, sections 4.1 and 4.2).

    theta_0^0 -> rounds -> (noise) -> rounds -> (noise) -> ...

A position on the path is a *depth*, 0 for the initial model. A step that adds noise (a noise edge) increases Psi only
by an allowance for rounding, because the counterfactual adds the same noise. In a round without the subject,
Psi is multiplied by the factor L that all absent clients share. The path
keeps the running product of these factors, so a curve takes time proportional to the number of rounds that the subject
took part in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from sifu.theory.arrays import Floats, Integers
from sifu.theory.regularity import NO_PARTICIPANTS, RoundRegularity
from sifu.theory.rounding import ROUNDED_UP, slack
from sifu.theory.tracking import (
    SMALLEST_TRACE,
    client_increments,
    gather_rounding,
    rounding_growth,
)

NodeKind = Literal["initial", "round", "noise", "group", "merge"]
KINDS_WITH_CLIENTS: tuple[NodeKind, ...] = ("round", "merge")
"""Kinds of nodes that record the participation of clients."""


@dataclass(frozen=True)
class PathNode:
    """Model of the history, and the step that made it: an initial model, a round, added noise or a merge.

    A merge of groups' models is treated like a round of all their members with unknown,
    hence infinite, drifts. The models of the groups themselves (`group`) are on no path.

    Attributes:
        node: Number of the model's node.
        parent: Number of the node before it, or None.
        kind: Kind of the step that made the model.
        branch: Number of the branch that keys the draws.
        position: Number of rounds on the branch.
        regularity: Sums over the participants of a round.
        mean_shift: ||mean - theta^n|| of a round.
        rounding: Floating-point allowance of a round or of adding noise (`sifu.core.round.noise_rounding`).
        noise_std: Sigma of added noise, or 0 for an exact restart.
        order: Number of requests executed so far. Noise added at or after a subject's request has at least the order of
            that request.
        distance: ||theta^n - theta_0||; only planning reads it.
    """

    node: int
    parent: int | None
    kind: NodeKind
    branch: int
    position: int
    regularity: RoundRegularity = NO_PARTICIPANTS
    mean_shift: float = 0.0
    rounding: float = 0.0
    noise_std: float = 0.0
    order: int = 0
    distance: float = 0.0


def rounds_so_far(nodes: Iterable[PathNode]) -> Iterator[int]:
    """Yield the number of rounds run until each model was made; groups that train at the same time share their rounds.

    >>> of_groups = [PathNode(1, 0, "group", 0, 5), PathNode(2, 0, "group", 0, 5), PathNode(3, 0, "merge", 0, 5)]
    >>> list(rounds_so_far([*of_groups, PathNode(4, 3, "round", 0, 6)]))
    [5, 5, 5, 6]
    """
    common, separate = 0, dict[int, int]()
    for node in nodes:
        common += node.kind == "round"
        if node.kind == "group":
            separate[node.branch] = max(separate.get(node.branch, 0), node.position)
        yield common + sum(separate.values())


def count_rounds(nodes: Iterable[PathNode]) -> int:
    """Return the number of rounds run to make these models."""
    return max(rounds_so_far(nodes), default=0)


@dataclass(frozen=True)
class TakenPart:
    """Rounds that one client took part in; `depths` are the depths of the models that these rounds made."""

    depths: Integers
    samples: Integers
    drifts: Floats
    factor: float


class _RunningProduct:
    """Products of consecutive factors, kept as mantissas and exponents; zeros and infinities are counted separately."""

    def __init__(self, factors: list[float]) -> None:
        mantissa, exponent, zeros, infinities, others = 1.0, 0, 0, 0, 0
        rows = []
        for factor in factors:
            if factor == 0.0:
                zeros += 1
            elif math.isinf(factor):
                infinities += 1
            else:
                mantissa, shift = math.frexp(mantissa * factor)
                exponent += shift
            others += factor != 1.0
            rows.append((mantissa, exponent, zeros, infinities, others))
        mantissas, exponents, zero_counts, infinity_counts, other_counts = zip(*rows, strict=True)
        self._mantissas: Floats = np.array(mantissas)
        self._exponents, self._zeros, self._infinities, self._others = (
            np.array(column, dtype=np.int64) for column in (exponents, zero_counts, infinity_counts, other_counts)
        )

    def between(self, start: Integers, stop: Integers) -> Floats:
        """Return the product of the factors in (start, stop], enlarged by more than its rounding error."""
        shift = np.clip(self._exponents[stop] - self._exponents[start], -5000, 5000).astype(np.int32)
        with np.errstate(over="ignore", under="ignore"):
            ratio = np.ldexp(self._mantissas[stop] / self._mantissas[start], shift)
            ratio = ratio * slack(2 * (np.asarray(stop) + 8))
        ratio = np.where(self._zeros[stop] > self._zeros[start], 0.0, ratio)
        ratio = np.where(self._infinities[stop] > self._infinities[start], np.inf, ratio)
        # The ratio is exactly 1 where all factors are 1: Psi at a depth must not depend on later depths.
        return np.where(self._others[stop] == self._others[start], 1.0, ratio)


@dataclass(eq=False)
class ActivePath:
    """Nodes from the initial model to the current one, and the quantities that the Psi of every subject depends on."""

    nodes: list[PathNode]

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def tip(self) -> int:
        """Depth of the current model."""
        return len(self.nodes) - 1

    @cached_property
    def depth_of(self) -> dict[int, int]:
        """Depth of each node of the path."""
        return {node.node: depth for depth, node in enumerate(self.nodes)}

    def rounds_until(self, depth: int) -> int:
        """Return the number of rounds on the path to `depth`; noise edges do not count."""
        return int(self._rounds[min(depth, self.tip)]) if depth >= 0 else 0

    @cached_property
    def _rounds(self) -> Integers:
        return np.cumsum([node.kind == "round" for node in self.nodes], dtype=np.int64)

    @cached_property
    def covering_order(self) -> Integers:
        """Largest `order` of all noise edges on the path to each depth, or -1 before the first noise."""
        orders = [node.order if node.kind == "noise" and node.noise_std > 0.0 else -1 for node in self.nodes]
        return np.maximum.accumulate(np.array(orders, dtype=np.int64))

    @cached_property
    def noise_depths(self) -> list[tuple[int, int]]:
        """(depth, order) of each noise edge on the path."""
        return [(d, node.order) for d, node in enumerate(self.nodes) if node.kind == "noise"]

    def noise_energy(self, depth: int) -> float:
        """Return the sum of sigma^2 of all noise on the path to `depth`; erased noise (infinite) is left out."""
        sizes = (self.nodes[d].noise_std for d, _ in self.noise_depths if d <= depth)
        return math.fsum(size * size for size in sizes if size < math.inf)

    @cached_property
    def rounding(self) -> Floats:
        """R(n): accumulated floating-point allowance at each depth."""
        gathered, values = 0.0, np.zeros(len(self.nodes))
        if not any(node.rounding for node in self.nodes):
            return values
        for depth, node in enumerate(self.nodes):
            if node.kind == "round":
                growth = rounding_growth(node.regularity)
                gathered = gather_rounding(gathered, growth, node.rounding)
            elif node.kind == "noise":
                gathered = gather_rounding(gathered, 1.0, node.rounding)
            values[depth] = gathered
        return values

    @cached_property
    def _products(self) -> _RunningProduct | None:
        """Running product of the absent clients' L over the path, or None when all factors are 1."""
        if all(node.regularity.all_one for node in self.nodes if node.kind == "round"):
            return None
        factors = [node.regularity.absent if node.kind == "round" else 1.0 for node in self.nodes]
        return None if all(factor == 1.0 for factor in factors) else _RunningProduct(factors)

    @property
    def constant_when_absent(self) -> bool:
        """True if Psi of an absent client changes only by rounding (L = 1 in every round)."""
        return self._products is None

    def growth(self, start: Integers, stop: Integers) -> Floats:
        """Return the product of the absent clients' L over rounds (start, stop], rounded up."""
        if self._products is None:
            return np.ones(np.shape(stop))
        return self._products.between(start, stop)


@dataclass(frozen=True)
class PsiCurve:
    """Psi(n, subject) at every depth n of a path."""

    path: ActivePath
    depths: Integers
    values: Floats

    def at(self, depths: int | Integers) -> Floats:
        """Return Psi at the given depths, rounded up. It is exactly zero only before the subject first took part."""
        wanted = np.atleast_1d(np.asarray(depths, dtype=np.int64))
        last = np.searchsorted(self.depths, wanted, side="right") - 1
        result = np.zeros(wanted.size)
        seen = last >= 0
        if np.any(seen):
            index, there = last[seen], wanted[seen]
            bare = _times(self.values[index], self.path.growth(self.depths[index], there))
            result[seen] = np.maximum((bare + self.path.rounding[there]) * ROUNDED_UP, SMALLEST_TRACE)
        return result

    def largest_until(self, depth: int) -> float:
        """Return the largest Psi at any depth up to `depth`."""
        if self.path.constant_when_absent:
            marks = [int(d) for d in self.depths if d <= depth]
            return float(self.at(np.array([*marks, depth])).max())
        return float(self.at(np.arange(depth + 1)).max())

    def one(self, depth: int) -> float:
        """Return Psi at one depth."""
        return float(self.at(depth)[0])


def client_curve(path: ActivePath, *parts: TakenPart) -> PsiCurve:
    """Return Psi(., c) of one client from its own scalars (theorem 1, eqs. 9 and 15 of the paper).

    Args:
        path: The history.
        *parts: Rounds in which the client took part, one for each index it has had; no two share a round.
    """
    if not parts:
        return PsiCurve(path, np.zeros(0, dtype=np.int64), np.zeros(0))
    depths = np.concatenate([part.depths for part in parts])
    order = np.argsort(depths, kind="stable")
    samples = np.concatenate([part.samples for part in parts])[order]
    rounds = [path.nodes[depth] for depth in depths[order].tolist()]
    increments = client_increments(
        samples,
        np.concatenate([part.drifts for part in parts])[order],
        np.array([node.regularity.total_samples for node in rounds], dtype=np.int64),
        np.array([node.mean_shift for node in rounds]),
    )
    factors = np.concatenate([np.full(part.depths.size, part.factor) for part in parts])[order]
    return _accumulate(path, depths[order], increments, samples.astype(np.float64), factors)


def _accumulate(path: ActivePath, depths: Integers, increments: Floats, counts: Floats, factors: Floats) -> PsiCurve:
    """Return the curve of Psi from its increments.

    In a round with the subject, the new Psi is L_n(W) Psi + Delta_W. In other rounds it is L Psi with the common L of
    absent clients.
    """
    values = np.zeros(depths.size)
    psi, previous = 0.0, 0
    for index, depth in enumerate(depths.tolist()):
        here = slice(index, index + 1)
        if psi > 0.0 and not path.constant_when_absent:
            psi = float(_times(np.array([psi]), path.growth(np.array([previous]), np.array([depth - 1])))[0])
        regularity = path.nodes[depth].regularity
        if psi > 0.0 and not regularity.all_one:
            own = regularity.without(counts[here], factors[here])
            psi = float(_times(np.array([psi]), own)[0])
        psi = (psi + increments[index]) * ROUNDED_UP if increments[index] > 0.0 else psi
        values[index], previous = psi, depth
    return PsiCurve(path, depths, values)


def _times(values: Floats, factors: Floats) -> Floats:
    """Return values * factors rounded up, but exact where a factor is 1. Zero and infinity stay unchanged."""
    with np.errstate(over="ignore", invalid="ignore"):
        product = values * factors * ROUNDED_UP
    return np.where((values == 0.0) | np.isinf(values) | (factors == 1.0), values, product)
