"""Row types of the small tables, the changes that an event makes to them, and the content of new events."""

from __future__ import annotations

import functools
import itertools
import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from sifu.core.layout import Vector
from sifu.core.ledger import canonical_json
from sifu.core.request_terms import Terms
from sifu.errors import InputError
from sifu.store.files import STORED
from sifu.store.history_tables import ParticipationRows, node_values
from sifu.store.statistics_files import StatisticsRow
from sifu.theory.facts import ClientProfile
from sifu.theory.history import PathNode


@dataclass(frozen=True)
class RequestRow:
    """A row of `requests`.

    `method` is the requested method (`terms.method`) until the request is executed, and from then on the method that
    was used.
    """

    request: str
    status: str
    terms: Terms
    method: str
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
    def clients(self) -> tuple[str, ...]:
        """Names of the clients to forget."""
        return self.terms.clients

    @property
    def records(self) -> tuple[int, ...]:
        """Row numbers of the records to forget, of one client, or an empty tuple if clients are forgotten entirely."""
        return self.terms.records

    @property
    def waits(self) -> bool:
        """True while the request waits for its execution."""
        return self.status in WAITING

    @property
    def is_open(self) -> bool:
        """True while the request waits or runs."""
        return self.waits or self.status == "running"

    @property
    def was_ended(self) -> bool:
        """True if the request was refused or withdrawn."""
        return self.status in ENDED


@dataclass(frozen=True)
class SubjectRow:
    """A row of `subjects`: indices of the clients that a request forgets together."""

    subject: int
    request: str
    clients: tuple[int, ...]


@dataclass(frozen=True)
class ModelRow:
    """A row of `models`: a stored model. Requests can roll back to `kept` models. The current model always exists."""

    node: int
    kept: bool
    bytes: int
    digest: str
    nonce: str
    psi_max: float


@dataclass(frozen=True)
class GroupModelRow:
    """A row of `group_models`: a group's model after a number of rounds of separate training.

    `members` are all clients that belonged to the group in any of these rounds, `samples` the sum of their samples.
    """

    node: int
    grp: int
    rounds: int
    samples: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class MergeRow:
    """A row of `merges`: one of the group models from which the model of a node was made."""

    node: int
    grp: int
    source_node: int
    samples: int


@dataclass(frozen=True)
class EvaluationRow:
    """A row of `evaluations`: the result of a node's model on the samples of a subset of clients."""

    node: int
    subset: str
    samples: int
    accuracy: float
    loss: float


@dataclass(frozen=True)
class ChargeRow:
    """A row of `charges`: the Psi of a subject that added noise had to hide, and the budget charged for it."""

    noise_node: int
    subject: int
    psi: str
    charge: float


@dataclass(frozen=True)
class RejectionRow:
    """A row of `rejections`: a rejected reply of a client, with the reason."""

    branch: int
    round: int
    number: int
    client: str
    reason: str
    left_out: bool


KEYS: dict[str, tuple[str, ...]] = {
    "run": ("key",),
    "evaluations": ("node", "subset"),
    "models": ("node",),
    "statistics": ("file",),
    "group_models": ("node",),
    "merges": ("node", "grp"),
    "requests": ("request",),
    "subjects": ("subject",),
    "charges": ("noise_node", "subject"),
    "rejections": ("branch", "round", "number"),
}
"""Primary keys of the tables that events write."""
ROWS: dict[str, Any] = {
    "models": ModelRow,
    "statistics": StatisticsRow,
    "group_models": GroupModelRow,
    "merges": MergeRow,
    "evaluations": EvaluationRow,
    "rejections": RejectionRow,
    "requests": RequestRow,
    "subjects": SubjectRow,
    "charges": ChargeRow,
}
"""Row type of each table; every column is a field of the same name."""
LISTED = (*STORED, "group_models", "merges", "evaluations", "rejections")
"""Tables whose new rows are listed in events, under the name of the table as payload key."""


@functools.lru_cache(4096)
def _read_terms(text: str) -> Terms:
    """Parse the terms of a request.

    Raises:
        ValueError: If the stored terms are invalid. They were then changed by hand, so this is not an `InputError`.
    """
    try:
        return Terms.from_mapping(json.loads(text))
    except InputError as error:
        raise ValueError(f"requests.terms: {error}") from error


JSON_PARSERS: dict[Any, Callable[[Any], Any]] = {
    "tuple[str, ...]": lambda text: tuple(json.loads(text)),
    "tuple[int, ...]": lambda text: tuple(json.loads(text)),
    "Terms": _read_terms,
}
"""Parsers of JSON columns, by the type of the field."""
PARSERS = JSON_PARSERS | {"bool": bool}
"""Parsers of columns, by the type of the field; other types are used as SQLite returns them."""
PARSED = {
    table: {column.name: PARSERS[column.type] for column in fields(row) if column.type in PARSERS}
    for table, row in ROWS.items()
}
"""Columns of each table that need a parser."""
WRITTEN = {table: {column.name: column.type in JSON_PARSERS for column in fields(ROWS[table])} for table in LISTED}
"""Columns of each table in `LISTED`, and whether each column holds JSON."""


def read_row(table: str, values: dict[str, Any]) -> Any:
    """Build the row object of a table from the values of its columns."""
    return ROWS[table](**values | {name: parse(values[name]) for name, parse in PARSED[table].items()})


WAITING = ("received", "verified", "planned")
"""Statuses of a request that waits for its execution."""
ENDED = ("refused", "withdrawn")
"""Statuses of a request that was ended without a certificate."""
ENDINGS = ("request refused", "request withdrawn")
"""Kinds of the events that end a request without a certificate."""
STATUS_AFTER = {f"request {status}": status for status in (*WAITING, "done", *ENDED)} | {"rolled back": "running"}
"""New status of a request, by the kind of event that changes it."""

Key = tuple[Any, ...]
Tables = dict[str, dict[Key, dict[str, Any]]]


@dataclass(frozen=True)
class Change:
    """Change of one row: set `values` in the row of `table` with this key, or delete the row if `values` is None.

    A row that does not exist is created.
    """

    table: str
    key: Key
    values: dict[str, Any] | None


def changes(kind: str, time: str, payload: dict[str, Any]) -> Iterator[Change]:
    """Yield the row changes of one event."""
    for key, value in payload.get("run", {}).items():
        yield Change("run", (key,), {"value": value if isinstance(value, str) else canonical_json(value).decode()})
    for table in LISTED:
        for key in payload.get(f"dropped_{table}", []) if table in STORED else ():
            yield Change(table, (key,), None)
        for row in payload.get(table, []):
            if table == "models":
                row = {"psi_max": payload.get("psi_max", {}).get(str(row["node"]), 0.0)} | row
            columns = WRITTEN[table].items()
            values = {name: canonical_json(row[name]).decode() if is_json else row[name] for name, is_json in columns}
            yield Change(table, tuple(values.pop(key) for key in KEYS[table]), values)
    if kind == "request received":
        terms = dict(payload["request"])
        request, deadline_days = terms.pop("request"), terms.pop("deadline_days")
        values = {"terms": canonical_json(terms).decode(), "method": terms["method"], "deadline_days": deadline_days}
        yield Change("requests", (request,), values | {"status": "received", "received": time})
    elif kind == "rolled back":
        yield Change("requests", (payload["request"],), payload["choice"] | {"status": "running", "carried_out": time})
        for row in payload["subjects"]:
            clients = canonical_json(row["clients"]).decode()
            yield Change("subjects", (row["subject"],), {"request": payload["request"], "clients": clients})
        for row in payload["charges"]:
            key = (payload["choice"]["noise_node"], row["subject"])
            yield Change("charges", key, {"psi": row["psi"], "charge": row["charge"]})
    elif kind == "request done":
        values = {"status": "done", "final_node": payload["final_node"], "level": payload["level"], "finished": time}
        yield Change("requests", (payload["request"],), values)
    elif kind in STATUS_AFTER:
        yield Change("requests", (payload["request"],), {"status": STATUS_AFTER[kind]})


_ROWS_TOGETHER = 200
"""Participations per INSERT statement. Single rows would be slower, as threads may be switched between statements."""


@dataclass(frozen=True)
class NewRows:
    """Rows that one event adds to the two large tables."""

    nodes: Sequence[PathNode] = ()
    participation: ParticipationRows = field(default_factory=ParticipationRows.empty)


@dataclass(frozen=True)
class NewModel:
    """A model to be written with an event."""

    node: int
    vector: Vector
    kept: bool
    psi_max: float = 0.0


def insert_clients(connection: sqlite3.Connection, clients: Iterable[tuple[int, ClientProfile]]) -> None:
    """Insert clients with their indices into the table of clients."""
    connection.executemany(
        "INSERT INTO clients VALUES (?, ?, ?, ?, ?)",
        [(index, *vars(client).values()) for index, client in clients],
    )


def insert_rows(connection: sqlite3.Connection, rows: NewRows) -> None:
    """Insert rows into the two large tables."""
    connection.executemany(f"INSERT INTO nodes VALUES ({','.join('?' * 13)})", map(node_values, rows.nodes))
    columns = (column.tolist() for column in rows.participation.columns)
    values = list(itertools.chain.from_iterable(zip(*columns, strict=True)))
    for first in range(0, len(values), 4 * _ROWS_TOGETHER):
        together = values[first : first + 4 * _ROWS_TOGETHER]
        marks = ", ".join(["(?, ?, ?, ?)"] * (len(together) // 4))
        connection.execute(f"INSERT INTO participation VALUES {marks}", together)


def apply_change(connection: sqlite3.Connection, change: Change) -> None:
    """Insert, update or delete one row."""
    key_columns = KEYS[change.table]
    where = " AND ".join(f"{column} = ?" for column in key_columns)
    if change.values is None:
        connection.execute(f"DELETE FROM {change.table} WHERE {where}", change.key)
        return
    exists = connection.execute(f"SELECT 1 FROM {change.table} WHERE {where}", change.key).fetchone()
    if exists:
        assignments = ", ".join(f"{column} = ?" for column in change.values)
        connection.execute(
            f"UPDATE {change.table} SET {assignments} WHERE {where}", (*change.values.values(), *change.key)
        )
    else:
        columns = ", ".join((*key_columns, *change.values))
        marks = ", ".join("?" * (len(key_columns) + len(change.values)))
        connection.execute(
            f"INSERT INTO {change.table} ({columns}) VALUES ({marks})", (*change.key, *change.values.values())
        )


@dataclass(frozen=True)
class NewEvent:
    """Content of an event that `RunWriter.record` writes in one transaction.

    Attributes:
        kind: Kind of the event.
        payload: Content of the event, to which `content` and the writer add the fields below.
        rows: New rows of the large tables.
        models: Models to write.
        dropped_models: Nodes of the models to delete.
        statistics: Rows of statistics files that exist already (`store.statistics_files`).
        dropped_statistics: Names of the statistics files to delete.
        evaluations: New evaluations.
        certificates: Certificates by request and form.
        joined: A client that joins the run.
        joined_digest: Digest of the samples of this client.
        for_good: True to erase dropped content also from the database's free pages and log, and to delete the report.
    """

    kind: str
    payload: Mapping[str, Any]
    rows: NewRows = field(default_factory=NewRows)
    models: Sequence[NewModel] = ()
    dropped_models: Sequence[int] = ()
    statistics: Sequence[dict[str, Any]] = ()
    dropped_statistics: Sequence[str] = ()
    evaluations: Sequence[EvaluationRow] = ()
    certificates: Mapping[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    joined: ClientProfile | None = None
    joined_digest: str | None = None
    for_good: bool = False

    def content(self) -> dict[str, Any]:
        """Return the payload with all fields that do not depend on the files to write."""
        parts = {
            "dropped_models": [int(node) for node in self.dropped_models],
            "statistics": list(self.statistics),
            "dropped_statistics": list(self.dropped_statistics),
            "evaluations": [asdict(row) for row in self.evaluations],
        }
        return {**self.payload, **{name: part for name, part in parts.items() if part}}

    def files(self) -> Iterator[tuple[str, int | str]]:
        """Yield the kind and key of each file that the event adds to the run; some files may already exist."""
        yield from (("models", model.node) for model in self.models)
        yield from (("statistics", row["file"]) for row in self.statistics)
