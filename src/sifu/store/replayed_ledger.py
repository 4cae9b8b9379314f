"""Replay of the ledger from its first event, for checks that need an earlier state of the run.

The replay depends only on the events, never on the current tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from sifu.core.ledger import Event
from sifu.store.projection import KEYS, ROWS, Tables, changes, read_row
from sifu.store.reader import RunReader


class ReplayedTables:
    """State of the tables in `projection.KEYS` after the events applied so far. Initially, all tables are empty."""

    def __init__(self) -> None:
        self.rows: Tables = {table: {} for table in KEYS}

    def copy(self) -> ReplayedTables:
        """Return a copy that later events do not change."""
        copied = ReplayedTables()
        copied.rows = {table: {key: dict(row) for key, row in rows.items()} for table, rows in self.rows.items()}
        return copied

    def apply(self, event: Event) -> None:
        """Apply the changes of an event."""
        for change in changes(event.kind, event.time, event.content):
            if change.values is None:
                self.rows[change.table].pop(change.key, None)
            else:
                self.rows[change.table].setdefault(change.key, {}).update(change.values)

    def read(self, table: str) -> list[Any]:
        """Return the row objects of a table at this moment of the ledger; columns not yet set are None."""
        keys, empty = KEYS[table], dict.fromkeys(ROWS[table].__dataclass_fields__)
        return [
            read_row(table, empty | dict(zip(keys, key, strict=True)) | row) for key, row in self.rows[table].items()
        ]

    def run_value(self, key: str, default: str) -> str:
        """Return a value of the `run` table."""
        return str(self.rows["run"].get((key,), {}).get("value", default))

    @property
    def tip(self) -> int:
        """Node of the current model, or -1 if there is none yet."""
        return int(self.run_value("tip", "-1"))

    @property
    def client_count(self) -> int:
        """Number of clients that have joined."""
        return int(self.run_value("client_count", "0"))

    @property
    def model_nodes(self) -> set[int]:
        """Nodes whose models are stored."""
        return {int(node) for (node,) in self.rows["models"]}

    @property
    def forgotten(self) -> set[int]:
        """Clients that were forgotten."""
        return {client for row in self.read("subjects") for client in row.clients}


class ReplayedLedger:
    """The events of a run and values derived from them."""

    def __init__(self, events: list[Event]) -> None:
        self.events = events
        self._last: ReplayedTables | None = None

    @staticmethod
    def of(reader: RunReader) -> ReplayedLedger:
        """Return the replayed ledger of a run, cached until something is written."""
        ledger: ReplayedLedger = reader.remembered("replayed ledger", lambda: ReplayedLedger(reader.events()))
        return ledger

    def moments(self, begin: int = 0, before: ReplayedTables | None = None) -> Iterator[tuple[Event, ReplayedTables]]:
        """Yield each event with the tables just before it; the next step updates the same tables."""
        tables = ReplayedTables() if before is None else before
        for event in self.events[begin:]:
            yield event, tables
            tables.apply(event)
        self._last = tables

    @property
    def tables(self) -> ReplayedTables:
        """The tables after the last event."""
        if self._last is None:
            for _ in self.moments():
                pass
        assert self._last is not None
        return self._last

    @cached_property
    def tips(self) -> dict[int, int]:
        """Node of the current model after each event, by event number."""
        tips, tip = {}, -1
        for event in self.events:
            tip = tips[event.seq] = int(event.content.get("run", {}).get("tip", tip))
        return tips

    @cached_property
    def model_digests(self) -> dict[int, str]:
        """Digest of every model ever recorded, by node; the bytes of a node's model never change."""
        return {int(row["node"]): str(row["digest"]) for row in self.recorded("models")}

    @cached_property
    def certificates(self) -> dict[tuple[str, str], tuple[str, str]]:
        """Digest of each certificate and the operator's key when it was issued, by request and form."""
        issued, public_key = {}, ""
        for event in self.events:
            content = event.content
            public_key = content.get("run", {}).get("public_key", public_key)
            for form, digest in content.get("certificates", {}).items():
                issued[(content["request"], form)] = (digest, public_key)
        return issued

    def recorded(self, table: str) -> Iterator[dict[str, Any]]:
        """Yield every row that events list for a table, in order."""
        for event in self.events:
            yield from event.content.get(table, [])
