"""Changes to a run folder by someone without the key (other values, rows and fields), and the findings about them.

The tables are enumerated from the database itself, so a new column is covered at once.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from run_tools import Column
from sifu.api import verify_run
from sifu.errors import SifuError

NAMES = {
    "nodes": r"node|history|rounds",
    "participation": r"participation|rounds",
    "events": r"ledger|event",
    "clients": r"clients:",
    "certificates": r"certificate",
    "run": r"run|head",
}
"""Patterns by which findings name a table; tables not listed here are named by their own name."""
CRASH = "verification crashed:"


class Pristine:
    """Run folder that is restored after every change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._kept = folder.with_name("kept")
        shutil.copytree(folder, self._kept)

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
