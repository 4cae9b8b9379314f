"""Rows and models that an event adds, and how they and its changes go into the tables."""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sifu.core.layout import ModelLayout, Vector
from sifu.store.history_rows import NodeRow, ParticipationRows
from sifu.store.projection import KEYS, Change
from sifu.theory.facts import ClientProfile

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
        [
            (index, client.name, client.samples, client.local_steps, client.smoothness, client.curvature)
            for index, client in clients
        ],
    )


def insert_rows(connection: sqlite3.Connection, rows: NewRows) -> None:
    """Into the three large tables."""
    connection.executemany(f"INSERT INTO nodes VALUES ({','.join('?' * 15)})", [row.values() for row in rows.nodes])
    part = rows.participation
    columns = (part.nodes.tolist(), part.clients.tolist(), part.samples.tolist(), part.drifts.tolist())
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
