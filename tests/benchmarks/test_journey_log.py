"""Log of random journeys: a killed process loses only unfinished journeys, and none counts twice."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

import journey_log
from claims_against_truth import Findings
from journey_log import EVERY_FAMILY, Line, Log, family_of, missing


def log_of(file: Path, *seeds: int) -> Log:
    """Return a log with these journeys, of two requests each."""
    log = Log(file)
    with file.open("a", encoding="utf-8") as stream:
        for seed in seeds:
            findings = Findings(runs=1, requests=2, by_kind={"sets": 1}, closest=seed / 10)
            log.add(stream, Line(seed, "linear", 1.0, findings))
    return log


def test_a_call_goes_on_with_the_runs_that_are_missing(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    log_of(file, 0, 1, 3)
    file.write_text(file.read_text()[:-20])  # a kill in the middle of a line
    assert list(itertools.islice(missing(Log(file), 0, ["linear"]), 3)) == [2, 3, 4]


def test_a_run_that_stands_there_twice_counts_once(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    log_of(file, 0, 1, 2)
    file.write_text(file.read_text() * 2)
    log = Log(file)
    assert (log.findings.requests, log.findings.by_kind, log.findings.closest) == (6, {"sets": 3}, 0.2)
    assert log.summary()["seeds"] == "0-2"


def test_masked_runs_wait_for_a_machine_with_flower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journey_log.importlib.util, "find_spec", lambda _: None)
    numbers = list(itertools.islice(missing(Log(), 0, EVERY_FAMILY), 50))
    assert "masked" not in {family_of(number, EVERY_FAMILY) for number in numbers}
    assert "masked" in {family_of(number, EVERY_FAMILY) for number in range(50)}


def test_a_traceback_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("no client left")

    monkeypatch.setattr(journey_log, "audit_journey", broken)
    (violation,) = journey_log.one_journey(0, ["linear"]).findings.violations
    assert violation["kind"] == "traceback"
    json.dumps(violation)
