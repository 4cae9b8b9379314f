"""Kills at any instant: the run continues as if it had not been interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forked_programs import run_program
from run_tools import environment, scalars, small_spec, spec_for
from scripted_job import problems_outside
from sifu.api import verify_run

pytestmark = pytest.mark.long

PROGRAM = Path(__file__).with_name("killed_runs.py")
REQUESTS = [
    {"id": "first", "clients": ["client-000", "client-001"], "terms": {"sigma": 0.05}},
    {"id": "second", "clients": ["client-002", "client-003"], "terms": {"retention": "strict"}},
]
SPECS = {
    "everyone": small_spec(keep={"models": 5}),
    "poisson, strongly convex": small_spec(
        server={"participation": "poisson(0.4)"},
        local={"steps": 3, "weight_decay": 0.05},
        stop={"target": 0.0, "max_rounds": 12, "evaluate_every": 3},
    ),
}
MERGES = [
    {"id": "first", "clients": ["client-000"], "terms": {"method": "groups"}},
    {"id": "second", "clients": ["client-002", "client-003"], "terms": {"method": "groups", "retention": "strict"}},
]
SEPARATE = small_spec(groups={"count": 4, "rounds": 3})
LATER = small_spec(groups={"count": 4, "rounds": 3})


def kill_repeatedly(folder: Path, **job: Any) -> dict[str, Any]:
    """Run the program; return its counts of kills."""
    wanted = {"requests": REQUESTS, "purge": False, "seed": 1, "runs": 0, "kills_a_run": 0, "every_call": 0, **job}
    printed = run_program(PROGRAM, folder, json.dumps(wanted), environment(), timeout=1500)
    result: dict[str, Any] = json.loads(printed)
    print(result)
    return result


def test_control_a_program_that_fails_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys\nsys.exit(f'{len(sys.argv)} words')\n")
    with pytest.raises(AssertionError, match="exit code 1: 3 words"):
        run_program(tmp_path / "program.py", tmp_path, "", environment(), timeout=600)


def check_all_equal(folder: Path) -> int:
    """Check that every killed run verifies and recorded what the uninterrupted one did; return the number of runs."""
    reference = folder / "uninterrupted"
    expected = scalars(reference)
    assert verify_run(reference).problems == []
    others = [path for path in sorted(folder.iterdir()) if path != reference and (path / "run.db").exists()]
    for path in others:
        recorded = scalars(path)
        for table, rows in expected.items():
            assert recorded[table] == rows, f"{table} of {path.name} differs"
        assert problems_outside(path) == []
        assert list(path.rglob(".*")) == [], "temporary files were left"
    return len(others)


FEW_RUNS = [1, pytest.param(2, marks=pytest.mark.slow)]
"""Numbers of runs that are killed again and again. Each is killed at least once; how often depends on the machine."""


@pytest.mark.parametrize("runs", FEW_RUNS)
@pytest.mark.parametrize("name", SPECS)
def test_killed_runs_end_like_uninterrupted_ones(tmp_path: Path, name: str, runs: int) -> None:
    result = kill_repeatedly(tmp_path, spec=SPECS[name], runs=runs, kills_a_run=5, every_call=0)
    assert result["kills"] >= runs
    assert check_all_equal(tmp_path) == runs + 1


def test_rounds_committed_in_groups_are_run_again(tmp_path: Path) -> None:
    """With a single commit at the end, a kill loses every round, and they are recomputed bit for bit."""
    result = kill_repeatedly(tmp_path, spec=SPECS["everyone"], runs=1, kills_a_run=4, seed=3, commit_seconds=1e9)
    assert result["kills"] >= 1
    assert check_all_equal(tmp_path) == 2


@pytest.mark.parametrize("runs", FEW_RUNS)
def test_killed_runs_in_groups_end_like_uninterrupted_ones(tmp_path: Path, runs: int) -> None:
    """After any kill in separate rounds, merges, requests, or rebuilt groups, the run
    recovers bit for bit.
    """
    job = {"spec": LATER, "requests": MERGES, "rebuild": True}
    result = kill_repeatedly(tmp_path, **job, runs=runs, kills_a_run=8, seed=6)
    assert result["kills"] >= runs
    assert check_all_equal(tmp_path) == runs + 1


@pytest.mark.parametrize("every", [2003, pytest.param(16, marks=pytest.mark.slow)])
def test_a_kill_anywhere_in_a_run_in_groups(tmp_path: Path, every: int) -> None:
    result = kill_repeatedly(tmp_path, spec=SEPARATE, requests=MERGES, every_call=every, first_call=150, seed=6)
    assert result["kills"] >= 3
    check_all_equal(tmp_path)


@pytest.mark.parametrize("keep", ["clients", "sum"])
@pytest.mark.parametrize("every", [1021, pytest.param(29, marks=pytest.mark.slow)])
def test_killed_closed_form_runs_end_like_uninterrupted_ones(tmp_path: Path, keep: str, every: int) -> None:
    """Kills while clients join and statistics are written, subtracted and erased lose nothing.

    The sum of the remaining clients is never lost and never contains others.
    """
    spec = spec_for("closed_form", keep={"statistics": keep})
    requests = [
        {"id": "first", "clients": ["client-000", "client-001"], "terms": {}},
        {"id": "second", "clients": ["client-002"], "terms": {"retention": "strict"}},
    ]
    job = {"spec": spec, "requests": requests, "joining": 2, "witness": True}
    result = kill_repeatedly(tmp_path, **job, runs=1, kills_a_run=6, every_call=every, seed=5)
    assert result["kills"] > result["calls"] // every
    check_all_equal(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_many_random_kills(tmp_path: Path, name: str, seed: int) -> None:
    result = kill_repeatedly(tmp_path, spec=SPECS[name], runs=5, kills_a_run=12, seed=seed)
    assert result["kills"] >= 5
    assert check_all_equal(tmp_path) == 6


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_while_the_run_is_being_created(tmp_path: Path, every: int) -> None:
    """Until the database has its final name the folder is not a run; the same command makes it one."""
    spec = small_spec(stop={"target": 0.0, "max_rounds": 1})
    result = kill_repeatedly(tmp_path, spec=spec, requests=[], every_call=every, last_call=140)
    assert result["kills"] >= 140 // every
    assert check_all_equal(tmp_path) >= 140 // every


@pytest.mark.slow
@pytest.mark.parametrize("share", range(4))
def test_a_kill_at_every_sixteenth_call_that_touches_the_disk(tmp_path: Path, share: int) -> None:
    result = kill_repeatedly(tmp_path, spec=SPECS["everyone"], every_call=64, first_call=150 + 16 * share)
    assert result["kills"] >= 20
    check_all_equal(tmp_path)


@pytest.mark.parametrize("runs", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_killed_runs_with_system_noise_verify(tmp_path: Path, runs: int) -> None:
    """The noise cannot be drawn again, so the runs differ, but each of them verifies."""
    result = kill_repeatedly(tmp_path, spec=small_spec(), runs=runs, kills_a_run=5, seed=7)
    assert result["kills"] >= runs
    for path in sorted(tmp_path.iterdir()):
        assert verify_run(path).problems == []
        done = {row[0]: row[1] for row in scalars(path)["requests"]}
        assert done == {"first": "done", "second": "done"}
