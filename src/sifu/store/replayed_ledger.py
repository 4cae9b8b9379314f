"""The ledger gone through from its first event: the tables as each event found them, and what it ever recorded.

Every check that needs the past asks this object. It rests on the events alone, never on what the tables hold now.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from sifu.core.ledger import Event
from sifu.store.projection import KEYS, Tables, changes
from sifu.store.reader import RunReader


class ReplayedTables:
    """The small tables at one moment of the ledger, first without any row."""

    def __init__(self) -> None:
        self.rows: Tables = {table: {} for table in KEYS}

    def copy(self) -> ReplayedTables:
        """The same rows, which later events do not change."""
        copied = ReplayedTables()
        copied.rows = {table: {key: dict(row) for key, row in rows.items()} for table, rows in self.rows.items()}
        return copied

    def apply(self, event: Event) -> None:
        """Change the rows as an event says."""
        for change in changes(event.kind, event.time, event.content):
            if change.values is None:
                self.rows[change.table].pop(change.key, None)
            else:
                self.rows[change.table].setdefault(change.key, {}).update(change.values)

    def run_value(self, key: str, default: str) -> str:
        """A value of the `run` table."""
        return str(self.rows["run"].get((key,), {}).get("value", default))

    @property
    def tip(self) -> int:
        """The node of the current model; -1 before there is one."""
        return int(self.run_value("tip", "-1"))

    @property
    def client_count(self) -> int:
        """How many clients had joined."""
        return int(self.run_value("client_count", "0"))

    @property
    def model_nodes(self) -> set[int]:
        """The nodes whose models were stored."""
        return {int(node) for (node,) in self.rows["models"]}


class ReplayedLedger:
    """The events of a run and what follows from them."""

    def __init__(self, events: list[Event]) -> None:
        self.events = events
        self._last: ReplayedTables | None = None

    @staticmethod
    def of(reader: RunReader) -> ReplayedLedger:
        """The ledger of a run, made once as long as nothing is written."""
        ledger: ReplayedLedger = reader.remembered("replayed ledger", lambda: ReplayedLedger(reader.events()))
        return ledger

    def moments(self, begin: int = 0, before: ReplayedTables | None = None) -> Iterator[tuple[Event, ReplayedTables]]:
        """Every event with the tables just before it. They change with the next step: read them at once.

        A caller that has already replayed the first `begin` events passes the tables `before` the next one.
        """
        tables = ReplayedTables() if before is None else before
        for event in self.events[begin:]:
            yield event, tables
            tables.apply(event)
        self._last = tables

    @property
    def tables(self) -> Tables:
        """The tables after the last event."""
        if self._last is None:
            for _ in self.moments():
                pass
        assert self._last is not None
        return self._last.rows

    @cached_property
    def hashes(self) -> dict[int, str]:
        """The hash of each event, by its number."""
        return {event.seq: event.hash.hex() for event in self.events}

    @cached_property
    def tips(self) -> dict[int, int]:
        """The node of the current model after each event, by its number."""
        tips, tip = {}, -1
        for event in self.events:
            tip = tips[event.seq] = int(event.content.get("run", {}).get("tip", tip))
        return tips

    @cached_property
    def model_digests(self) -> dict[int, str]:
        """Of every model that was ever recorded its digest, by node; the bytes of a node's model never change."""
        return {int(row["node"]): str(row["digest"]) for row in self._recorded("models")}

    @cached_property
    def updates(self) -> list[dict[str, Any]]:
        """Every file of updates that was ever recorded, in order."""
        return list(self._recorded("updates"))

    @cached_property
    def statistics(self) -> list[dict[str, Any]]:
        """Every file of statistics that was ever recorded, in order."""
        return list(self._recorded("statistics"))

    @cached_property
    def certificates(self) -> dict[tuple[str, str], tuple[str, str]]:
        """Digest of each certificate and the operator's key of its time, by request and form."""
        issued, public_key = {}, ""
        for event in self.events:
            content = event.content
            public_key = content.get("run", {}).get("public_key", public_key)
            for form, digest in content.get("certificates", {}).items():
                issued[(content["request"], form)] = (digest, public_key)
        return issued

    def _recorded(self, what: str) -> Iterator[dict[str, Any]]:
        for event in self.events:
            yield from event.content.get(what, [])
