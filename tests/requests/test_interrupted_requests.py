"""Errors before the rollback of a request: shown with a remedy until the request is executed."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sifu
from run_tools import Command
from sifu.errors import NotCertifiableError


def table_run(folder: Path, kind: str) -> tuple[sifu.Run, Path]:
    """Return a run of a small table with a waiting request, and its file."""
    draws = np.random.default_rng(1).normal(size=(60, 2)).round(3)
    file = folder / "rows.csv"
    with file.open("w", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow(["site", "a", "b", "y"])
        writer.writerows([f"s{row % 5}", a, b, "yes" if a > b else "no"] for row, (a, b) in enumerate(draws.tolist()))
    data = {"name": "table", "partition": "given", "file": str(file), "label": "y", "client": "site"}
    spec: dict[str, Any] = {"data": {**data, "classes": "no,yes"}, "model": {"kind": kind}}
    spec |= {"local": {"rate": 0.05, "steps": 2}, "stop": {"target": 0.0, "max_rounds": 2}} if kind == "softmax" else {}
    run = sifu.train(spec, run=folder / "run")
    run.request(["s1"], "gone")
    return run, file


def shown(*answers: Any) -> list[str]:
    """Return the output of commands without whitespace, because lines may break anywhere."""
    return ["".join((answer.out + answer.err).split()) for answer in answers]


def test_a_data_file_that_is_missing_is_named_with_the_command(tmp_path: Path, cli: Command) -> None:
    run, file = table_run(tmp_path, "softmax")
    file.rename(tmp_path / "elsewhere.csv")
    failed = cli("forget", run.folder)
    assert failed.code == 2
    way = f"Request gone waits: sifu forget {run.folder} executes it once the cause of the error is removed (a missing "
    for text in shown(failed, cli("status", run.folder), cli("requests", run.folder)):
        assert f"thereisnofile{file}" in text
        assert "".join(way.split()) in text
    (tmp_path / "elsewhere.csv").rename(file)
    (outcome,) = run.forget()
    assert outcome.request == "gone"
    assert run.request_record("gone").failure == ""


def test_a_damaged_file_of_the_run_is_named_with_the_commands(tmp_path: Path, cli: Command) -> None:
    run, _ = table_run(tmp_path, "ridge")
    (kept,) = (run.folder / "statistics").glob("*sum.statistics")
    content = kept.read_bytes()
    kept.unlink()
    assert cli("forget", run.folder).code == 5
    failure = run.request_record("gone").failure
    assert failure.startswith(
        f"the statistics file {kept.name} cannot be read: No such file or directory. Request gone"
    )
    assert f"sifu verify {run.folder} lists them, and sifu restore BACKUP NEW_FOLDER restores the run" in failure
    kept.write_bytes(content)
    (outcome,) = run.forget()
    assert (outcome.level, run.request_record("gone").failure) == ("conditional", "")


def test_a_request_that_is_withdrawn_or_refused_shows_no_failure(tmp_path: Path, cli: Command) -> None:
    run, file = table_run(tmp_path, "softmax")
    with pytest.raises(NotCertifiableError):
        run.forget(request="gone", level="exact", method="sifu")  # its plan states the reason
    assert run.request_record("gone").failure == ""
    file.unlink()
    assert cli("forget", run.folder).code == 2
    assert run.request_record("gone").failure
    run.decide("gone", "withdrawn")
    assert run.request_record("gone").failure == ""
