"""The two large tables (nodes, participations): reading them, and digests of their rows."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from sifu.core.ledger import canonical_json
from sifu.errors import RunDamagedError
from sifu.store.database import UNUSABLE, RunConnection
from sifu.theory.arrays import Floats, Integers
from sifu.theory.facts import ClientProfile
from sifu.theory.history import NodeKind, PathNode
from sifu.theory.regularity import RoundRegularity

NODE_KINDS: tuple[NodeKind, ...] = ("initial", "round", "noise", "group", "merge")
NODE_DTYPE = np.dtype(
    [(name, "<i8") for name in ("node", "parent", "kind", "branch", "position", "samples", "request_order")]
    + [(sums.name, "<f8") for sums in fields(RoundRegularity)[1:]]
    + [(name, "<f8") for name in ("mean_shift", "rounding", "noise_std", "distance")]
)
PARTICIPATION_DTYPE = np.dtype([("node", "<i8"), ("client", "<i8"), ("samples", "<i8"), ("drift", "<f8")])


def node_values(node: PathNode) -> tuple[object, ...]:
    """Return a node as a row of `nodes`, in the order of the table's columns."""
    samples, *sums = vars(node.regularity).values()
    place = (node.node, node.parent, node.kind, node.branch, node.position, samples, node.order)
    return *place, *sums, node.mean_shift, node.rounding, node.noise_std, node.distance


def node_of(row: Sequence[Any]) -> PathNode:
    """Return a row of `nodes` as a node; the table is STRICT, so SQLite enforces the types."""
    node, parent, kind, branch, position, samples, order, *sums, shift, rounding, noise_std, distance = row
    regularity = RoundRegularity(samples, *sums)
    return PathNode(node, parent, kind, branch, position, regularity, shift, rounding, noise_std, order, distance)


@dataclass(frozen=True)
class ParticipationRows:
    """Rows of `participation` for one or more nodes, as columns."""

    nodes: Integers
    clients: Integers
    samples: Integers
    drifts: Floats

    @property
    def columns(self) -> tuple[Any, Any, Any, Any]:
        """The columns in the order of the table."""
        return self.nodes, self.clients, self.samples, self.drifts

    @staticmethod
    def empty() -> ParticipationRows:
        """Return an empty table."""
        none = np.zeros(0, dtype=np.int64)
        return ParticipationRows(none, none, none, np.zeros(0))

    def sorted(self) -> ParticipationRows:
        """Return the rows sorted by (node, client)."""
        order = np.lexsort((self.clients, self.nodes))
        return ParticipationRows(*(column[order] for column in self.columns))

    def between(self, first: int, last: int) -> ParticipationRows:
        """Return the rows of nodes `first` to `last`; the rows must be sorted."""
        start, stop = np.searchsorted(self.nodes, [first, last + 1])
        return ParticipationRows(*(column[start:stop] for column in self.columns))

    @staticmethod
    def concatenate(parts: Sequence[ParticipationRows]) -> ParticipationRows:
        """Return all rows of `parts`, in order."""
        columns = zip(*(part.columns for part in (ParticipationRows.empty(), *parts)), strict=True)
        return ParticipationRows(*map(np.concatenate, columns))


def rows_digest(nodes: Sequence[PathNode], participation: ParticipationRows) -> str:
    """Return the digest by which an event commits to its rows, of which participations are sorted by (node, client).

    It is the SHA-256 of the two counts, the nodes, and the participations.
    """
    packed = np.zeros(len(nodes), dtype=NODE_DTYPE)
    for index, node in enumerate(nodes):
        values = list(node_values(node))
        values[1] = -1 if values[1] is None else values[1]
        values[2] = NODE_KINDS.index(node.kind)
        packed[index] = tuple(values)
    taking_part = np.zeros(participation.nodes.size, dtype=PARTICIPATION_DTYPE)
    for name, column in zip(PARTICIPATION_DTYPE.names or (), participation.columns, strict=True):
        taking_part[name] = column
    counts = np.array([len(nodes), participation.nodes.size], dtype="<i8")
    digest = hashlib.sha256(counts.tobytes())
    digest.update(packed.tobytes())
    digest.update(taking_part.tobytes())
    return digest.hexdigest()


def clients_digest(clients: Sequence[ClientProfile]) -> str:
    """Return the SHA-256 of the canonical JSON of each client's row, in order."""
    digest = hashlib.sha256()
    for index, client in enumerate(clients):
        digest.update(canonical_json([index, *vars(client).values()]))
    return digest.hexdigest()


class HistoryReader(RunConnection):
    """Reader of all nodes and participations. It caches rows, because no event changes existing rows."""

    _path: tuple[list[PathNode], dict[int, int]] = ([], {})
    """The path that was followed last, and the depth of each of its nodes."""

    @property
    def tip(self) -> int:
        """Node of the current model."""
        return int(self.value("tip"))

    def nodes(self, first: int = 0, last: int | None = None) -> list[PathNode]:
        """Return the nodes `first` to `last` by number, including discarded nodes; a call without limits is cached."""
        if first > 0 or last is not None:
            return self._read_nodes(first, 2**62 if last is None else last)
        return list(self.nodes_by_number().values())

    def nodes_by_number(self) -> dict[int, PathNode]:
        """Return every node by its number, in order; the caller must not change the result."""
        nodes: dict[int, PathNode] = self.memory.answer("nodes", self.state(), self._with_new_nodes)
        return nodes

    def _with_new_nodes(self, earlier: dict[int, PathNode] | None) -> dict[int, PathNode]:
        nodes = earlier or {}
        count, largest = self.query(
            "SELECT COUNT(*), MAX(node) FROM nodes WHERE node >= 0 AND node < ?", (len(nodes),)
        )[0]
        if nodes and (count != len(nodes) or largest != count - 1):
            nodes, self._path = {}, ([], {})  # rows were changed, not only added: read all again
        return nodes | {node.node: node for node in self._read_nodes(len(nodes), 2**62)}

    def _read_nodes(self, first: int, last: int) -> list[PathNode]:
        columns = ", ".join(NODE_DTYPE.names or ())
        rows = self.query(f"SELECT {columns} FROM nodes WHERE node BETWEEN ? AND ? ORDER BY node", (first, last))
        return [node_of(row) for row in rows]

    def path(self, tip: int | None = None) -> list[PathNode]:
        """Return the nodes from the initial model to `tip` (the current model by default)."""
        by_number = self.nodes_by_number()
        walked, depths = self._path
        result: list[PathNode] = []
        current: int | None = self.tip if tip is None else tip
        while current is not None and current not in depths:
            if current not in by_number or len(result) > len(by_number):
                raise RunDamagedError(f"the history is broken: node {current} is missing or repeated")
            result.append(by_number[current])
            current = by_number[current].parent
        # Most paths extend a path that was followed before, and a node's parent never changes.
        path = ([] if current is None else walked[: depths[current] + 1]) + result[::-1]
        if result:
            self._path = (path, {node.node: depth for depth, node in enumerate(path)})
        return list(path)

    def participation(self, clients: Sequence[int] | None = None, first: int | None = None) -> ParticipationRows:
        """Return the participations of `clients`, or of all from the node `first` on, sorted by (node, client)."""
        sql = "SELECT node, client, samples, drift FROM participation"
        if clients is not None:
            sql += f" WHERE client IN ({','.join(str(int(client)) for client in clients)})"
        elif first is not None:
            sql += f" WHERE node >= {int(first)}"
        try:
            # Read directly into an array: as tuples, a million rows would take hundreds of megabytes.
            table = np.fromiter(self.connection.execute(sql), dtype=PARTICIPATION_DTYPE)
        except UNUSABLE as error:
            raise RunDamagedError(f"{self.folder} is damaged: {error}. Restore it from a backup.") from error
        return ParticipationRows(*(table[name] for name in PARTICIPATION_DTYPE.names or ())).sorted()

    def everyone(self) -> ParticipationRows:
        """Return all participations, sorted by (node, client); only rows that are not cached are read."""
        rows: ParticipationRows = self.memory.answer("everyone", self.state(), self._with_new_rows)[-1]
        return rows

    def _with_new_rows(
        self, read: tuple[object, bool, ParticipationRows] | None
    ) -> tuple[object, bool, ParticipationRows]:
        """Return the cache entry of `everyone`.

        The entry has three values: an object that changes when other connections write, whether the rows are committed,
        and the rows.
        """
        others, _ = self.state()
        # Other connections may have changed earlier rows, and rows read in a transaction may be rolled back.
        earlier = read[2] if read is not None and read[0] is others and read[1] else None
        first = int(earlier.nodes[-1]) + 1 if earlier is not None and earlier.nodes.size else None
        rows = self.participation(first=first)
        if earlier is not None and first is not None:
            rows = ParticipationRows.concatenate([earlier, rows])
        return others, not self.connection.in_transaction, rows
