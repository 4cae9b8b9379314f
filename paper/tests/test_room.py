"""Disk space of run folders: estimated and refused beforehand, freed as rows are written, shared by links."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sifu.api import open_run
from sifu.errors import NoSpaceError
from sifu_paper import room as room_module
from sifu_paper import runner as runner_module
from sifu_paper.options import Options
from sifu_paper.room import Room, check_room, room_of
from sifu_paper.runner import Bench
from sifu_paper.table import read_table
from sifu_paper.trajectory import copy_run

PARAMETERS = {"mnist": 7850, "fashion_mnist": 824_458}


def options(out: Path, **more: Any) -> Options:
    chosen = {"seeds": (1,), "scale": "smoke", "datasets": ("digits",), "methods": ("sifu", "scratch"), "device": "cpu"}
    return Options("sequential", out, **(chosen | {"presets": ("paper",)} | more))


def estimate(out: Path, jobs: int, at_once: int, **more: Any) -> Room:
    work = Bench(options(out, scale="paper", **more)).work()
    parts: dict[Any, Any] = {}
    for task in work.trajectories:
        parts.setdefault((task.training.dataset, task.training.seed if jobs > 1 else 0), []).append(task)
    return room_of(parts.values(), jobs, at_once, lambda spec: 4 * PARAMETERS[spec.data.name])


def test_the_estimate_is_models_of_trainings_and_of_requests_at_a_time(tmp_path: Path) -> None:
    model = 4 * PARAMETERS["fashion_mnist"]
    options = {"datasets": ("fashion_mnist", "mnist"), "seeds": tuple(range(1, 11))}
    methods = ("sifu", "scratch", "noisy_scratch", "fine_tuning")
    # Ten trainings, forty concurrent requests: the 18.1 GB of paper/README.md.
    assert estimate(tmp_path, 1, 48, methods=methods, **options) == Room(50 * 110 * model)
    assert round(50 * 110 * model / 1e9, 1) == 18.1
    # On a CPU one request runs at a time; with one process per seed, each has its own training.
    assert estimate(tmp_path, 1, 1, methods=methods, **options) == Room(11 * 110 * model)
    assert estimate(tmp_path, 3, 1, methods=methods, **options) == Room(3 * 2 * 110 * model)
    # FedEraser's updates: ten clients of every tenth of 10,000 rounds, in a separate training.
    assert estimate(tmp_path, 1, 1, methods=("fed_eraser",), datasets=("fashion_mnist",)) == Room(
        2 * 110 * model, 1000 * 10 * model
    )


def test_too_little_room_is_refused_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(room_module.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(NoSpaceError, match=r"take at most [\d.]+ [kM]B of models .* where 1\.0 kB are free.*--lanes"):
        Bench(options(tmp_path / "out")).run()
    assert read_table(tmp_path / "out" / "results.csv") == []
    assert not (tmp_path / "out" / "runs").exists() or not any((tmp_path / "out" / "runs").iterdir())
    # Too little space for the updates gives a warning; the experiment's own folders count as free.
    assert "A full disk stops" in check_room(Room(900, 2000), tmp_path, tmp_path / "runs")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "model").write_bytes(b"x" * 500)
    (tmp_path / "runs" / "same model").hardlink_to(tmp_path / "runs" / "model")
    check_room(Room(1500), tmp_path, tmp_path / "runs")
    with pytest.raises(NoSpaceError):
        check_room(Room(1501), tmp_path, tmp_path / "runs")


def test_room_is_announced_once_and_folders_go_with_their_last_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentences: list[str] = []
    standing: list[set[str]] = []
    plain = runner_module.TrajectoryRun.execute

    def look(self: Any, requests: Any) -> None:
        plain(self, requests)
        standing.append({path.name for path in (tmp_path / "out" / "runs").iterdir()})

    monkeypatch.setattr(runner_module.TrajectoryRun, "execute", look)
    Bench(options(tmp_path / "out", seeds=(1, 2)), announce=sentences.append).run()
    assert len(sentences) == 1
    assert "where" in sentences[0]
    first, second = (f"train--digits--seed{seed}--paper--shared" for seed in (1, 2))
    # Four requests one after another, two of each seed: each finds its own folder and no finished one.
    assert standing == [
        {first, second, "digits--seed1--paper--sifu"},
        {first, second, "digits--seed1--paper--scratch"},
        {second, "digits--seed2--paper--sifu"},
        {second, "digits--seed2--paper--scratch"},
    ]
    assert not any((tmp_path / "out" / "runs").iterdir())


def test_a_failure_keeps_its_own_folders_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = runner_module.TrajectoryRun.execute

    def fail(self: Any, requests: Any) -> None:
        if (self.trajectory.training.seed, self.trajectory.method) == (1, "scratch"):
            raise RuntimeError("the lights went out")
        plain(self, requests)

    monkeypatch.setattr(runner_module.TrajectoryRun, "execute", fail)
    result = Bench(options(tmp_path / "out", seeds=(1, 2))).run()
    assert len(result.failures) == 1
    assert {path.name for path in (tmp_path / "out" / "runs").iterdir()} == {"train--digits--seed1--paper--shared"}


def test_requests_of_a_copy_leave_the_linked_models_of_its_training(tmp_path: Path) -> None:
    """A run never writes into a model file: a request removes only a name, and the training's stays."""
    Bench(options(tmp_path / "out", methods=("sifu",), keep_runs=True)).run()
    training = tmp_path / "out" / "runs" / "train--digits--seed1--paper--shared"
    before = {path.name: hashlib.sha256(path.read_bytes()).digest() for path in (training / "models").iterdir()}
    assert before
    copy_run(training, tmp_path / "copy")
    linked = [path for path in (tmp_path / "copy" / "models").iterdir() if path.stat().st_nlink > 1]
    assert len(linked) == len(before)
    run = open_run(tmp_path / "copy")
    run.forget([_first_client(run)], "leaves", method="scratch", level="none")
    run.purge()
    assert not any(path.exists() for path in linked[1:])
    after = {path.name: hashlib.sha256(path.read_bytes()).digest() for path in (training / "models").iterdir()}
    assert after == before


def _first_client(run: Any) -> str:
    with run.reader() as reader:
        return reader.clients()[0].name


def test_requests_wait_for_a_training_that_reaches_its_target(tmp_path: Path) -> None:
    """With `only_reached`, a training below its target is reported, and a repeated run does not train it again."""
    for max_rounds, rows, note in ((1, 1, "1 of 1 trainings ended at their limit"), (80, 4, "")):
        out = tmp_path / str(max_rounds)
        for _ in range(2):
            bench = Bench(options(out, methods=("scratch",), max_rounds=max_rounds))
            bench.experiment = replace(bench.experiment, only_reached=True)
            result = bench.run()
            assert not result.failures
            assert len(result.table.rows) == rows
            assert note in " ".join(result.notes)
            assert bool(result.notes) == bool(note)
        assert not any((out / "runs").iterdir())
