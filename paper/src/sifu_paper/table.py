"""Rows of results: CSV files to which finished rows are added durably and exactly once."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

PLACE = ("dataset", "seed", "preset", "method", "variant", "number")
"""Columns that identify a row; `number` counts requests (0: the first training) or measurements."""
TEXT = ("dataset", "preset", "method", "variant", "device")
WHOLE = ("seed", "number", "clients", "rounds", "extra_rounds", "training_rounds", "depth", "client")


class Table:
    """Rows in a CSV file. A partial last line after a crash is dropped when the table is opened."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows: list[Row] = []
        if path.exists():
            content = path.read_bytes()
            path.write_bytes(content[: content.rfind(b"\n") + 1])
            self.rows = read_table(path)

    def has(self, row: Row) -> bool:
        """Return whether there is a row with the same identifying columns."""
        return any(all(row[key] == mine[key] for key in PLACE) for mine in self.rows)

    def add(self, row: Row) -> None:
        """Append a row and wait until it is on disk; a row that is there already is left."""
        if self.has(row):
            return
        lines = [] if self.rows else [list(row)]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(_text([*lines, list(row.values())]))
            stream.flush()
            os.fsync(stream.fileno())
        self.rows.append(row)


def read_table(path: Path) -> list[Row]:
    """Return the rows of a table with their types; empty cells are None."""
    with path.open(newline="", encoding="utf-8") as stream:
        return [{name: _value(name, text) for name, text in row.items()} for row in csv.DictReader(stream)]


def write_table(path: Path, rows: Sequence[Row]) -> None:
    """Write a whole table."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)] if rows else []
    path.write_text(_text(lines), encoding="utf-8")


def _value(name: str, text: str) -> Any:
    if name in TEXT:
        return text
    if text == "":
        return None
    if text in ("yes", "no"):
        return text == "yes"
    return int(text) if name in WHOLE else float(text)


def _text(lines: Iterable[Sequence[Any]]) -> str:
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows([_cell(value) for value in line] for line in lines)
    return stream.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return repr(float(value)) if isinstance(value, float) else value
