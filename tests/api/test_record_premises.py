"""Premises of certificates on records restored from a backup or signed late, also with groups and statistics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runs
import sifu
from forged_runs import rebuild_chain
from random_journeys import tables as table_clients
from run_tools import Command, small_spec
from sifu_verifier import verify

GROUPS = small_spec(
    data={"clients": 8, "samples_per_client": 6},
    local={"steps": 2, "rate": 0.05},
    stop={"target": 0.0, "max_rounds": 4},
    groups={"count": 3, "rounds": 2},
)
RIDGE = {"data": {"preprocessing": "fixed"}, "model": {"kind": "ridge", "outputs": 3}, "features": {"norm": 8.0}}


def premises(run: sifu.Run, request: str) -> dict[str, str]:
    """Return the status of each premise of a certificate, by name."""
    return {row["name"]: row["status"] for row in run.certificate(request, "auditor").body["premises"]}


def assert_verifies(folder: Path) -> None:
    assert sifu.verify(folder).problems == []
    assert verify(folder) == []
    for file in (folder / "certificates").iterdir():
        assert sifu.verify(file).problems == []


def test_premises_on_the_record_of_a_restored_run(tmp_path: Path) -> None:
    run = sifu.train(GROUPS, run=tmp_path / "run")
    run.backup(tmp_path / "backup.zip")
    run.forget(["client-001"], "gone", method="groups")
    assert "record" not in premises(run, "gone")
    sifu.restore(tmp_path / "backup.zip", tmp_path / "back")
    back = sifu.open_run(tmp_path / "back")
    (outcome,) = back.forget(["client-001"], "gone", method="groups")
    assert (outcome.request, outcome.level) == ("gone", "exact")
    back.forget(["client-003"], "noised", sigma=1.0, level="none")
    assert premises(back, "gone")["record"] == "trusted"
    assert premises(back, "noised").get("record") == "assumed"
    assert_verifies(tmp_path / "back")


@pytest.mark.parametrize("keep", ["clients", "sum"])
def test_a_head_solved_after_a_restore_is_exact(tmp_path: Path, keep: str) -> None:
    clients = table_clients(np.random.default_rng(5), 6, 0, 3, (4,))
    spec = RIDGE | {"keep": {"statistics": keep}}
    run = sifu.train(spec, run=tmp_path / "run", clients=clients)
    run.backup(tmp_path / "backup.zip")
    run.forget(["client-002"], "gone")
    sifu.restore(tmp_path / "backup.zip", tmp_path / "back")
    back = sifu.open_run(tmp_path / "back", clients=clients)
    (outcome,) = back.forget(["client-002"], "gone")
    # This premise does not lower the level, because the head is a fresh one.
    assert (outcome.level, premises(back, "gone")["record"]) == ("exact", "assumed")
    heads = []
    for folder in ("back", "run"):
        with sifu.open_run(tmp_path / folder).reader() as reader:
            heads.append(reader.load_model(reader.tip))
    np.testing.assert_array_equal(*heads)
    assert_verifies(tmp_path / "back")


@pytest.mark.parametrize("records", [None, [0]])
def test_requests_that_a_restored_run_lacks_are_named_until_they_are_filed(
    tmp_path: Path, records: list[int] | None, cli: Command
) -> None:
    clients = table_clients(np.random.default_rng(5), 6, 0, 3, (4,))
    run = sifu.train(RIDGE, run=tmp_path / "run", clients=clients)
    run.forget(["client-001"], "before")
    run.backup(tmp_path / "backup.zip")
    terms: dict[str, Any] = {} if records is None else {"records": records}
    run.forget(["client-002"], "gone", **terms)
    issued = sorted((tmp_path / "run" / "certificates").glob("*.json"))
    assert len(issued) == 4
    given = [word for file in issued for word in ("--certificate", file)]
    answer = cli("restore", tmp_path / "backup.zip", tmp_path / "back", *given, "--format", "json")
    assert answer.code == 0, answer.err
    (lost,) = answer.json["requests"]
    assert "request gone for" in lost
    assert "sifu forget DIR --clients client-002" in lost
    back = sifu.open_run(tmp_path / "back", clients=clients)
    assert lost in back.status().warnings
    assert lost in back.verify().notes
    assert cli("status", tmp_path / "back").code == 0
    back.forget(["client-002"], "again", **terms)
    assert lost not in (*back.status().warnings, *back.verify().notes)
    assert_verifies(tmp_path / "back")


def test_a_forged_restoration_is_found(tmp_path: Path) -> None:
    run = sifu.open_run(runs.own("trained", tmp_path))
    run.backup(tmp_path / "backup.zip")
    sifu.restore(tmp_path / "backup.zip", tmp_path / "back")

    def from_nowhere(kind: str, content: dict[str, Any]) -> None:
        if kind == "restored":
            content["backup_head"] = f"1:{'0' * 64}"

    assert sifu.verify(tmp_path / "back").problems == verify(tmp_path / "back") == []
    rebuild_chain(tmp_path / "back", from_nowhere)
    assert any(problem.startswith("restored: ") for problem in sifu.verify(tmp_path / "back").problems)
    assert any("head of the backup" in problem for problem in verify(tmp_path / "back"))


def test_events_that_were_signed_late_are_trusted_at_best(tmp_path: Path) -> None:
    run = sifu.open_run(runs.own("trained", tmp_path))
    run.forget(["client-000"], "before", sigma=1.0)
    key = run.folder / "operator.key"
    key.rename(tmp_path / "elsewhere")
    run.request(["client-001"], "late", sigma=1.0)
    (tmp_path / "elsewhere").rename(key)
    run.forget(level="none")
    assert "signatures" not in premises(run, "before")
    assert premises(run, "late")["signatures"] == "trusted"
    assert run.outcomes()[0].level == run.outcomes()[1].level
    assert_verifies(run.folder)
