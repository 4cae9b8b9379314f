"""Metrics of a run in MLflow: one MLflow run for each run of ours, found again by its tag."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from sifu.errors import InputError, SifuError
from sifu.report.metrics.metric_files import (
    VALUES,
    CsvFile,
    JsonLinesFile,
    MetricRow,
    MetricsFile,
    TensorBoardFile,
    rows_after,
)
from sifu.store.known_keys import check_known_key
from sifu.store.lock import is_locked
from sifu.store.reader import RunReader

TAG = "sifu.run"
MOST_AT_ONCE = 400
"""Rows of a batch; MLflow takes a thousand metrics at once."""


class MlflowLog:
    """Adds rows to an experiment of MLflow, where MLFLOW_TRACKING_URI says; what is there already is not sent again."""

    def __init__(self, experiment: str, run: str, name: str, client: Any = None) -> None:
        self._client = client if client is not None else _client()
        existing = self._client.get_experiment_by_name(experiment)
        number = existing.experiment_id if existing else self._client.create_experiment(experiment)
        runs = self._client.search_runs([number], filter_string=f"tags.`{TAG}` = '{run}'")
        if runs:
            self._run = runs[0].info.run_id
        else:
            self._run = self._client.create_run(number, tags={TAG: run, "mlflow.runName": name}).info.run_id
        history = self._client.get_metric_history(self._run, VALUES[0])
        self.last_step = max((int(metric.step) for metric in history), default=-1)

    def append(self, rows: Sequence[MetricRow]) -> None:
        """Send rows that follow what is there."""
        metric = _metric_class()
        for start in range(0, len(rows), MOST_AT_ONCE):
            batch = rows[start : start + MOST_AT_ONCE]
            metrics = [
                metric(name, getattr(row, name), _milliseconds(row), row.step) for row in batch for name in VALUES
            ]
            self._client.log_batch(self._run, metrics=metrics)
            self.last_step = batch[-1].step


def _milliseconds(row: MetricRow) -> int:
    return int(1000 * datetime.datetime.fromisoformat(row.time).timestamp()) if row.time else 0


def _client() -> Any:
    try:
        from mlflow.tracking import MlflowClient
    except ModuleNotFoundError as error:
        raise InputError("to log to MLflow, install it: pip install 'sifu[mlflow]'") from error
    return MlflowClient()


def _metric_class() -> Any:
    from mlflow.entities import Metric

    return Metric


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
            self._warn(f"no more metrics are written ({reason}); the run continues. Add them later with sifu metrics")
            self._target = None
        self._looked = time.monotonic()
