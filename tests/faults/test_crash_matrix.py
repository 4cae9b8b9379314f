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


CLOSED_FORM: dict[str, Any] = {
    "spec": spec_for("closed_form", data={"clients": 6, "samples_per_client": 10}),
    "requests": [
        {"id": "first", "clients": ["client-000", "client-003"], "terms": {}},
        {"id": "second", "clients": ["client-001"], "terms": {"retention": "strict"}},
    ],
    "joining": 1,
}


@pytest.mark.parametrize("every", [193, pytest.param(1, marks=pytest.mark.slow)])
def test_the_crash_matrix_of_a_closed_form_head(tmp_path: Path, every: int) -> None:
    """Faults in a solve, a client that joins, subtractions, and new solves."""
    result = matrix(tmp_path, **CLOSED_FORM, every=every)
    assert sum(result["faults"].values()) >= 4


GROUPS: dict[str, Any] = {
    "spec": spec_for(
        "groups",
        data={"clients": 6, "samples_per_client": 10},
        groups={"count": 3, "rounds": 2},
        stop={"target": 0.0, "max_rounds": 3},
    ),
    "requests": [
        {"id": "first", "clients": ["client-000"], "terms": {"method": "groups"}},
        {"id": "second", "clients": ["client-003"], "terms": {"method": "groups", "retention": "strict"}},
    ],
    "rebuild": True,
}


@pytest.mark.parametrize("every", [311, pytest.param(4, marks=pytest.mark.slow)])
def test_the_crash_matrix_of_groups(tmp_path: Path, every: int) -> None:
    """Faults in separate rounds, merges, erased groups and rebuilt groups."""
    result = matrix(tmp_path, **GROUPS, every=every)
    assert sum(result["faults"].values()) >= 4


OUTSIDE: dict[str, Any] = {
    "spec": JOB["spec"],
    "requests": JOB["requests"][:1],
    "witness": True,
    "backup": True,
}


@pytest.mark.parametrize("every", [167, pytest.param(2, marks=pytest.mark.slow)])
def test_the_crash_matrix_of_witnesses_and_backups(tmp_path: Path, every: int) -> None:
    """After any fault the witness and the backup agree with the run, nothing is lost, and no partial copy remains."""
    result = matrix(tmp_path, **OUTSIDE, every=every)
    assert sum(result["faults"].values()) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("share", range(4))
def test_every_point_of_the_crash_matrix(tmp_path: Path, share: int) -> None:
    """Four shares of one matrix together contain every fault at every point."""
    result = matrix(tmp_path, every=4, share=share)
    assert sum(result["faults"].values()) >= 3 * result["points"] // 4


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
