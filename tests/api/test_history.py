"""`Run.history` and the CSV file beside the report: every evaluation once, in order, with its request."""

from __future__ import annotations

import csv
import sqlite3
from pathlib import Path

import pytest

import sifu
from run_tools import Command, copy_run
from sifu.run.run_view import ACTIVE


def test_every_evaluation_is_there_once(trained_run: Path, tmp_path: Path, cli: Command) -> None:
    folder = copy_run(trained_run, tmp_path / "run")
    run = sifu.open_run(folder)
    run.forget(["client-001"], "gone")
    rows = run.history()
    with sqlite3.connect(folder / "run.db") as connection:
        recorded = connection.execute(
            "SELECT node, accuracy FROM evaluations WHERE subset = ? ORDER BY node", (ACTIVE,)
        ).fetchall()
    assert [(row.step, row.accuracy) for row in rows] == recorded
    assert [row.request for row in rows] == ["gone" if row.branch else "" for row in rows]
    assert {row.request for row in rows} == {"", "gone"}
    assert cli("report", folder).code == 0
    with (folder / "report" / "history.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [float(row["accuracy"]) for row in written] == [pytest.approx(row.accuracy) for row in rows]
    assert "client-" not in (folder / "report" / "history.csv").read_text()
