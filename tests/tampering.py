"""Changes of a finished run by someone without the key, enumerated from its tables, rows, certificates and files.

The changes know tables, files and bytes, never the meaning of a column, so a new column, row or file is tried at once.
"""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

DATABASE = "run.db"
KINDS = {bool: "TEXT", int: "INTEGER", float: "REAL", str: "TEXT", type(None): "TEXT"}
"""Kind of column that holds values of each type of JSON."""
MOST_ROWS = 3
"""Rows tried per column of a large table, besides the last one; of a small table every row is tried."""
SMALL = 16
"""Number of rows up to which a table is small."""
UNDETECTABLE = {
    "file lock*": "holds no statement",
    "file standing.json*": "holds measurements of the current model that no claim rests on",
    "file salts.json*": "opens digests of rows, which no claim rests on; with other salts a run refuses its data",
    "file operator.key*": "is the operator's secret, and no claim rests on it; nothing is signed with another key",
    "value events.signature last none": "requests are filed without the key, too; the next signed event covers them",
    "file certificates/* deleted, of the last event": "an interrupted command leaves it so; the next one writes it",
}
"""Changes that nobody can notice from the folder alone, with the reason."""
UNDETECTABLE_IN = {"approvals": "value events.signature * none"}
"""The same of one run: its certificate says already that approvals may lack signatures, so one more may be missing."""


@dataclass(frozen=True)
class Change:
    """One change of a folder; `apply` returns False if it changes nothing or the database refuses it."""

    name: str
    apply: Callable[[Path], bool]

    @property
    def stratum(self) -> str:
        """Part of the run and kind of the change, by which samples are drawn."""
        kind, place, _, *how = self.name.split(" ", 3)
        return f"{kind} {place.partition('/')[0]} {''.join(how)}"

    @property
    def listed(self) -> bool:
        """True if the change is listed as undetectable."""
        return any(fnmatch(self.name, pattern) for pattern in UNDETECTABLE)


def changes_of(folder: Path) -> list[Change]:
    """Return all changes that are tried on a folder, in a fixed order."""
    return [*_values(folder), *_rows(folder), *_certificates(folder), *_files(folder)]


def in_order(changes: list[Change], seed: str) -> list[Change]:
    """Return the changes in an order drawn by a seed: first one of every stratum, then the others."""
    drawn, strata = sorted(changes, key=lambda change: change.name), set()
    random.Random(seed).shuffle(drawn)
    firsts = [change for change in drawn if change.stratum not in strata and not strata.add(change.stratum)]  # type: ignore[func-returns-value]
    return firsts + [change for change in drawn if change not in set(firsts)]


# -- tables ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """Name, columns (name, kind, nullable), places of the key's columns, and rows of a table."""

    name: str
    columns: list[tuple[str, str, bool]]
    keys: list[int]
    rows: list[tuple[Any, ...]]

    @property
    def where(self) -> str:
        """Condition that finds a row by its key."""
        return " AND ".join(f"{self.columns[place][0]} = ?" for place in self.keys)

    def key(self, row: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the key of a row."""
        return tuple(row[place] for place in self.keys)


def tables_of(folder: Path) -> list[Table]:
    """Return the tables of a run's database by name."""
    found = []
    with closing(sqlite3.connect(folder / DATABASE)) as connection:
        listed = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name").fetchall()
        for (name,) in listed:
            described = connection.execute(f"PRAGMA table_info({name})").fetchall()
            columns = [(title, kind, not needed and not key) for _, title, kind, needed, _, key in described]
            keys = [row[0] for row in described if row[5]]
            order = ", ".join(columns[place][0] for place in keys) or "rowid"
            rows = connection.execute(f"SELECT * FROM {name} ORDER BY {order}").fetchall()
            found.append(Table(name, columns, keys, rows))
    return found


def _statement(*statements: tuple[str, tuple[Any, ...]]) -> Callable[[Path], bool]:
    def apply(folder: Path) -> bool:
        connection = sqlite3.connect(folder / DATABASE, isolation_level=None)
        connection.execute("PRAGMA ignore_check_constraints=ON")
        try:
            return sum(connection.execute(sql, values).rowcount for sql, values in statements) > 0
        except sqlite3.IntegrityError:
            return False  # that key exists already
        finally:
            connection.close()

    return apply


def _values(folder: Path) -> Iterator[Change]:
    for table in tables_of(folder):
        for place, (column, kind, nullable) in enumerate(table.columns):
            for number, row in _spread(table.rows, place):
                for how, new in other_values(row[place], kind, nullable):
                    sql = f"UPDATE {table.name} SET {column} = ? WHERE {table.where}"
                    name = f"value {table.name}.{column} {_name_of(number, table.rows)} {how}"
                    yield Change(name, _statement((sql, (new, *table.key(row)))))


def _spread(rows: list[tuple[Any, ...]], start: int) -> list[tuple[int, tuple[Any, ...]]]:
    """Return rows with their numbers: all of a small table, of a large one the last and others for another `start`."""
    numbers = range(len(rows))
    if len(rows) > SMALL:
        numbers = sorted(
            {(start + step * len(rows) // MOST_ROWS) % len(rows) for step in range(MOST_ROWS)} | {len(rows) - 1}
        )
    return [(number, rows[number]) for number in numbers]


def _name_of(number: int, rows: list[tuple[Any, ...]]) -> str:
    return "last" if number == len(rows) - 1 else str(number)


def other_values(value: Any, kind: str, nullable: bool) -> Iterator[tuple[str, Any]]:
    """Yield values that differ slightly or widely, each with its name."""
    if value is None:
        yield "some", {"INTEGER": 7, "REAL": 0.125, "TEXT": "x", "BLOB": b"x"}[kind]
        yield "zero", {"INTEGER": 0, "REAL": 0.0, "TEXT": "", "BLOB": b""}[kind]
        return
    if nullable:
        yield "none", None
    if isinstance(value, int):
        yield from (("more", value + 1), ("less", value - 1), ("far", value + 10**6))
    elif isinstance(value, float):
        yield "near", 0.0 if value == float("inf") else value * (1.0 + 2.0**-52) if value else 5e-324
        yield "far", 1.5 if value == float("inf") else value * 1.5 + 1.0
        yield "negative", -1.0 if value == float("inf") else -value - 1e-9
    elif isinstance(value, bytes):
        for place in sorted({0, len(value) // 2, len(value) - 1} & set(range(len(value)))):
            yield f"bit-{place}", value[:place] + bytes([value[place] ^ 1]) + value[place + 1 :]
        yield from (("short", value[:-1]), ("long", value + b"\0")) if value else (("long", b"\0"),)
    else:
        middle = len(value) // 2
        yield "letter", value[:middle] + ("0" if value[middle : middle + 1] != "0" else "1") + value[middle + 1 :]
        yield "space", value + " "
        if value:
            yield "short", value[:-1]
        if value[:1].isdigit() and value.replace(".", "", 1).isdigit():
            yield "near", repr(float(value) * (1 + 1e-12) + 1e-300)


def _rows(folder: Path) -> Iterator[Change]:
    for table in tables_of(folder):
        places, insert = table.keys, f"INSERT INTO {table.name} VALUES ({', '.join('?' * len(table.columns))})"
        delete = f"DELETE FROM {table.name} WHERE {table.where}"
        for number, row in _spread(table.rows, 1):
            key = table.key(row)
            yield Change(f"row {table.name} {number} dropped", _statement((delete, key)))
            other = key[-1] + 1000 if isinstance(key[-1], int) else f"{key[-1]}-again"
            again = tuple(other if place == places[-1] else value for place, value in enumerate(row))
            yield Change(f"row {table.name} {number} repeated", _statement((insert, again)))
        if table.rows:
            yield Change(f"row {table.name} all dropped", _statement((f"DELETE FROM {table.name}", ())))
        if len(table.rows) > 1:
            first, last = table.rows[0], table.rows[-1]
            swapped = [
                tuple(other[place] if place in places else value for place, value in enumerate(row))
                for row, other in ((first, last), (last, first))
            ]
            if set(swapped) != {first, last}:
                steps = [(delete, table.key(first)), (delete, table.key(last)), *((insert, row) for row in swapped)]
                yield Change(f"row {table.name} ends swapped", _statement(*steps))


# -- certificates and other files --------------------------------------------------------------------------------------


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield every value of a JSON text that holds no others, with its path."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, (*path, key))
    else:
        yield path, value


def _with_leaf(content: Any, path: tuple[Any, ...], new: Any) -> str:
    """Return a JSON text with one leaf replaced, or left out if `new` is an ellipsis."""
    inner = content = json.loads(json.dumps(content))
    for step in path[:-1]:
        inner = inner[step]
    if new is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = new
    return json.dumps(content, indent=1, sort_keys=True)


def _certificates(folder: Path) -> Iterator[Change]:
    for path in sorted((folder / "certificates").iterdir()):
        name, text = path.relative_to(folder), path.read_text(encoding="utf-8")
        content = json.loads(text)
        texts: dict[str, str] = {}
        for place, value in leaves(content):
            spot = ".".join(map(str, place))
            news = [("not", not value)] if isinstance(value, bool) else other_values(value, KINDS[type(value)], False)
            texts |= {f"{spot} {how}": _with_leaf(content, place, new) for how, new in news}
            texts |= {f"{spot} out": _with_leaf(content, place, ...)}
        texts |= {f"{key} upper": _with_leaf(content, (key,), content[key].upper()) for key in sorted(content)
                  if isinstance(content[key], str)}  # fmt: skip
        texts |= {"remark added": _with_leaf(content, ("remark",), "level: exact")}
        texts |= {"key twice": f'{{"{min(content)}": {{"level": "exact"}}, {text.strip()[1:]}'}
        for how, new in texts.items():
            if new != text:
                yield Change(f"certificate {name} {how}", _file(name, lambda _, new=new: new.encode()))


def _file(name: Path, change: Callable[[bytes], bytes | None]) -> Callable[[Path], bool]:
    def apply(folder: Path) -> bool:
        path = folder / name
        before = path.read_bytes()
        after = change(before)
        if after is None:
            path.unlink()
        else:
            path.write_bytes(after)
        return after != before

    return apply


def _flipped(place: float) -> Callable[[bytes], bytes]:
    def flip(content: bytes) -> bytes:
        index = int(place * (len(content) - 1))
        return content[:index] + bytes([content[index] ^ 1]) + content[index + 1 :] if content else b"\1"

    return flip


BYTES: dict[str, Callable[[bytes], bytes | None]] = {
    "bit at the start": _flipped(0.0),
    "bit in the middle": _flipped(0.5),
    "bit at the end": _flipped(1.0),
    "cut short": lambda content: content[:-1],
    "one byte longer": lambda content: content + b"\0",
    "emptied": lambda _: b"",
    "deleted": lambda _: None,
}


def _files(folder: Path) -> Iterator[Change]:
    names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    names = [name for name in names if not name.name.startswith(f"{DATABASE}-")]
    last = _of_the_last_event(folder)
    for name in names:
        for how, change in BYTES.items():
            if name.name != DATABASE or how == "emptied":  # bytes of free pages mean nothing
                spot = ", of the last event" if how == "deleted" and name.name in last else ""
                yield Change(f"file {name} {how}{spot}", _file(name, change))
        if len(name.parts) > 1:
            others = [other for other in names if other.parent == name.parent and other != name]
            for other in others[:2]:
                content = (folder / other).read_bytes()
                yield Change(f"file {name} replaced by {other}", _file(name, lambda _, content=content: content))
            yield Change(f"file {name} copied", _copy(name))


def _copy(name: Path) -> Callable[[Path], bool]:
    return lambda folder: bool(shutil.copyfile(folder / name, folder / f"{name}.bak"))


def _of_the_last_event(folder: Path) -> set[str]:
    """Return the names of certificate files that came last: those of the newest certificate."""
    paths = sorted((folder / "certificates").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    return {path.name for path in paths if path.name.split(".")[0] == paths[-1].name.split(".")[0]} if paths else set()
