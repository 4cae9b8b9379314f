"""Rows as bytes: the digest that ties many small rows to one event of the ledger.

Nodes, participations and Gram matrices are too many to repeat in an event, so the event that records them
holds SHA-256 over their fields, each as eight little-endian bytes, in the order of docs/store.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sifu.core.ledger import canonical_json
from sifu.theory.arrays import Floats, Integers
from sifu.theory.facts import ClientProfile
from sifu.theory.history import NodeKind, PathNode
from sifu.theory.regularity import RoundRegularity

NODE_KINDS: tuple[NodeKind, ...] = ("initial", "round", "noise", "heuristic", "group", "merge")
NODE_DTYPE = np.dtype(
    [(name, "<i8") for name in ("node", "parent", "kind", "branch", "position", "samples", "request_order")]
    + [
        (name, "<f8")
        for name in (
            "factor_sum",
            "factor_max",
            "averagedness_sum",
            "averagedness_max",
            "mean_shift",
            "rounding",
            "noise_std",
            "distance",
        )
    ]
)
PARTICIPATION_DTYPE = np.dtype([("node", "<i8"), ("client", "<i8"), ("samples", "<i8"), ("drift", "<f8")])


@dataclass(frozen=True)
class NodeRow:
    """A row of `nodes`: the path's node and ||theta^n - theta_0||, which only the planner reads."""

    node: PathNode
    distance: float

    def values(self) -> tuple[object, ...]:
        """In the order of the table's columns."""
        node, sums = self.node, self.node.regularity
        return (
            node.node,
            node.parent,
            node.kind,
            node.branch,
            node.position,
            sums.total_samples,
            node.order,
            sums.factor_sum,
            sums.factor_max,
            sums.averagedness_sum,
            sums.averagedness_max,
            node.mean_shift,
            node.rounding,
            node.noise_std,
            self.distance,
        )

    @staticmethod
    def of(row: Sequence[object]) -> NodeRow:
        """From the table's columns."""
        (node, parent, kind, branch, position, samples, order, *reals) = row
        factor_sum, factor_max, averagedness, largest, shift, rounding, noise_std, distance = (
            float(value)  # type: ignore[arg-type]
            for value in reals
        )
        return NodeRow(
            PathNode(
                node=int(node),  # type: ignore[call-overload]
                parent=None if parent is None else int(parent),  # type: ignore[call-overload]
                kind=kind,  # type: ignore[arg-type]
                branch=int(branch),  # type: ignore[call-overload]
                position=int(position),  # type: ignore[call-overload]
                regularity=RoundRegularity(
                    int(samples),  # type: ignore[call-overload]
                    factor_sum,
                    factor_max,
                    averagedness,
                    largest,
                ),
                mean_shift=shift,
                rounding=rounding,
                noise_std=noise_std,
                order=int(order),  # type: ignore[call-overload]
            ),
            distance,
        )


@dataclass(frozen=True)
class ParticipationRows:
    """Rows of `participation` for one or more nodes, as columns."""

    nodes: Integers
    clients: Integers
    samples: Integers
    drifts: Floats

    @staticmethod
    def empty() -> ParticipationRows:
        """No rows."""
        none = np.zeros(0, dtype=np.int64)
        return ParticipationRows(none, none, none, np.zeros(0))

    def sorted(self) -> ParticipationRows:
        """By (node, client)."""
        order = np.lexsort((self.clients, self.nodes))
        return self._chosen(order)

    def between(self, first: int, last: int) -> ParticipationRows:
        """The rows of nodes first..last; the rows must be sorted."""
        start, stop = np.searchsorted(self.nodes, [first, last + 1])
        return self._chosen(np.arange(start, stop))

    def _chosen(self, index: Integers) -> ParticipationRows:
        return ParticipationRows(self.nodes[index], self.clients[index], self.samples[index], self.drifts[index])

    @staticmethod
    def concatenate(parts: Sequence[ParticipationRows]) -> ParticipationRows:
        """All rows of `parts`, in order."""
        if not parts:
            return ParticipationRows.empty()
        return ParticipationRows(
            np.concatenate([part.nodes for part in parts]),
            np.concatenate([part.clients for part in parts]),
            np.concatenate([part.samples for part in parts]),
            np.concatenate([part.drifts for part in parts]),
        )


def rows_digest(nodes: Sequence[NodeRow], participation: ParticipationRows, grams: Iterable[tuple[int, bytes]]) -> str:
    """SHA-256 over the three counts, the nodes, their participations by (node, client), their Gram matrices."""
    packed = np.zeros(len(nodes), dtype=NODE_DTYPE)
    for index, row in enumerate(nodes):
        values = list(row.values())
        values[1] = -1 if values[1] is None else values[1]
        values[2] = NODE_KINDS.index(row.node.kind)
        packed[index] = tuple(values)
    taking_part = np.zeros(participation.nodes.size, dtype=PARTICIPATION_DTYPE)
    taking_part["node"], taking_part["client"] = participation.nodes, participation.clients
    taking_part["samples"], taking_part["drift"] = participation.samples, participation.drifts
    grams = list(grams)
    counts = np.array([len(nodes), participation.nodes.size, len(grams)], dtype="<i8")
    digest = hashlib.sha256(counts.tobytes())
    digest.update(packed.tobytes())
    digest.update(taking_part.tobytes())
    for node, matrix in grams:
        digest.update(int(node).to_bytes(8, "little", signed=True))
        digest.update(matrix)
    return digest.hexdigest()


def clients_digest(clients: Sequence[ClientProfile]) -> str:
    """SHA-256 over the canonical JSON of each client's row, one after the other."""
    digest = hashlib.sha256()
    for index, client in enumerate(clients):
        row = [index, client.name, client.samples, client.local_steps, client.smoothness, client.curvature]
        digest.update(canonical_json(row))
    return digest.hexdigest()
