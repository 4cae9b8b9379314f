"""Reading a run: at any time, also while another process writes to it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sifu.core.engine import ClientProfile
from sifu.core.errors import InputError, RunDamagedError
from sifu.core.layout import ModelLayout, Vector
from sifu.core.ledger import Event
from sifu.store import files
from sifu.store.database import UNUSABLE, open_database, transaction
from sifu.store.plain import read_plain
from sifu.store.rows import PARTICIPATION_DTYPE, NodeRow, ParticipationRows
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


@dataclass(frozen=True)
class _Everyone:
    """All participations as they were at a version; `settled` if none of them was still in a transaction."""

    version: tuple[int, int]
    settled: bool
    rows: ParticipationRows


class RunReader:
    """The recorded facts of a run.

    What hardly ever changes in a run (`constants`) is read once and may be handed on to the next reader of the run.
    Nodes and events are only ever added, so only new ones are read. Verification begins with a reader
    that knows nothing yet.
    """

    def __init__(
        self, folder: Path, connection: sqlite3.Connection | None = None, constants: dict[Any, Any] | None = None
    ) -> None:
        self.folder = folder
        self.connection = connection or open_database(folder)
        self._constants = {} if constants is None else constants
        self._known_at: tuple[int, int] | None = None
        self._nodes: tuple[tuple[int, int], dict[int, NodeRow]] | None = None
        self._path: tuple[list[NodeRow], dict[int, int]] = ([], {})
        self._remembered: tuple[tuple[int, int], dict[str, Any]] = ((-1, -1), {})
        self._everyone: _Everyone | None = None
        self._steps: tuple[int, dict[tuple[str, str], int]] = (0, {})
        self.trackers: dict[int, Any] = {}
        """Psi of all clients at some nodes, kept by whoever computed it (`sifu.methods.view`)."""

    @property
    def constants(self) -> dict[Any, Any]:
        """A place for what follows from the run's clients, spec and facts, empty again should one of them change."""
        version = self._version()
        if self._known_at != version:
            known_as = tuple(self.value(key) for key in ("run", "clients_digest", "spec", "facts"))
            if self._constants.get("known as") != known_as:
                self._constants.clear()
                self.trackers.clear()  # each holds as many clients as there were
                self._constants["known as"] = known_as
            self._known_at = version
        return self._constants

    def take_over(self, earlier: RunReader) -> None:
        """Use what another reader worked out; the caller knows that nothing was written since."""
        self._remembered = (self._version(), earlier._remembered[1])
        self._nodes = None if earlier._nodes is None else (self._version(), earlier._nodes[1])
        self._everyone = None if earlier._everyone is None else replace(earlier._everyone, version=self._version())
        self._steps, self.trackers = earlier._steps, earlier.trackers

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
        except UNUSABLE as error:
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
        """Every client the run knows, by index; read once."""
        constants = self.constants
        if "clients" not in constants:
            constants["clients"] = self.read_clients()
        found: tuple[ClientProfile, ...] = constants["clients"]
        return found

    def read_clients(self) -> tuple[ClientProfile, ...]:
        """Every client the run knows, by index, as the table has them now."""
        rows = self.query("SELECT name, samples, local_steps, smoothness, curvature FROM clients ORDER BY client")
        return tuple(ClientProfile(*row) for row in rows)

    def joined(self) -> list[int]:
        """The events by which clients joined later, one client each, in the order of their indices."""
        return [int(row[0]) for row in self.query("SELECT seq FROM events WHERE kind = ? ORDER BY seq", (JOINED,))]

    def node_rows(self, first: int = 0, last: int | None = None) -> list[NodeRow]:
        """Nodes by number, the cut ones too; those of all times are read once."""
        if first > 0 or last is not None:
            return self._read_nodes(first, 2**62 if last is None else last)
        return list(self.nodes_by_number().values())

    def _version(self) -> tuple[int, int]:
        """Changes whenever something is written: the first when another connection does, the second when this one."""
        return int(self.query("PRAGMA data_version")[0][0]), self.connection.total_changes

    def remembered(self, key: str, make: Callable[[], Any]) -> Any:
        """What `make` gives, worked out once as long as nothing is written."""
        version = self._version()
        if self._remembered[0] != version:
            self._remembered = (version, {})
        if key not in self._remembered[1]:
            self._remembered[1][key] = make()
        return self._remembered[1][key]

    def nodes_by_number(self) -> dict[int, NodeRow]:
        """Every node by its number, in order; not to be changed by the caller."""
        version = self._version()
        if self._nodes is None or self._nodes[0] != version:
            known = {} if self._nodes is None else self._nodes[1]
            count, largest = self.query(
                "SELECT COUNT(*), MAX(node) FROM nodes WHERE node >= 0 AND node < ?", (len(known),)
            )[0]
            if known and (count != len(known) or largest != count - 1):
                known, self._path = {}, ([], {})  # not what was only added to: read all of it
            known = known | {row.node.node: row for row in self._read_nodes(len(known), 2**62)}
            self._nodes = (version, known)
        return self._nodes[1]

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
        by_number = self.nodes_by_number()
        known, depths = self._path
        result: list[NodeRow] = []
        current: int | None = self.tip if tip is None else tip
        while current is not None and current not in depths:
            if current not in by_number or len(result) > len(by_number):
                raise RunDamagedError(f"the history is broken: node {current} is missing or repeated")
            row = by_number[current]
            result.append(row)
            current = row.node.parent
        # Most paths go on from one that was walked before: a node's parent never changes.
        path = ([] if current is None else known[: depths[current] + 1]) + result[::-1]
        if result:
            self._path = (path, {row.node.node: depth for depth, row in enumerate(path)})
        return list(path)

    def participation(self, clients: Sequence[int] | None = None, first: int | None = None) -> ParticipationRows:
        """Who took part, by (node, client): of some clients, or of all; from node `first` on."""
        sql = "SELECT node, client, samples, drift FROM participation"
        if clients is not None:
            sql += f" WHERE client IN ({','.join(str(int(client)) for client in clients)})"
        elif first is not None:
            sql += f" WHERE node >= {int(first)}"
        try:
            # Straight into an array: as tuples a million rows would take hundreds of megabytes.
            found = np.fromiter(self.connection.execute(sql), dtype=PARTICIPATION_DTYPE)
        except UNUSABLE as error:
            raise RunDamagedError(f"{self.folder} is damaged: {error}. Restore it from a backup.") from error
        return ParticipationRows(
            found["node"].astype(np.int64),
            found["client"].astype(np.int64),
            found["samples"].astype(np.int64),
            found["drift"].astype(np.float64),
        ).sorted()

    def everyone(self) -> ParticipationRows:
        """All participations by (node, client); rows are only ever added, so only new ones are read."""
        version = self._version()
        known = self._everyone
        if known is not None and known.version == version:
            return known.rows
        # Another connection may have changed what was there, and what was read in a transaction may be taken back.
        earlier = known.rows if known and known.settled and known.version[0] == version[0] else None
        first = int(earlier.nodes[-1]) + 1 if earlier is not None and earlier.nodes.size else None
        rows = self.participation(first=first)
        if earlier is not None and first is not None:
            rows = ParticipationRows.concatenate([earlier, rows])
        self._everyone = _Everyone(version, not self.connection.in_transaction, rows)
        return rows

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
        return list(self.remembered("requests", self._read_requests))

    def _read_requests(self) -> list[RequestRow]:
        columns = ", ".join(RequestRow.__dataclass_fields__)
        rows = self.query(f"SELECT {columns} FROM requests")
        parsed = [_request_row(row) for row in rows]
        steps = self.steps()
        return sorted(parsed, key=lambda one: steps.get(("request received", one.request), 0))

    def steps(self) -> dict[tuple[str, str], int]:
        """The event of each (kind, request); events are only ever added, so each is read once."""
        after, known = self._steps
        rows = self.query(
            "SELECT seq, kind, payload FROM events WHERE seq > ? AND kind IN "
            "('request received', 'rolled back', 'request done') ORDER BY seq",
            (after,),
        )
        for seq, kind, payload in rows:
            found = json.loads(payload)["request"]
            known.setdefault((kind, found["request"] if kind == "request received" else found), seq)
            after = max(after, seq)
        self._steps = (after, known)
        return known

    def payload(self, seq: int) -> dict[str, Any]:
        """What an event says."""
        rows = self.query("SELECT payload FROM events WHERE seq = ?", (seq,))
        if not rows:
            raise RunDamagedError(f"{self.folder} is damaged: its ledger has no event {seq}")
        content: dict[str, Any] = json.loads(rows[0][0])
        return content

    def last_event(self) -> tuple[int, str]:
        """Number and hash of the last event."""
        seq, found = self.query("SELECT seq, hash FROM events ORDER BY seq DESC LIMIT 1")[0]
        return int(seq), bytes(found).hex()

    def subjects(self) -> list[SubjectRow]:
        """Everyone forgotten so far, in order."""
        return list(self.remembered("subjects", self._read_subjects))

    def _read_subjects(self) -> list[SubjectRow]:
        rows = self.query("SELECT subject, request, clients FROM subjects ORDER BY subject")
        return [SubjectRow(int(a), str(b), tuple(json.loads(c))) for a, b, c in rows]

    def charges(self) -> list[ChargeRow]:
        """What each noise edge cost each subject."""
        return list(self.remembered("charges", self._read_charges))

    def _read_charges(self) -> list[ChargeRow]:
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

    def latest_events(self, kinds: Sequence[str], most: int) -> list[tuple[str, str, dict[str, Any]]]:
        """Time, kind and payload of the latest events of some kinds, in their order."""
        marks = ", ".join("?" * len(kinds))
        rows = self.query(
            f"SELECT time, kind, payload FROM events WHERE kind IN ({marks}) ORDER BY seq DESC LIMIT ?", (*kinds, most)
        )
        return [(str(a), str(b), json.loads(c)) for a, b, c in reversed(list(rows))]

    def certificates(self, request: str | None = None) -> dict[tuple[str, str], str]:
        """The signed certificates as JSON text, by (request, form): all of them, or those of one request."""
        where, values = ("", ()) if request is None else (" WHERE request = ?", (request,))
        rows = self.query(f"SELECT request, form, content FROM certificates{where}", values)
        return {(a, b): c for a, b, c in rows}

    def signs_of_an_older_database(self) -> Iterator[str]:
        """What lies beside the database and speaks of events that it does not have."""
        hashes = {int(seq): bytes(found).hex() for seq, found in self.query("SELECT seq, hash FROM events")}

        def known(seq: int, found: str) -> bool:
            return hashes.get(seq) == found

        path = self.folder / HEAD_FILE
        if path.is_file():
            seq, _, found = path.read_text(encoding="utf-8", errors="replace").strip().partition(":")
            if not (seq.isdecimal() and len(seq) < 19 and known(int(seq), found)):
                yield f"the file {HEAD_FILE} speaks of event {seq[:12]}, which the database has not, or another"
        for certificate in sorted((self.folder / CERTIFICATES).glob("*.json")):
            try:
                ledger = json.loads(read_plain(certificate))["body"]["ledger"]
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
