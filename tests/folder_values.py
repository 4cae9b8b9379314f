"""Values in a run folder by place: columns of tables, paths in payloads and certificates."""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

JSON_COLUMNS = {"events.payload", "sealed.content", "certificates.content", "run.value"}


def values_by_place(folder: Path) -> dict[str, list[Any]]:
    """Return values by place, in the order of their rows; nested lists and objects are expanded, and items of a list
    share a place.
    """
    places: dict[str, list[Any]] = defaultdict(list)
    with closing(sqlite3.connect(folder / "run.db")) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        for table in tables:
            cursor = connection.execute(f"SELECT * FROM {table} ORDER BY 1, 2")
            columns = [column[0] for column in cursor.description]
            for row in cursor:
                named = dict(zip(columns, row, strict=True))
                for column, value in named.items():
                    place = f"{table}.{column}"
                    label = f"{table}.{named.get('kind', named.get('key'))}" if table in ("events", "run") else place
                    if place in JSON_COLUMNS:
                        for path, inner in _leaves(_parsed(value)):
                            places[f"{label}{path}"].append(inner)
                    else:
                        places[place].append(value)
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not name.startswith(("run.db", "certificates/")):
            places[f"file {name}"].append(path.read_bytes())
    return dict(places)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, path)
    else:
        yield path, value


def places_that_differ(first: Path, second: Path) -> set[str]:
    """Return the places whose values differ between two folders."""
    here, there = values_by_place(first), values_by_place(second)
    return {place for place in here.keys() | there.keys() if here.get(place) != there.get(place)}
