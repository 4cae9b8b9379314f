"""Changes of a finished run by someone with the key, who keeps everything else consistent and signs it all again.

One value of an event, or of a row that no event writes, becomes another; tables, chain, signatures and certificates
follow from it. Such a change may be a lie that nothing contradicts, so the law is that both verifiers judge it alike,
and that what was caught once (`caught_lies.json`) stays caught.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from forged_runs import Edit, execute, rebuild_chain, resign_everything
from sifu.errors import SifuError
from sifu.store.projection import KEYS
from sifu.store.reader import RunReader
from sifu.store.replayed_ledger import ReplayedTables
from tampering import DATABASE, KINDS, Change, leaves, tables_of
from tampering import other_values as all_values

DERIVED = {"events", "run", "certificates", *KEYS}
"""Tables that follow from the events."""
FROM_ANOTHER_KEY = ("approvals",)
"""Runs whose earlier events were signed with a key that was replaced, so nobody can sign them again."""
READ_BY_ONE = (
    "signed run-created:run.spec.*",
    "signed run-created:run.layout.*",
    "signed run-created:run.facts.*",
    "signed *:run.client_count * space",
)
"""Settings that one of the verifiers reads in another form, so that nonsense in them stops only one."""


def other_values(value: Any, kind: str, nullable: bool) -> Iterator[tuple[str, Any]]:
    """Yield values that differ by more than a rounding error, which each verifier tolerates in its own way."""
    return ((how, new) for how, new in all_values(value, kind, nullable) if how != "near")


def signed_changes(folder: Path) -> Iterator[Change]:
    """Yield the changes of a run; their names begin with `signed`, the place in the record, and a number."""
    for table in tables_of(folder):
        for place, (column, kind, nullable) in enumerate(table.columns):
            if table.name not in DERIVED and place not in table.keys:
                for number, row in enumerate(table.rows):
                    for how, new in other_values(row[place], kind, nullable):
                        sql = f"UPDATE {table.name} SET {column} = ? WHERE {table.where}"
                        name = f"signed {table.name}.{column} {number} {how}"
                        yield Change(name, _signed_row(sql, (new, *table.key(row))))
    with closing(sqlite3.connect(folder / DATABASE)) as connection:
        events = connection.execute("SELECT seq, kind, payload FROM events ORDER BY seq").fetchall()
    for seq, kind, payload in events:
        for path, value in leaves(json.loads(payload)):
            place = ".".join("#" if isinstance(step, int) or step.isdigit() else step for step in path)
            news = [("not", not value)] if isinstance(value, bool) else other_values(value, KINDS[type(value)], False)
            for how, new in news:
                name = f"signed {kind.replace(' ', '-')}:{place} {seq} {how}"
                yield Change(name, _signed_event(seq, path, new))


def places_of(folders: dict[str, Path]) -> dict[str, dict[str, dict[str, Change]]]:
    """Return the signed changes by place in the record, run, and how the last value at this place changes."""
    places = dict[str, dict[str, dict[str, Change]]]()
    for run, folder in folders.items():
        for change in signed_changes(folder) if run not in FROM_ANOTHER_KEY else ():
            _, place, _, how = change.name.split(" ")
            places.setdefault(place, {}).setdefault(run, {})[how] = change  # a later row replaces an earlier one
    return places


def _signed_row(sql: str, values: tuple[Any, ...]) -> Callable[[Path], bool]:
    def edit(folder: Path) -> None:
        with closing(sqlite3.connect(folder / DATABASE, isolation_level=None)) as connection:
            connection.execute("PRAGMA ignore_check_constraints=ON")
            connection.execute(sql, values)
        rebuild_chain(folder)

    return lambda folder: _signed_again(folder, edit)


def _signed_event(seq: int, path: Collection[Any], new: Any) -> Callable[[Path], bool]:
    def edit(folder: Path) -> None:
        rebuild_chain(folder, _edit_of(seq, tuple(path), new))
        _derive_tables(folder)

    return lambda folder: _signed_again(folder, edit)


def _signed_again(folder: Path, edit: Callable[[Path], None]) -> bool:
    """Edit a run and issue its certificates again; return False for a record that our own tools cannot read then."""
    try:
        edit(folder)
        resign_everything(folder)
    except (SifuError, ArithmeticError, LookupError, TypeError, ValueError, sqlite3.Error):
        return False
    return True


def _edit_of(number: int, path: tuple[Any, ...], new: Any) -> Edit:
    """Return an edit of one value of the event with this number."""
    met = 0

    def edit(_: str, content: dict[str, Any]) -> None:
        nonlocal met
        met += 1
        if met == number:
            inner: Any = content
            for step in path[:-1]:
                inner = inner[step]
            inner[path[-1]] = new

    return edit


def _derive_tables(folder: Path) -> None:
    """Write the tables that the events lead to."""
    tables = ReplayedTables()
    with closing(RunReader(folder)) as reader:
        for event in reader.events():
            tables.apply(event)
    execute(folder, *(f"DELETE FROM {table}" for table in KEYS if table != "run"))
    with closing(sqlite3.connect(folder / DATABASE, isolation_level=None)) as connection:
        connection.execute("PRAGMA ignore_check_constraints=ON")
        for table, rows in tables.rows.items():
            for key, row in rows.items():
                names = [*KEYS[table], *row]
                sql = f"INSERT OR REPLACE INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
                connection.execute(sql, (*key, *row.values()))
