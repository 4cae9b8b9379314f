"""Faults at any point of a run: the run can be continued and then records what the uninterrupted one does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from faulty_runs import state_on_disk

import sifu
from forked_programs import run_program
from run_tools import connect, copy_run, environment, small_spec, spec_for
from sifu.errors import RunDamagedError
from sifu.store.files import stored_path

pytestmark = pytest.mark.long

PROGRAM = Path(__file__).with_name("faulty_runs.py")
JOB: dict[str, Any] = {
    "spec": small_spec(keep={"models": 4}, stop={"target": 0.0, "max_rounds": 2}),
    "requests": [
        {"id": "first", "clients": ["client-000"], "terms": {"sigma": 0.05}},
        {"id": "second", "clients": ["client-001"], "terms": {"sigma": 0.5}},
        {"id": "third", "clients": ["client-002"], "terms": {"sigma": 0.5, "retention": "strict"}},
        {"id": "both", "clients": ["client-003", "client-004"], "terms": {"sigma": 0.5}},
    ],
}


def matrix(folder: Path, **more: Any) -> dict[str, Any]:
    """Run the program, which compares every run it makes with the uninterrupted one; return its result."""
    printed = run_program(PROGRAM, folder, json.dumps(JOB | more), environment(), timeout=12000)
    result: dict[str, Any] = json.loads(printed)
    assert result["wrong"] == []
    print(
        f"crash matrix: {result['points']} points, {sum(result['faults'].values())} faults {result['faults']}, 0 lost"
    )
    return result


def test_a_sample_of_the_crash_matrix(tmp_path: Path) -> None:
    result = matrix(tmp_path, every=201)
    assert result["points"] >= 200
    assert {"write", "fsync", "replace", "unlink", "sql COMMIT", "sql VACUUM"} <= set(result["kinds"])
    assert sum(result["faults"].values()) >= 8


def closed_form(keep: str) -> dict[str, Any]:
    """Return a job of a head: a solve, a client that joins, subtractions and new solves."""
    small = {"clients": 6, "samples_per_client": 10}
    return {
        "spec": spec_for("closed_form", data=small, keep={"statistics": keep}),
        "requests": [
            {"id": "first", "clients": ["client-000", "client-003"], "terms": {}},
            {"id": "second", "clients": ["client-001"], "terms": {"retention": "strict"}},
        ],
        "joining": 1,
    }


MERGES = [
    {"id": "first", "clients": ["client-000"], "terms": {"method": "groups"}},
    {"id": "second", "clients": ["client-003"], "terms": {"method": "groups", "retention": "strict"}},
]
SAMPLED = small_spec(
    server={"participation": "poisson(0.4)"},
    local={"steps": 3, "weight_decay": 0.05},
    stop={"target": 0.0, "max_rounds": 6, "evaluate_every": 3},
)
JOBS: dict[str, tuple[int, dict[str, Any]]] = {
    "closed form": (193, closed_form("clients")),
    "closed form, sums": (193, closed_form("sum")),
    "groups": (311, {
        "spec": spec_for("groups", data={"clients": 6, "samples_per_client": 10}, groups={"count": 3, "rounds": 2},
                         stop={"target": 0.0, "max_rounds": 3}),
        "requests": MERGES,
        "rebuild": True,
    }),
    "witness, backup": (
        167, {"spec": JOB["spec"], "requests": JOB["requests"][:1], "witness": True, "backup": True}
    ),
    "rounds in one commit": (101, {"spec": SAMPLED, "requests": JOB["requests"][:2], "one_commit": True}),
}  # fmt: skip
"""Other jobs, each with the step between the faults that the sample tries."""


@pytest.mark.parametrize("name", JOBS)
def test_the_crash_matrix_of_other_jobs(tmp_path: Path, name: str) -> None:
    every, job = JOBS[name]
    assert sum(matrix(tmp_path, **job, every=every)["faults"].values()) >= 4


def test_only_equal_bytes_count_as_the_same_state(own_trained: Path) -> None:
    """One continuation represents all faults that left the same disk; a different bit, name or mode
    is another state.
    """
    states = {state_on_disk(own_trained)}
    model = next(path for path in sorted((own_trained / "models").rglob("*")) if path.is_file())
    content = model.read_bytes()
    for changed in (content[:-1] + bytes([content[-1] ^ 1]), content[:-1], content + b"\0"):
        model.write_bytes(changed)
        states.add(state_on_disk(own_trained))
    model.write_bytes(content)
    assert state_on_disk(own_trained) in states
    (own_trained / "models" / ".tmp-left").write_bytes(b"")
    states.add(state_on_disk(own_trained))
    model.chmod(0o777)
    states.add(state_on_disk(own_trained))
    connection = connect(own_trained)
    connection.execute("PRAGMA wal_autocheckpoint=0")
    connection.execute("UPDATE run SET value = value || ' ' WHERE key = 'tip'")
    states.add(state_on_disk(own_trained))
    connection.execute("UPDATE run SET value = value || ' ' WHERE key = 'tip'")
    states.add(state_on_disk(own_trained))
    connection.close()
    assert len(states) == 8


@pytest.mark.parametrize("damage", ["torn", "zeros at the end", "two swapped", "an older one", "empty"])
def test_torn_and_reordered_writes_of_models_are_noticed(run_with_requests: Path, tmp_path: Path, damage: str) -> None:
    """If a disk acknowledged writes that it did not make, the file is refused, never used."""
    folder = copy_run(run_with_requests, tmp_path / "run")
    run = sifu.open_run(folder)
    tip = int(run.reader().value("tip"))
    another = next(node for node in run.reader().models() if node != tip)
    path, other = stored_path(folder, "models", tip), stored_path(folder, "models", another)
    content = path.read_bytes()
    half = len(content) // 2
    path.write_bytes(
        {
            "torn": content[:half],
            "zeros at the end": content[:half] + bytes(len(content) - half),
            "two swapped": other.read_bytes(),
            "an older one": content[:half] + other.read_bytes()[half:],
            "empty": b"",
        }[damage]
    )
    assert any(f"node {tip}" in problem for problem in run.verify().problems)
    with pytest.raises(RunDamagedError):
        run.forget(["client-007"], "next", sigma=0.5)
