"""Changes to a run folder by someone without the key (other values, rows and fields), and the findings about them.

The tables are enumerated from the database itself, so a new column is covered at once.
"""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from run_tools import Column, columns, connect
from sifu.api import verify_run
from sifu.errors import SifuError

ALIASES = {
    "nodes": r"node|history|rounds",
    "participation": r"participation|rounds",
    "events": r"ledger|event",
    "clients": r"clients:",
    "certificates": r"certificate",
}
"""Patterns by which findings name a table; tables not listed here are named by their own name."""


CRASH = "verification crashed:"


class Pristine:
    """Run folder that is restored after every change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._kept = folder.with_name("kept")
        shutil.copytree(folder, self._kept)

    def restore_database(self) -> None:
        """Restore the original database."""
        for leftover in ("run.db-wal", "run.db-shm"):
            (self.folder / leftover).unlink(missing_ok=True)
        shutil.copyfile(self._kept / "run.db", self.folder / "run.db")

    def restore(self) -> None:
        """Restore the original folder."""
        shutil.rmtree(self.folder)
        shutil.copytree(self._kept, self.folder)


def caught(folder: Path, **held_against: Any) -> list[str]:
    """Return the problems that verification finds, or the message of the error that refuses the run."""
    try:
        return verify_run(folder, **held_against).problems
    except SifuError as error:
        return [str(error)]
    except Exception as error:
        return [f"{CRASH} {type(error).__name__}: {error}"]


def other_values(value: Any, column: Column) -> Iterator[Any]:
    """Yield values that differ slightly or widely; NULL becomes a value, and a nullable value becomes NULL."""
    if value is None:
        yield {"INTEGER": 0, "REAL": 0.0, "TEXT": "", "BLOB": b""}[column.kind]
        yield {"INTEGER": 7, "REAL": 0.125, "TEXT": "x", "BLOB": b"x"}[column.kind]
        return
    if column.nullable:
        yield None
    if isinstance(value, int):
        yield value + 1
        yield value - 1
        yield value + 10**6
    elif value == float("inf"):  # an unknown value becomes a known one
        yield 0.0
        yield 1.5
    elif isinstance(value, float):
        yield value * (1.0 + 2.0**-52) if value else 5e-324
        yield value * 1.5 + 1.0
        yield -value - 1e-9
    elif isinstance(value, bytes):
        for place in {0, len(value) // 2, len(value) - 1}:
            yield value[:place] + bytes([value[place] ^ 1]) + value[place + 1 :]
        yield value[:-1]
        yield value + b"\0"
    else:
        place = len(value) // 2
        yield value[:place] + ("0" if value[place : place + 1] != "0" else "1") + value[place + 1 :]
        yield value + " "
        yield value[:-1]
        if value[:1].isdigit() and value.replace(".", "").isdigit():
            yield repr(float(value) * (1 + 1e-12) + 1e-300)


def spread(rows: list[tuple[Any, ...]], start: int, count: int) -> list[tuple[Any, ...]]:
    """Return a few rows spread over a table; other rows for another `start`."""
    places = sorted({(start + step * len(rows) // count) % len(rows) for step in range(min(count, len(rows)))})
    return [rows[place] for place in places]


def tamper_with_values(pristine: Pristine, table: str, everything: bool) -> tuple[int, list[str]]:
    """Change one value after the other; return the number of changes, and those that were unnoticed or unnamed.

    Unless `everything` is set, try two new values in each of two rows per column, and in one row with NULL if there is
    any.
    """
    pristine.restore_database()
    connection = connect(pristine.folder)
    described = columns(connection, table)
    keys = [column.name for column in described if column.key]
    where = " AND ".join(f"{key} = ?" for key in keys)
    rows = connection.execute(f"SELECT * FROM {table} ORDER BY {', '.join(keys)}").fetchall()
    connection.close()
    tried, wrong = 0, []
    for place, column in enumerate(described):
        chosen = rows if everything or table == "run" else spread(rows, place, 2)
        if not everything:
            chosen = chosen + [row for row in rows if row[place] is None and row not in chosen][:1]
        for row in chosen:
            values = dict(zip([column.name for column in described], row, strict=True))
            variants = list(other_values(row[place], column))
            for new in variants if everything else variants[:2]:
                connection = connect(pristine.folder)
                try:
                    connection.execute(
                        f"UPDATE {table} SET {column.name} = ? WHERE {where}", (new, *(values[key] for key in keys))
                    )
                except sqlite3.IntegrityError:
                    connection.close()
                    continue  # that key exists already; swapped rows are tried elsewhere
                connection.close()
                tried += 1
                problems = caught(pristine.folder)
                name = f"{table}.{column.name} of {[values[k] for k in keys]}: {row[place]!r} -> {new!r}"
                if not problems:
                    wrong.append(f"not caught: {name}"[:300])
                elif CRASH in problems[0] or not is_named(problems, table, column):
                    wrong.append(f"not named: {name}: {problems[:3]}"[:600])
                pristine.restore_database()
    return tried, wrong


def is_named(problems: list[str], table: str, column: Column) -> bool:
    """Return whether a finding names the table and the column."""
    text = "\n".join(problems)
    if table in ALIASES:
        return bool(re.search(ALIASES[table], text))
    # The ledger's check names the head of the chain, and SQLite's check a value that the schema forbids.
    own_word = column.key or column.name in text or "CHECK constraint" in text
    return (table in text and own_word) or (table == "run" and "head" in text)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield every leaf of a JSON value with the path to it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from leaves(inner, (*path, index))
    else:
        yield path, value


def with_leaf(content: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return a copy of `content` with one leaf replaced."""
    copied = json.loads(json.dumps(content))
    inner = copied
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = new
    return copied


def changed(value: Any) -> list[Any]:
    """Return other values for a leaf."""
    if isinstance(value, bool) or value is None:
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, float):
        return [value * (1 + 2.0**-52) if value else 5e-324, value + 1.0]
    middle = len(value) // 2
    return [value[:middle] + ("0" if value[middle : middle + 1] != "0" else "1") + value[middle + 1 :]]
