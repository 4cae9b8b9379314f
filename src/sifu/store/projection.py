"""What a row of each small table says: requests, subjects, charges, models, evaluations, comparisons, rejections.

And what an event is before it is recorded: all that becomes durable, or goes away, together with it.
"""

from __future__ import annotations

import functools
import itertools
import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from sifu.core.layout import ModelLayout, Vector
from sifu.core.ledger import LOCAL_RATES, canonical_json
from sifu.core.request_terms import RequestTerms
from sifu.errors import InputError
from sifu.store.files import STORED
from sifu.store.history_tables import NodeRow, ParticipationRows
from sifu.store.statistics_files import NewUpdates, StatisticsRow, UpdatesRow
from sifu.theory.facts import ClientProfile


@dataclass(frozen=True)
class RequestRow:
    """A row of `requests`; `method` is what was asked for (`terms.method`) until the request is carried out by one."""

    request: str
    status: str
    terms: RequestTerms
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
        """The names of those to forget."""
        return self.terms.clients

    @property
    def records(self) -> tuple[int, ...]:
        """The rows to forget of the one client; empty where clients are forgotten whole."""
        return self.terms.records

    @property
    def waits(self) -> bool:
        """Whether it is still to be carried out."""
        return self.status in ("received", "verified", "planned")


@dataclass(frozen=True)
class SubjectRow:
    """A row of `subjects`: clients that a request forgets together, by number."""

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
class GroupModelRow:
    """A row of `group_models`: a group's model after a number of rounds apart.

    `members` are everyone who was in the group in any of these rounds, `samples` the sum of theirs.
    """

    node: int
    grp: int
    rounds: int
    samples: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class MergeRow:
    """A row of `merges`: one of the group models that the model of a node was made of."""

    node: int
    grp: int
    source_node: int
    samples: int


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


KEYS: dict[str, tuple[str, ...]] = {
    "run": ("key",),
    "evaluations": ("node", "subset"),
    "models": ("node",),
    "updates": ("file",),
    "statistics": ("file",),
    "group_models": ("node",),
    "merges": ("node", "grp"),
    "requests": ("request",),
    "subjects": ("subject",),
    "charges": ("noise_node", "subject"),
    "comparisons": ("request", "method"),
    "rejections": ("branch", "round", "number"),
}
"""The tables an event writes, with their primary keys."""
ROWS: dict[str, Any] = {
    "models": ModelRow,
    "updates": UpdatesRow,
    "statistics": StatisticsRow,
    "group_models": GroupModelRow,
    "merges": MergeRow,
    "evaluations": EvaluationRow,
    "rejections": RejectionRow,
    "requests": RequestRow,
    "subjects": SubjectRow,
    "charges": ChargeRow,
    "comparisons": ComparisonRow,
}
"""What a row of each of them is read as: every column is a field of the same name."""
LISTED = (*STORED, "group_models", "merges", "evaluations", "rejections")
"""Those whose rows events list, each under the table's name."""


@functools.lru_cache(4096)
def _read_terms(text: str) -> RequestTerms:
    """The terms of a request; stored ones that cannot be were changed by hand, which is no mistake of the caller's."""
    try:
        return RequestTerms.from_mapping(json.loads(text))
    except InputError as error:
        raise ValueError(f"requests.terms: {error}") from error


JSON_PARSERS: dict[Any, Callable[[Any], Any]] = {
    "tuple[str, ...]": lambda text: tuple(json.loads(text)),
    "tuple[int, ...]": lambda text: tuple(json.loads(text)),
    "dict[int, str]": lambda text: {int(key): value for key, value in json.loads(text).items()},
    "RequestTerms": _read_terms,
}
"""How a column of JSON is read whose field is of this type."""
PARSERS = JSON_PARSERS | {"bool": bool}
"""How a column is read whose field is of this type; all others are as SQLite gives them."""
PARSED = {
    table: {column.name: PARSERS[column.type] for column in fields(row) if column.type in PARSERS}
    for table, row in ROWS.items()
}
"""The columns of each table that are read like that."""
WRITTEN = {table: {column.name: column.type in JSON_PARSERS for column in fields(ROWS[table])} for table in LISTED}
"""Every column of the tables whose rows events list, and whether it is JSON."""


def read_row(table: str, values: dict[str, Any]) -> Any:
    """A row of a table, of its type."""
    return ROWS[table](**values | {name: parse(values[name]) for name, parse in PARSED[table].items()})


DECIDED = {f"request {status}": status for status in ("verified", "planned", "refused", "withdrawn")}
"""Events that change nothing of a request but its status."""

Key = tuple[Any, ...]
Tables = dict[str, dict[Key, dict[str, Any]]]


@dataclass(frozen=True)
class Change:
    """Set `values` in the row of `table` with this key, making it if need be; None deletes the row."""

    table: str
    key: Key
    values: dict[str, Any] | None


def changes(kind: str, time: str, payload: dict[str, Any]) -> Iterator[Change]:
    """The row changes of one event."""
    for key, value in payload.get("run", {}).items():
        yield Change("run", (key,), {"value": value if isinstance(value, str) else canonical_json(value).decode()})
    if LOCAL_RATES in payload:
        yield Change("run", (LOCAL_RATES,), {"value": canonical_json(payload[LOCAL_RATES]).decode()})
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
    elif kind in DECIDED:
        yield Change("requests", (payload["request"],), {"status": DECIDED[kind]})
    elif kind == "comparison":
        values = {key: payload[key] for key in ("rounds", "reached", "accuracy")}
        values["forgotten_accuracy"] = payload.get("forgotten_accuracy")
        yield Change("comparisons", (payload["request"], payload["method"]), values)


_ROWS_TOGETHER = 200
"""Participations in one statement: between two of them other threads may run, which costs more than a row."""


@dataclass(frozen=True)
class NewRows:
    """Rows of the three large tables that one event adds."""

    nodes: Sequence[NodeRow] = ()
    participation: ParticipationRows = field(default_factory=ParticipationRows.empty)
    grams: Sequence[tuple[int, bytes]] = ()


@dataclass(frozen=True)
class NewModel:
    """A model to be written with an event."""

    node: int
    vector: Vector
    kept: bool
    psi_max: float = 0.0
    layout: ModelLayout | None = None
    """Where it is not that of the run: a trunk that a group tunes has its own."""


def insert_clients(connection: sqlite3.Connection, clients: Iterable[tuple[int, ClientProfile]]) -> None:
    """Into the table of clients, each with its index."""
    connection.executemany(
        "INSERT INTO clients VALUES (?, ?, ?, ?, ?, ?)",
        [(index, *vars(client).values()) for index, client in clients],
    )


def insert_rows(connection: sqlite3.Connection, rows: NewRows) -> None:
    """Into the three large tables."""
    connection.executemany(f"INSERT INTO nodes VALUES ({','.join('?' * 15)})", [row.values() for row in rows.nodes])
    columns = (column.tolist() for column in rows.participation.columns)
    values = list(itertools.chain.from_iterable(zip(*columns, strict=True)))
    for first in range(0, len(values), 4 * _ROWS_TOGETHER):
        together = values[first : first + 4 * _ROWS_TOGETHER]
        marks = ", ".join(["(?, ?, ?, ?)"] * (len(together) // 4))
        connection.execute(f"INSERT INTO participation VALUES {marks}", together)
    connection.executemany("INSERT INTO grams VALUES (?, ?)", rows.grams)


def apply_change(connection: sqlite3.Connection, change: Change) -> None:
    """Insert, update or delete the row that a change names."""
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
    """What `RunWriter.record` writes in one transaction.

    `statistics` are rows of files that are there already (`store.statistics_files`). `certificates` are by request and
    form. `joined` is a client that the run knows from now on, `joined_digest` that of its samples. `for_good` also
    takes what is dropped out of the free pages and the log of the database, and erases the report.
    """

    kind: str
    payload: Mapping[str, Any]
    rows: NewRows = field(default_factory=NewRows)
    models: Sequence[NewModel] = ()
    dropped_models: Sequence[int] = ()
    updates: Sequence[NewUpdates] = ()
    dropped_updates: Sequence[str] = ()
    statistics: Sequence[dict[str, Any]] = ()
    dropped_statistics: Sequence[str] = ()
    evaluations: Sequence[EvaluationRow] = ()
    certificates: Mapping[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    joined: ClientProfile | None = None
    joined_digest: str | None = None
    for_good: bool = False

    def content(self) -> dict[str, Any]:
        """The payload with what is known before anything is written."""
        parts = {
            "dropped_models": [int(node) for node in self.dropped_models],
            "dropped_updates": list(self.dropped_updates),
            "statistics": list(self.statistics),
            "dropped_statistics": list(self.dropped_statistics),
            "evaluations": [asdict(row) for row in self.evaluations],
        }
        return {**self.payload, **{name: part for name, part in parts.items() if part}}

    def files(self) -> Iterator[tuple[str, int | str]]:
        """Kind and key of the files that are in the run once this is recorded; some may be there already."""
        yield from (("models", model.node) for model in self.models)
        yield from (("updates", updates.file) for updates in self.updates)
        yield from (("statistics", row["file"]) for row in self.statistics)
