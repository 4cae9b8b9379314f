"""Table of an experiment: a CSV file to which finished rows are added durably and exactly once."""

from __future__ import annotations

import csv
import io
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sifu import RunDamagedError
from sifu.store.files import room_to_write, sync_folder

Row = dict[str, Any]

PLACE = ("experiment", "dataset", "seed", "preset", "method", "variant", "request")
"""Columns that identify a row: no two rows agree in all of these."""

REQUEST_COLUMNS = (
    *PLACE,
    "clients",
    "rounds",
    "extra_rounds",
    "reached",
    "training_rounds",
    "target",
    "accuracy_retain_before",
    "accuracy_retain_after",
    "accuracy_forget_before",
    "accuracy_forget_after",
    "accuracy_forgotten_after",
    "accuracy_test",
    "mark_before",
    "mark_after",
    "psi",
    "psi_star",
    "sigma",
    "epsilon",
    "delta",
    "delta_at_most",
    "node",
    "level",
    "local_steps",
    "bytes_sent",
    "bytes_kept",
    "seconds",
    "device",
)
DISTANCE_COLUMNS = (
    *PLACE,
    "client",
    "round",
    "distance",
    "psi_round",
    "psi_population",
    "accuracy",
    "seconds",
)
"""Columns of `distance` experiments; `request` counts the measurements of a variant."""

GROUP_COLUMNS = (
    *PLACE,
    "leavers",
    "length",
    "rounds",
    "reached",
    "target",
    "accuracy",
    "accuracy_merged",
    "accuracy_apart",
    "client_rounds",
    "rebuild_client_rounds",
    "scratch_rounds",
    "scratch_client_rounds",
    "groups_left",
    "bytes_kept",
    "seconds",
)
"""Columns of `groups` experiments: request 0 is the first training, 1 a single request, higher ones a sequence's."""

METRIC_COLUMNS = (
    *PLACE,
    "rounds",
    "reached",
    "level",
    "accuracy_retain_after",
    "accuracy_test",
    "accuracy_forgotten_after",
    "relearn_rounds",
    "bytes_sent",
    "bytes_kept",
    "seconds",
    "models",
    "klom_forgotten",
    "klom_forgotten_95",
    "klom_remaining",
    "klom_test",
    "epsilon_median",
    "separable",
    "forgetting_quality",
    "tpr_at_1",
)
"""Columns of `metrics` experiments: a row for each run, and with request 0 one for each method over all runs."""

COLUMNS_OF = {"distance": DISTANCE_COLUMNS, "groups": GROUP_COLUMNS, "metrics": METRIC_COLUMNS}
"""Columns by kind of experiment; all others have the columns of requests."""

_WHOLE = ("seed", "request", "clients", "rounds", "extra_rounds", "training_rounds", "node", "client", "round")
_WHOLE_COUNTS = (
    "models",
    "relearn_rounds",
    "local_steps",
    "bytes_sent",
    "bytes_kept",
    "leavers",
    "length",
    "groups_left",
)
_TEXT = ("experiment", "dataset", "preset", "method", "variant", "level", "device")


class Table:
    """Rows in a CSV file. A partial last line after a crash is dropped when the table is opened."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path, self.columns = path, tuple(columns)
        self._lock = threading.Lock()
        self.rows: list[Row] = []
        if path.exists():
            self._repair()
            self.rows = read_table(path)
            present = set(self.rows[0]) if self.rows else set(self.columns)
            if present != set(self.columns):
                raise RunDamagedError(f"{path} has other columns than this version writes: use another --out")
        else:
            self._write(_line(self.columns))
            sync_folder(path.parent)
        self._places = {place_of(row) for row in self.rows}

    def has(self, row: Mapping[str, Any]) -> bool:
        """Return whether the table already has a row with the identifying columns of `row`."""
        return place_of(row) in self._places

    def add(self, row: Row) -> None:
        """Append a row and wait until it is on disk."""
        full = {name: row.get(name) for name in self.columns}
        with self._lock:
            if place_of(full) in self._places:
                return
            self._write(_line([_text(full[name]) for name in self.columns]))
            self.rows.append({name: _value(name, _text(value)) for name, value in full.items()})
            self._places.add(place_of(full))

    def _write(self, line: str) -> None:
        with room_to_write(self.path):
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                os.write(descriptor, line.encode())
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def _repair(self) -> None:
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole != len(content):
            with self.path.open("rb+") as stream:
                stream.truncate(whole)
        if whole == 0:
            self._write(_line(self.columns))


def read_table(path: Path) -> list[Row]:
    """Return the rows of a table with their types; empty cells are None."""
    with path.open(newline="", encoding="utf-8") as stream:
        return [{name: _value(name, text) for name, text in row.items()} for row in csv.DictReader(stream)]


def place_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the columns that identify a row, as texts."""
    return tuple(_text(row.get(name)) for name in PLACE)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return repr(float(value)) if isinstance(value, float) else str(value)


def _value(name: str, text: str) -> Any:
    if name in _TEXT:
        return text
    if text == "":
        return None
    if name == "reached":
        return text == "yes"
    return int(text) if name in (*_WHOLE, *_WHOLE_COUNTS) else float(text)


def _line(values: Sequence[str]) -> str:
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerow(values)
    return stream.getvalue()
