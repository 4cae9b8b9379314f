"""Predicted time of a request on a closed-form head: its growth, and where it is shown."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import sifu
from run_tools import Command, small_spec
from sifu.cli.output import duration
from sifu.methods import registry
from sifu.planning import solve_time
from sifu.planning.solve_time import START_STEPS, Speed
from sifu.theory.closed_form.ridge import WIDE
from sifu.theory.history import PathNode

MACHINE = Speed(factors=3e10, threads=2, bytes=4e9, steps=5e6)
START = START_STEPS / MACHINE.steps
SPEC = {"data": {"preprocessing": "fixed"}, "model": {"kind": "ridge", "outputs": 2}, "ridge": {"regularisation": 0.1}}


def test_wide_heads_take_the_cube_of_their_features() -> None:
    """Doubling the features of a wide head multiplies the work by 4 to 8, closer to 8 the wider the head is."""
    work = [MACHINE.seconds(features, 100) - START for features in (2 * WIDE, 4 * WIDE, 64 * WIDE, 128 * WIDE)]
    assert 4.0 < work[1] / work[0] < 8.0
    assert work[1] / work[0] < work[3] / work[2] < 8.0
    assert work[3] / work[2] > 7.8


@pytest.mark.parametrize("features", [100, WIDE, WIDE + 1])
def test_what_else_a_prediction_depends_on(features: int) -> None:
    seconds = MACHINE.seconds(features, 100)
    assert MACHINE.seconds(features, 200) > seconds
    assert MACHINE.seconds(features, 100, cross_validated=True) > seconds
    more_threads = replace(MACHINE, threads=16).seconds(features, 0)
    assert (more_threads < MACHINE.seconds(features, 0)) == (features > WIDE)  # narrow heads use one thread


def test_this_machine_has_a_speed() -> None:
    speed = solve_time.measured_speed()
    assert min(speed.factors, speed.threads, speed.bytes, speed.steps) > 0
    assert solve_time.measured_speed() is speed


@pytest.mark.parametrize("features", [10, WIDE, WIDE + 1, 8 * WIDE])
def test_a_machine_that_is_three_times_slower_takes_three_times_as_long(
    monkeypatch: pytest.MonkeyPatch, features: int
) -> None:
    """The prediction scales with the measured speeds and contains no constant number of seconds."""
    predicted = []
    for pace in (1.0, 3.0):
        ticks = itertools.count()
        monkeypatch.setattr(solve_time.time, "thread_time", lambda ticks=ticks, pace=pace: 0.01 * pace * next(ticks))
        predicted.append(solve_time.measured_speed.__wrapped__().seconds(features, 100))
    assert predicted[1] == pytest.approx(3.0 * predicted[0])


def test_the_seconds_of_rounds_include_the_start_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of few rounds is not faster than the command that executes it; waiting nodes need no start."""
    monkeypatch.setattr(registry, "measured_speed", lambda: MACHINE)
    monkeypatch.setattr(registry, "_seconds_a_round", lambda view: 0.25)
    run = sifu.train(small_spec(), run=tmp_path / "run")
    ways = [way for way in run.plan(["client-001"]).ways if way.rounds]
    assert {way.method for way in ways} >= {"sifu", "scratch"}
    for way in ways:
        assert way.seconds == pytest.approx(START + 0.25 * way.rounds)
    monkeypatch.setattr(registry, "FLOWER", run.spec.data.name)
    for way in run.plan(["client-001"]).ways:
        assert way.seconds is None or way.seconds == pytest.approx(0.25 * way.rounds)


def test_rounds_of_groups_count_in_the_seconds_of_a_round() -> None:
    """Eight rounds of groups and two common rounds in 40 seconds take four seconds each."""
    nodes = [
        PathNode(0, None, "initial", 0, 0),
        *(PathNode(1 + group, 0, "group", 0, 8) for group in range(3)),
        PathNode(4, 0, "merge", 0, 8),
        PathNode(5, 4, "round", 0, 9),
        PathNode(6, 5, "round", 0, 10),
        PathNode(7, 4, "round", 1, 1),  # after a request
    ]
    times = [("2026-01-01T00:00:00Z",), ("2026-01-01T00:00:40Z",)]
    reader = SimpleNamespace(query=lambda sql: times, nodes=lambda: nodes)
    assert registry._seconds_a_round(SimpleNamespace(reader=reader)) == 4.0  # type: ignore[arg-type]


@pytest.mark.parametrize("keep", ["clients", "sum"])
def test_a_plan_shows_the_seconds_of_a_solve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Command, keep: str
) -> None:
    """A plan shows the seconds of a solve only if clients' statistics are kept; waiting for clients
    is not predicted.
    """
    monkeypatch.setattr(solve_time, "measured_speed", lambda: Speed(1e3, 1, 1e3, 1e6))
    random = np.random.default_rng(0)
    clients = {f"c{name}": (random.random((6, 3)), np.arange(6) % 2) for name in range(4)}
    run = sifu.train(SPEC | {"keep": {"statistics": keep}}, run=tmp_path / "run", clients=clients)
    expected = Speed(1e3, 1, 1e3, 1e6).seconds(3, 6 if _keeps_rows(tmp_path / "run") else 0)
    (way,) = [way for way in run.plan(["c1"]).ways if way.method == "closed_form"]
    assert (way.seconds == pytest.approx(expected)) == (keep == "clients")
    shown = cli("plan", tmp_path / "run", "--clients", "c1").out
    printed = json.loads(cli("plan", tmp_path / "run", "--clients", "c1", "--format", "json").out)
    (found,) = [way for way in printed["ways"] if way["method"] == "closed_form"]
    assert found["seconds"] == way.seconds
    assert (duration(expected) in shown) == (keep == "clients")


def _keeps_rows(folder: Path) -> bool:
    return any(path.name.endswith(".rows.statistics") for path in (folder / "statistics").iterdir())
