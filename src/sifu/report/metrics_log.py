"""Metrics of a run for other tools, as CSV or JSON lines with one line per evaluation, or as an MLflow experiment.

All values are read from the ledger, so a file never contradicts it. If an update fails, the next one adds its rows.
"""

from __future__ import annotations

import csv
import datetime
import io
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from sifu.core.ledger import read_json
from sifu.errors import InputError, SifuError, install_extra
from sifu.run.run_view import ACTIVE
from sifu.store.files import is_locked, sync_folder
from sifu.store.known_keys import check_known_key
from sifu.store.reader import RunReader


@dataclass(frozen=True)
class MetricRow:
    """An evaluation on the active clients' training data.

    `step` always increases, even across rollbacks. `round` counts within the current work: the first training if
    `request` is empty, otherwise the retraining for that request.
    """

    run: str
    step: int
    time: str
    request: str
    branch: int
    round: int
    accuracy: float
    loss: float
    samples: int

    @property
    def timestamp(self) -> float:
        """Time in seconds since 1970, or 0 if unknown."""
        return datetime.datetime.fromisoformat(self.time).timestamp() if self.time else 0.0


COLUMNS = tuple(MetricRow.__dataclass_fields__)
VALUES = ("accuracy", "loss")
"""Metrics that are logged as curves."""


def rows_after(reader: RunReader, step: int) -> list[MetricRow]:
    """Return the evaluations after a step, in order."""
    run = reader.value("run")
    rows = reader.query(
        "SELECT n.node, n.request_order, n.branch, n.position, e.accuracy, e.loss, e.samples "
        "FROM evaluations e JOIN nodes n ON n.node = e.node WHERE e.node > ? AND e.subset = ? ORDER BY n.node",
        (step, ACTIVE),
    )
    if not rows:
        return []
    requests = {row.request_order: row.request for row in reader.requests() if row.request_order is not None}
    times = _times_after(reader, step)
    return [
        MetricRow(
            run, int(node), times.get(int(node), ""), requests.get(order, ""), int(branch), int(position),
            float(accuracy), float(loss), int(samples),
        )
        for node, order, branch, position, accuracy, loss, samples in rows
    ]  # fmt: skip


def _times_after(reader: RunReader, step: int) -> dict[int, str]:
    """Return the recording time of each step after `step`; read only the latest events."""
    times: dict[int, str] = {}
    for recorded_at, sealed in reader.connection.execute(
        "SELECT time, content FROM events JOIN sealed USING (seq) ORDER BY seq DESC"
    ):
        recorded = json.loads(sealed).get("evaluations")
        nodes = [int(row["node"]) for row in recorded or () if row.get("subset") == ACTIVE]
        times |= dict.fromkeys(nodes, str(recorded_at))
        if nodes and min(nodes) <= step:
            break
    return times


def csv_text(rows: Sequence[MetricRow], *, header: bool = True) -> str:
    """Return rows as CSV, by default after a line with the names of the columns."""
    text, lines = io.StringIO(), [astuple(row) for row in rows]
    csv.writer(text, lineterminator="\n").writerows([COLUMNS, *lines] if header else lines)
    return text.getvalue()


BEFORE_THE_FIRST = -1


class MetricsFile(ABC):
    """Base class of metrics files; each row is added once."""

    def __init__(self, path: Path, run: str) -> None:
        self.path, self.run = path, run
        content = path.read_bytes() if path.exists() else b""
        whole = content.rfind(b"\n") + 1
        self.last_step = self._last(content[:whole]) if whole else BEFORE_THE_FIRST
        if whole < len(content):
            os.truncate(path, whole)

    @abstractmethod
    def _last(self, content: bytes) -> int:
        """Return the step of the last line."""

    @abstractmethod
    def _entries(self, rows: Sequence[MetricRow], beginning: bool) -> bytes:
        """Return rows as file content; `beginning` is true at the start of a file."""

    def append(self, rows: Sequence[MetricRow]) -> None:
        """Append rows that follow the existing rows, and wait until they are on disk."""
        if not rows:
            return
        beginning = not self.path.exists() or self.path.stat().st_size == 0
        with self.path.open("ab") as stream:
            stream.write(self._entries(rows, beginning))
            stream.flush()
            os.fsync(stream.fileno())
        if beginning:
            sync_folder(self.path.absolute().parent)
        self.last_step = rows[-1].step

    def _refusal(self, what: str) -> InputError:
        """Return an error for a file that belongs to another run or has another format."""
        return InputError(f"{self.path} {what}: give another file for the metrics of this run")


class CsvFile(MetricsFile):
    """CSV file with one line per evaluation after a header."""

    def _last(self, content: bytes) -> int:
        try:
            rows = list(csv.reader(io.StringIO(content.decode("utf-8", "replace"))))
        except csv.Error as error:
            raise self._refusal("is not a file of metrics") from error
        if not rows or tuple(rows[0]) != COLUMNS:
            raise self._refusal("is not a file of metrics")
        if len(rows) == 1:
            return BEFORE_THE_FIRST
        row = dict(zip(COLUMNS, rows[-1], strict=False))
        step = row.get("step", "")
        if row.get("run") != self.run or not (step.isascii() and step.isdecimal() and len(step) < 16):
            raise self._refusal("belongs to another run")
        return int(step)

    def _entries(self, rows: Sequence[MetricRow], beginning: bool) -> bytes:
        return csv_text(rows, header=beginning).encode()


class JsonLinesFile(MetricsFile):
    """File with one JSON object per line."""

    def _last(self, content: bytes) -> int:
        try:
            row = read_json(content.splitlines()[-1])
            step, run = int(row["step"]), row["run"]
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise self._refusal("is not a file of metrics") from error
        if run != self.run:
            raise self._refusal("belongs to another run")
        return step

    def _entries(self, rows: Sequence[MetricRow], beginning: bool) -> bytes:
        return b"".join(json.dumps(asdict(row)).encode() + b"\n" for row in rows)


TAG = "sifu.run"
MOST_AT_ONCE = 400
"""Maximum number of rows per batch; MLflow accepts a thousand metrics at once."""


class MlflowLog:
    """MLflow experiment, on the server at MLFLOW_TRACKING_URI, to which new rows are added."""

    def __init__(self, experiment: str, run: str, name: str) -> None:
        try:
            from mlflow.tracking import MlflowClient
        except ModuleNotFoundError as error:
            raise InputError(f"to log to MLflow, install it: {install_extra('mlflow')}") from error
        self._client: Any = MlflowClient()
        existing = self._client.get_experiment_by_name(experiment)
        number = existing.experiment_id if existing else self._client.create_experiment(experiment)
        runs = self._client.search_runs([number], filter_string=f"tags.`{TAG}` = '{run}'")
        if runs:
            self._run = runs[0].info.run_id
        else:
            self._run = self._client.create_run(number, tags={TAG: run, "mlflow.runName": name}).info.run_id
        history = self._client.get_metric_history(self._run, VALUES[0])
        self.last_step = max((int(metric.step) for metric in history), default=BEFORE_THE_FIRST)

    def append(self, rows: Sequence[MetricRow]) -> None:
        """Send rows that follow the existing rows."""
        from mlflow.entities import Metric

        for start in range(0, len(rows), MOST_AT_ONCE):
            batch = rows[start : start + MOST_AT_ONCE]
            metrics = [
                Metric(name, getattr(row, name), int(1000 * row.timestamp), row.step)
                for row in batch
                for name in VALUES
            ]
            self._client.log_batch(self._run, metrics=metrics)
            self.last_step = batch[-1].step


MLFLOW = "mlflow:"
KINDS: dict[str, type[MetricsFile]] = {".csv": CsvFile, ".jsonl": JsonLinesFile}
EVERY = 1.0
"""Interval between two reads of a run, in seconds."""


Target = MetricsFile | MlflowLog


def check_target(target: str) -> str:
    """Return a target; refuse anything but a file of a known format or an MLflow experiment."""
    if target.startswith(MLFLOW):
        if not target.removeprefix(MLFLOW).strip():
            raise InputError(f"the MLflow experiment has no name: write {MLFLOW}NAME")
    elif Path(target).suffix.lower() not in KINDS:
        raise InputError(
            f"the target of metrics must be a file ending in {', '.join(KINDS)}, or {MLFLOW}EXPERIMENT; found "
            f"{target[:80]!r}"
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
    """Add the missing rows of a run's metrics to a target.

    Args:
        folder: The run folder.
        target: A file, or `mlflow:EXPERIMENT`.
        opened: The target as returned by an earlier call.

    Returns:
        The opened target, and the number of rows added.
    """
    with RunReader(folder) as reader, reader.snapshot():
        check_known_key(reader)
        opened = opened or _open(target, reader)
        ((last,),) = reader.query("SELECT MAX(node) FROM nodes")
        if opened.last_step > int(last):
            raise InputError(
                f"{target} has metrics up to step {opened.last_step}, the run only up to step {last}: it was restored "
                "from an earlier state. Give another target"
            )
        rows = rows_after(reader, opened.last_step)
        opened.append(rows)
        return opened, len(rows)


def write_metrics(folder: Path, target: str, *, follow: bool = False) -> int:
    """Add missing rows to a target.

    Args:
        folder: The run folder.
        target: A file, or `mlflow:EXPERIMENT`.
        follow: True to continue until no process writes to the run.

    Returns:
        The number of rows added.
    """
    check_target(target)
    opened, count = None, 0
    while True:
        at_work = is_locked(folder)
        opened, new = add_new_rows(folder, target, opened)
        count += new
        if not (follow and at_work):
            return count
        time.sleep(EVERY)


class MetricsLog:
    """Writer that keeps a target up to date during a command; it reports an error once and never stops the command."""

    def __init__(self, folder: Path, target: str, warn: Callable[[str], None]) -> None:
        self._folder, self._warn = folder, warn
        self._target: str | None = check_target(target)
        self._opened: Target | None = None
        self._looked = -EVERY

    def update(self, *, now: bool = False) -> None:
        """Write new rows, at most once per second unless `now` is set."""
        if not self._target or (not now and time.monotonic() - self._looked < EVERY):
            return
        try:
            self._opened, _ = add_new_rows(self._folder, self._target, self._opened)
        except Exception as error:  # a full disk or a failing tracking server, for example
            reason = str(error) if isinstance(error, SifuError) else f"{type(error).__name__}: {error}"
            self._warn(f"no more metrics are written ({reason}); the run continues. Add them later with sifu metrics")
            self._target = None
        self._looked = time.monotonic()
