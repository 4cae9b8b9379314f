"""Metrics of a run for other tools: complete, without duplicates, and never a cause of failure."""

from __future__ import annotations

import csv
import json
import sqlite3
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import sifu
from run_tools import Command, copy_run, small_spec
from sifu.errors import InputError
from sifu.report.metrics_log import MetricsLog, MlflowLog, write_metrics
from sifu.run.run_view import ACTIVE


def recorded(run: Path) -> list[tuple[int, float]]:
    """Return the accuracies in the database, by a separate query."""
    with sqlite3.connect(run / "run.db") as connection:
        return connection.execute(
            "SELECT node, accuracy FROM evaluations WHERE subset = ? ORDER BY node", (ACTIVE,)
        ).fetchall()


def in_csv(path: Path) -> list[tuple[int, float]]:
    with path.open(newline="") as stream:
        return [(int(row["step"]), float(row["accuracy"])) for row in csv.DictReader(stream)]


def in_json_lines(path: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["accuracy"]) for row in map(json.loads, path.read_text().splitlines())]


KINDS = {"m.csv": in_csv, "m.jsonl": in_json_lines}


@pytest.mark.parametrize("name", KINDS)
def test_a_file_has_every_evaluation_once_after_kills_and_requests(
    name: str, trained_run: Path, tmp_path: Path
) -> None:
    run, path = copy_run(trained_run, tmp_path / "run"), tmp_path / name
    count = write_metrics(run, str(path))
    before = path.read_bytes()
    assert write_metrics(run, str(path)) == 0
    assert path.read_bytes() == before
    path.write_bytes(before[:-7])  # as after a kill during the last line
    assert write_metrics(run, str(path)) == 1
    assert path.read_bytes() == before
    sifu.open_run(run).forget(["client-001"], "gone")
    assert write_metrics(run, str(path)) > 0
    rows = KINDS[name](path)
    assert len(rows) > count
    assert [(step, pytest.approx(accuracy)) for step, accuracy in rows] == recorded(run)
    assert b"client-" not in path.read_bytes()


def test_rows_say_when_and_for_which_request(run_with_requests: Path, cli: Command) -> None:
    rows = list(csv.DictReader(cli("metrics", run_with_requests).out.splitlines()))
    assert rows[0]["request"] == ""
    assert {row["request"] for row in rows[1:]} > {""}
    assert all(row["time"].endswith("Z") for row in rows)
    assert cli("metrics", run_with_requests, "--format", "json").json["metrics"][0]["step"] == int(rows[0]["step"])


def test_training_writes_as_it_goes_and_resuming_adds_no_duplicates(tmp_path: Path, cli: Command) -> None:
    from sifu.core.spec import Spec, commented_toml

    spec, run, path = tmp_path / "spec.toml", tmp_path / "run", tmp_path / "m.csv"
    spec.write_text(commented_toml(Spec.from_mapping(small_spec(stop={"max_rounds": 6, "target": 0.0}))))
    assert cli("train", spec, "--run", run, "--metrics", path).code == 0
    assert in_csv(path) == recorded(run)
    assert cli("forget", run, "--clients", "client-002", "--metrics", path).code == 0
    assert in_csv(path) == recorded(run)
    assert len(in_csv(path)) > 7


def test_what_is_no_target_or_belongs_to_others_is_refused(trained_run: Path, tmp_path: Path) -> None:
    for target in ("m.txt", "m.tfevents", "mlflow:", str(tmp_path / "nowhere" / "m.csv")):
        with pytest.raises(InputError):
            write_metrics(trained_run, target)
    (tmp_path / "m.csv").write_text("name,age\nann,3\n")
    with pytest.raises(InputError, match="not a file of metrics"):
        write_metrics(trained_run, str(tmp_path / "m.csv"))
    assert (tmp_path / "m.csv").read_text() == "name,age\nann,3\n"
    write_metrics(trained_run, str(tmp_path / "m.jsonl"))
    row = json.loads((tmp_path / "m.jsonl").read_text().splitlines()[-1])
    (tmp_path / "m.jsonl").write_text(json.dumps(row | {"run": "another"}) + "\n")
    with pytest.raises(InputError, match="another run"):
        write_metrics(trained_run, str(tmp_path / "m.jsonl"))
    (tmp_path / "m.jsonl").write_text(json.dumps(row | {"step": 10**6}) + "\n")
    with pytest.raises(InputError, match="restored from an earlier state"):
        write_metrics(trained_run, str(tmp_path / "m.jsonl"))


def test_trouble_with_metrics_is_told_once_and_stops_nothing(trained_run: Path, tmp_path: Path) -> None:
    told: list[str] = []
    (tmp_path / "m.csv").write_text("name,age\nann,3\n")
    log = MetricsLog(trained_run, str(tmp_path / "m.csv"), told.append)
    log.update(now=True)
    log.update(now=True)
    assert len(told) == 1
    assert "the run continues" in told[0]


class FakeMlflow:
    """The used part of MLflow's client, with its bookkeeping."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, dict[str, str]] = {}
        self.logged: dict[str, list[Any]] = {}

    def get_experiment_by_name(self, name: str) -> Any:
        return types.SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        self.experiments[name] = str(len(self.experiments) + 1)
        return self.experiments[name]

    def search_runs(self, experiments: list[str], filter_string: str) -> list[Any]:
        keys = [key for key, tags in self.runs.items() if filter_string == f"tags.`sifu.run` = '{tags['sifu.run']}'"]
        return [types.SimpleNamespace(info=types.SimpleNamespace(run_id=key)) for key in keys]

    def create_run(self, experiment: str, tags: dict[str, str]) -> Any:
        key = f"run-{len(self.runs)}"
        self.runs[key], self.logged[key] = tags, []
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=key))

    def get_metric_history(self, run: str, name: str) -> list[Any]:
        return [metric for metric in self.logged[run] if metric.key == name]

    def log_batch(self, run: str, metrics: list[Any]) -> None:
        assert len(metrics) <= 1000
        self.logged[run] += metrics


def test_mlflow_gets_everything_once(trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeMlflow()
    entities = types.ModuleType("mlflow.entities")
    entities.Metric = lambda key, value, timestamp, step: types.SimpleNamespace(  # type: ignore[attr-defined]
        key=key, value=value, timestamp=timestamp, step=step
    )
    tracking = types.ModuleType("mlflow.tracking")
    tracking.MlflowClient = lambda: client  # type: ignore[attr-defined]
    for name, module in (
        ("mlflow", types.ModuleType("mlflow")),
        ("mlflow.entities", entities),
        ("mlflow.tracking", tracking),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    run = copy_run(trained_run, tmp_path / "run")
    write_metrics(run, "mlflow:forgetting")
    sifu.open_run(run).forget(["client-001"])
    write_metrics(run, "mlflow:forgetting")  # a new process finds the same MLflow run again
    assert write_metrics(run, "mlflow:forgetting") == 0
    ((key, logged),) = client.logged.items()
    assert client.runs[key]["mlflow.runName"] == "run"
    assert [(metric.step, metric.value) for metric in logged if metric.key == "accuracy"] == recorded(run)
    assert all(metric.timestamp > 1_600_000_000_000 for metric in logged)
    assert MlflowLog("forgetting", "other", "x").last_step == -1


def test_without_a_terminal_long_work_says_a_line_from_time_to_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from sifu.cli import output
    from sifu.run.training import Progress

    now = [0.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    with output.RoundsProgress() as bar:
        for number in range(1, 91):
            now[0] = float(number)
            bar(Progress("training", number, 0.5, 0.95, 1000))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("training: round 30, 50.0 % of 95 %")
