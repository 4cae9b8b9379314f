"""Reading a run: at any time, also while another process writes to it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sifu.core.engine import ClientProfile
from sifu.core.errors import InputError, RunDamagedError
from sifu.core.layout import ModelLayout, Vector
from sifu.core.ledger import Event
from sifu.store import files
from sifu.store.database import open_database, transaction
from sifu.store.rows import NodeRow, ParticipationRows
from sifu.store.updates import UpdatesRow, read_updates

CERTIFICATES = "certificates"
JOINED = "client joined"
HEAD_FILE = "head"
"""`SEQ:HASH` of a recent event, beside the database: an older database put back is noticed by it."""


@dataclass(frozen=True)
class RequestRow:
    """A row of `requests`."""

    request: str
    status: str
    clients: tuple[str, ...]
    method: str
    epsilon: float
    delta: float
    sigma: str
    unit: Any
    scope: Any
    calibration: Any
    retention: Any
    reserve: float
    max_rounds: int
    target: float | None
    deadline_days: int
    received: str
    request_order: int | None
    carried_out: str | None
    multiplier: float | None
    noise_std: float | None
    source_node: int | None
    wanted_node: int | None
    noise_node: int | None
    final_node: int | None
    level: str | None
    finished: str | None

    @property
    def waits(self) -> bool:
        """Whether it is still to be carried out; its clients are not asked any more."""
        return self.status in ("received", "verified", "planned")


@dataclass(frozen=True)
class SubjectRow:
    """A row of `subjects` with its request's order and the sum of its charges."""

    subject: int
    request: str
    clients: tuple[int, ...]


@dataclass(frozen=True)
class ModelRow:
    """A row of `models`: a file that exists. `kept` ones can be rolled back to; the tip is always there."""

    node: int
    kept: bool
    bytes: int
    digest: str
    nonce: str
    psi_max: float


@dataclass(frozen=True)
class EvaluationRow:
    """A row of `evaluations`."""

    node: int
    subset: str
    samples: int
    accuracy: float
    loss: float


@dataclass(frozen=True)
class ChargeRow:
    """A row of `charges`."""

    noise_node: int
    subject: int
    psi: str
    charge: float


@dataclass(frozen=True)
class ComparisonRow:
    """A row of `comparisons`: what another method needed for the same request."""

    request: str
    method: str
    rounds: int
    reached: bool
    accuracy: float
    forgotten_accuracy: float | None


@dataclass(frozen=True)
class RejectionRow:
    """A row of `rejections`: a client's reply that was refused, and why."""

    branch: int
    round: int
    number: int
    client: str
    reason: str
    left_out: bool


@contextmanager
def readable(folder: Path) -> Iterator[None]:
    """What cannot be made sense of was damaged or changed by hand: say so, with the exit code for it."""
    try:
        yield
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, ArithmeticError, InputError) as error:
        raise RunDamagedError(
            f"{folder} is damaged: its records cannot be read ({type(error).__name__}: {error}). "
            "Check it with sifu verify, or restore it from a backup"
        ) from error


class RunReader:
    """The recorded facts of a run."""

    def __init__(self, folder: Path, connection: sqlite3.Connection | None = None) -> None:
        self.folder = folder
        self.connection = connection or open_database(folder)
        self._nodes: tuple[tuple[int, int], list[NodeRow]] | None = None

    def close(self) -> None:
        """Close the database."""
        self.connection.close()

    def snapshot(self) -> AbstractContextManager[None]:
        """Within this block every read sees the same instant."""
        return transaction(self.connection, "DEFERRED")

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Rows of a SELECT; a damaged database becomes a sentence."""
        try:
            return self.connection.execute(sql, values).fetchall()
        except sqlite3.DatabaseError as error:
            raise RunDamagedError(f"{self.folder} is damaged: {error}. Restore it from a backup.") from error

    def value(self, key: str, default: str | None = None) -> str:
        """A value of the `run` table."""
        rows = self.query("SELECT value FROM run WHERE key = ?", (key,))
        if rows:
            return str(rows[0][0])
        if default is None:
            raise RunDamagedError(f"{self.folder} is damaged: its run table has no {key!r}")
        return default

    @property
    def spec(self) -> dict[str, Any]:
        """The merged spec the run was made with."""
        result: dict[str, Any] = json.loads(self.value("spec"))
        return result

    @property
    def asked(self) -> dict[str, Any]:
        """The spec as it was given, before `auto` was replaced by what was found."""
        result: dict[str, Any] = json.loads(self.value("asked"))
        return result

    @property
    def layout(self) -> ModelLayout:
        """Names, shapes and type of the model's parameters."""
        content = json.loads(self.value("layout"))
        shapes = tuple(tuple(shape) for shape in content["shapes"])
        return ModelLayout(tuple(content["names"]), shapes, content["dtype"])

    @property
    def facts(self) -> dict[str, Any]:
        """The training facts as they were recorded."""
        result: dict[str, Any] = json.loads(self.value("facts"))
        return result

    @property
    def tip(self) -> int:
        """The node of the current model."""
        return int(self.value("tip"))

    @property
    def phase(self) -> str:
        """`training`, `ready`, or `retraining`."""
        return self.value("phase")

    def clients(self) -> tuple[ClientProfile, ...]:
        """Every client the run knows, by index."""
        rows = self.query("SELECT name, samples, local_steps, smoothness, curvature FROM clients ORDER BY client")
        return tuple(ClientProfile(*row) for row in rows)

    def joined(self) -> list[int]:
        """The events by which clients joined later, one client each, in the order of their indices."""
        return [int(row[0]) for row in self.query("SELECT seq FROM events WHERE kind = ? ORDER BY seq", (JOINED,))]

    def node_rows(self, first: int = 0, last: int | None = None) -> list[NodeRow]:
        """Nodes by number, the cut ones too; all of them are read once as long as nothing is written."""
        if first > 0 or last is not None:
            return self._read_nodes(first, 2**62 if last is None else last)
        # data_version changes when another connection writes, total_changes when this one does.
        version = (int(self.query("PRAGMA data_version")[0][0]), self.connection.total_changes)
        if self._nodes is None or self._nodes[0] != version:
            self._nodes = (version, self._read_nodes(0, 2**62))
        return list(self._nodes[1])

    def _read_nodes(self, first: int, last: int) -> list[NodeRow]:
        rows = self.query(
            "SELECT node, parent, kind, branch, position, samples, request_order, factor_sum, factor_max, "
            "averagedness_sum, averagedness_max, mean_shift, rounding, noise_std, distance FROM nodes "
            "WHERE node BETWEEN ? AND ? ORDER BY node",
            (first, last),
        )
        return [NodeRow.of(row) for row in rows]

    def path(self, tip: int | None = None) -> list[NodeRow]:
        """The nodes from the initial model to `tip` (the current model by default)."""
        by_number = {row.node.node: row for row in self.node_rows()}
        result: list[NodeRow] = []
        current: int | None = self.tip if tip is None else tip
        while current is not None:
            if current not in by_number or len(result) > len(by_number):
                raise RunDamagedError(f"the history is broken: node {current} is missing or repeated")
            row = by_number[current]
            result.append(row)
            current = row.node.parent
        return result[::-1]

    def participation(self, clients: Sequence[int] | None = None) -> ParticipationRows:
        """Who took part, by (node, client): of some clients, or of all."""
        sql = "SELECT node, client, samples, drift FROM participation"
        if clients is not None:
            sql += f" WHERE client IN ({','.join(str(int(client)) for client in clients)})"
        rows = self.query(sql)
        if not rows:
            return ParticipationRows.empty()
        nodes, who, samples, drifts = zip(*rows, strict=True)
        return ParticipationRows(
            np.array(nodes, dtype=np.int64),
            np.array(who, dtype=np.int64),
            np.array(samples, dtype=np.int64),
            np.array(drifts, dtype=np.float64),
        ).sorted()

    def weighted_drifts(self, nodes: Sequence[int]) -> list[tuple[int, float]]:
        """Of each client, sum over these rounds of n_c / (N - n_c) drift_c; a round it was alone in adds nothing.

        Summed by the database, a million rows in a fraction of a second; not rounded up, so for forecasts only.
        """
        if not nodes:
            return []
        chosen = "" if len(nodes) == nodes[-1] - nodes[0] + 1 else f" AND node IN ({','.join(map(str, nodes))})"
        return [
            (int(client), float(total))
            for client, total in self.query(
                "SELECT p.client, SUM(p.drift * p.samples / (n.samples - p.samples)) FROM participation p "
                "JOIN nodes n USING (node) WHERE node BETWEEN ? AND ? AND n.samples > p.samples"
                f"{chosen} GROUP BY p.client",
                (int(nodes[0]), int(nodes[-1])),
            )
        ]

    def grams(self, first: int = 0, last: int = 2**62) -> list[tuple[int, bytes]]:
        """Gram matrices that were kept, as little-endian float64 bytes."""
        return [
            (int(node), bytes(matrix))
            for node, matrix in self.query(
                "SELECT node, matrix FROM grams WHERE node BETWEEN ? AND ? ORDER BY node", (first, last)
            )
        ]

    def models(self) -> dict[int, ModelRow]:
        """The model files that exist, by node."""
        rows = self.query("SELECT node, kept, bytes, digest, nonce, psi_max FROM models ORDER BY node")
        return {int(row[0]): ModelRow(int(row[0]), bool(row[1]), *row[2:]) for row in rows}

    def load_model(self, node: int) -> Vector:
        """The model of a node, checked against its recorded digest."""
        row = self.models().get(node)
        if row is None:
            raise RunDamagedError(f"the model of node {node} was not kept")
        return files.read_model(files.model_path(self.folder, node), self.layout, row.digest)

    def updates(self) -> dict[str, UpdatesRow]:
        """The files of clients' updates that exist, by name."""
        rows = self.query("SELECT file, node, part, bytes, digest, clients FROM updates ORDER BY node, part")
        return {
            str(file): UpdatesRow(file, node, part, size, digest, {int(k): v for k, v in json.loads(clients).items()})
            for file, node, part, size, digest, clients in rows
        }

    def load_updates(self, row: UpdatesRow) -> dict[int, Vector]:
        """The updates of one kept round by client, each checked against its recorded digest."""
        return read_updates(self.folder, row)

    def requests(self) -> list[RequestRow]:
        """All requests, in the order they were received."""
        columns = ", ".join(RequestRow.__dataclass_fields__)
        rows = self.query(f"SELECT {columns} FROM requests")
        parsed = [_request_row(row) for row in rows]
        order = {
            json.loads(payload)["request"]["request"]: seq
            for seq, payload in self.query("SELECT seq, payload FROM events WHERE kind = 'request received'")
        }
        return sorted(parsed, key=lambda one: order.get(one.request, 0))

    def subjects(self) -> list[SubjectRow]:
        """Everyone forgotten so far, in order."""
        rows = self.query("SELECT subject, request, clients FROM subjects ORDER BY subject")
        return [SubjectRow(int(a), str(b), tuple(json.loads(c))) for a, b, c in rows]

    def charges(self) -> list[ChargeRow]:
        """What each noise edge cost each subject."""
        rows = self.query("SELECT noise_node, subject, psi, charge FROM charges ORDER BY noise_node, subject")
        return [ChargeRow(*row) for row in rows]

    def evaluations(self) -> list[EvaluationRow]:
        """All evaluations, by node."""
        rows = self.query("SELECT node, subset, samples, accuracy, loss FROM evaluations ORDER BY node, subset")
        return [EvaluationRow(*row) for row in rows]

    def comparisons(self) -> list[ComparisonRow]:
        """What other methods needed for the same requests."""
        rows = self.query(
            "SELECT request, method, rounds, reached, accuracy, forgotten_accuracy FROM comparisons "
            "ORDER BY request, method"
        )
        return [ComparisonRow(a, b, c, bool(d), e, f) for a, b, c, d, e, f in rows]

    def rejections(self) -> list[RejectionRow]:
        """Replies that were refused, by the place of their round."""
        rows = self.query(
            "SELECT branch, round, number, client, reason, left_out FROM rejections ORDER BY branch, round, number"
        )
        return [RejectionRow(a, b, c, d, e, bool(f)) for a, b, c, d, e, f in rows]

    def certificates(self) -> dict[tuple[str, str], str]:
        """The signed certificates as JSON text, by (request, form)."""
        return {(a, b): c for a, b, c in self.query("SELECT request, form, content FROM certificates")}

    def signs_of_an_older_database(self) -> Iterator[str]:
        """What lies beside the database and speaks of events that it does not have."""
        hashes = {int(seq): bytes(found).hex() for seq, found in self.query("SELECT seq, hash FROM events")}

        def known(seq: int, found: str) -> bool:
            return hashes.get(seq) == found

        path = self.folder / HEAD_FILE
        if path.is_file():
            seq, _, found = path.read_text(encoding="utf-8", errors="replace").strip().partition(":")
            if not (seq.isdecimal() and known(int(seq), found)):
                yield f"the file {HEAD_FILE} speaks of event {seq[:12]}, which the database has not, or another"
        for certificate in sorted((self.folder / CERTIFICATES).glob("*.json")):
            try:
                ledger = json.loads(certificate.read_bytes())["body"]["ledger"]
                seq_number, head = int(ledger["seq"]), str(ledger["head"])
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                continue  # verification names what is wrong with it
            if not known(seq_number, head):
                yield f"certificate {certificate.name} was issued after event {seq_number}, which the database has not"

    def events(self) -> Iterator[Event]:
        """The ledger, in order."""
        rows = self.query("SELECT seq, time, kind, payload, nonce, commitment, hash FROM events ORDER BY seq")
        for seq, time, kind, payload, nonce, commitment, digest in rows:
            yield Event(seq, time, kind, payload.encode(), nonce, commitment, digest)


def _request_row(row: tuple[Any, ...]) -> RequestRow:
    values = dict(zip(RequestRow.__dataclass_fields__, row, strict=True))
    values["clients"] = tuple(json.loads(values["clients"]))
    return RequestRow(**values)
