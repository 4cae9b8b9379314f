"""Where metrics go, and keeping them up to date while a run is at work."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from sifu.errors import InputError, SifuError
from sifu.report.metrics.files import CsvFile, JsonLinesFile, MetricsFile, TensorBoardFile
from sifu.report.metrics.mlflow_log import MlflowLog
from sifu.report.metrics.rows import MetricRow, rows_after
from sifu.store.known_keys import check_known_key
from sifu.store.lock import is_locked
from sifu.store.reader import RunReader

MLFLOW = "mlflow:"
KINDS: dict[str, type[MetricsFile]] = {".csv": CsvFile, ".jsonl": JsonLinesFile, ".tfevents": TensorBoardFile}
EVERY = 1.0
"""Seconds between two looks at a run."""


class Target(Protocol):
    """Something that takes rows, each once."""

    last_step: int

    def append(self, rows: Sequence[MetricRow]) -> None:
        """Add rows that follow what is there."""
        ...


def check_target(target: str) -> str:
    """Refuse what is neither a file of a known kind nor an experiment of MLflow."""
    if target.startswith(MLFLOW):
        if not target.removeprefix(MLFLOW).strip():
            raise InputError(f"name the experiment: {MLFLOW}NAME")
    elif Path(target).suffix.lower() not in KINDS:
        raise InputError(
            f"metrics go to a file that ends in {', '.join(KINDS)}, or to {MLFLOW}EXPERIMENT; found {target[:80]!r}"
        )
    elif not Path(target).expanduser().parent.is_dir():
        raise InputError(f"there is no folder {Path(target).expanduser().parent} to write {Path(target).name} into")
    return target


def _open(target: str, reader: RunReader) -> Target:
    run = reader.value("run")
    if target.startswith(MLFLOW):
        return MlflowLog(target.removeprefix(MLFLOW).strip(), run, reader.folder.resolve().name)
    path = Path(target).expanduser()
    return KINDS[path.suffix.lower()](path, run)


def add_new_rows(folder: Path, target: str, opened: Target | None = None) -> tuple[Target, int]:
    """Add to a target what it lacks of a run's metrics; returns the target as it is now, and how many rows came."""
    with RunReader(folder) as reader, reader.snapshot():
        check_known_key(reader)
        opened = opened or _open(target, reader)
        ((last,),) = reader.query("SELECT MAX(node) FROM nodes")
        if opened.last_step > int(last):
            raise InputError(
                f"{target} has metrics up to step {opened.last_step}, the run only {last}: it was restored from an "
                "earlier state. Name another target"
            )
        rows = rows_after(reader, opened.last_step)
        opened.append(rows)
        return opened, len(rows)


def write_metrics(
    folder: Path, target: str, *, follow: bool = False, pause: Callable[[float], None] = time.sleep
) -> int:
    """Add to a target what it lacks; with `follow` until nothing is at work on the run any more."""
    check_target(target)
    opened, count = None, 0
    while True:
        at_work = is_locked(folder)
        opened, new = add_new_rows(folder, target, opened)
        count += new
        if not (follow and at_work):
            return count
        pause(EVERY)


class MetricsLog:
    """Keeps a target up to date from within a command; its troubles are told once and never stop the command."""

    def __init__(self, folder: Path, target: str | None, warn: Callable[[str], None]) -> None:
        self._folder, self._target, self._warn = folder, target and check_target(target), warn
        self._opened: Target | None = None
        self._looked = -EVERY

    def update(self, *, now: bool = False) -> None:
        """Write what is new, once a second at most unless it must be `now`."""
        if not self._target or (not now and time.monotonic() - self._looked < EVERY):
            return
        try:
            self._opened, _ = add_new_rows(self._folder, self._target, self._opened)
        except Exception as error:  # a disk is full, or a tracking server fails in whatever way
            reason = str(error) if isinstance(error, SifuError) else f"{type(error).__name__}: {error}"
            self._warn(f"no more metrics are written ({reason}); the run goes on. Add them later with sifu metrics")
            self._target = None
        self._looked = time.monotonic()
