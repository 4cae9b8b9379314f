"""Premises of certificates on records restored from a backup or signed late, also with groups and statistics."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import sifu
from random_journeys import tables as table_clients
from run_tools import query, small_spec
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
    assert sifu.verify_run(folder).problems == []
    assert verify(folder) == []
    for file in (folder / "certificates").iterdir():
        assert sifu.verify_certificate(file).problems == []


def test_groups_in_a_restored_run_trust_the_record(tmp_path: Path) -> None:
    """After a restore with the certificate, the erased models of the client's group stay erased and the request is open
    again.
    """
    run = sifu.train(GROUPS, run=tmp_path / "run")
    anchor = run.backup(tmp_path / "backup.zip")
    run.forget(["client-001"], "gone", method="groups")
    assert "record" not in premises(run, "gone")
    issued = tmp_path / "run" / "certificates" / "gone.auditor.json"
    done = sifu.restore(tmp_path / "backup.zip", tmp_path / "back", anchor, certificates=[issued])
    back = sifu.open_run(tmp_path / "back")
    assert all(step.actor for step in back.request_record("gone").steps)
    held = {node for node, members in query(tmp_path / "back", "SELECT node, members FROM group_models")
            if 1 in json.loads(members)}  # fmt: skip
    assert held
    assert held.isdisjoint(node for (node,) in query(tmp_path / "back", "SELECT node FROM models"))
    assert set(done.erased) >= held & {node for (node,) in query(tmp_path / "run", "SELECT node FROM nodes")} - {0}
    (outcome,) = back.forget()
    assert (outcome.request, outcome.level) == ("gone", "exact")
    back.forget(["client-002"], "later", method="groups")
    back.forget(["client-003"], "noised", sigma=1.0, level="none")
    assert premises(back, "gone")["record"] == premises(back, "later")["record"] == "trusted"
    assert premises(back, "noised").get("record") == "assumed"
    assert_verifies(tmp_path / "back")


@pytest.mark.parametrize("keep", ["clients", "sum"])
def test_statistics_of_a_forgotten_client_do_not_come_back(tmp_path: Path, keep: str) -> None:
    clients = table_clients(np.random.default_rng(5), 6, 0, 3, (4,))
    spec = RIDGE | {"keep": {"statistics": keep}}
    run = sifu.train(spec, run=tmp_path / "run", clients=clients)
    anchor = run.backup(tmp_path / "backup.zip")
    run.forget(["client-002"], "gone")
    issued = tmp_path / "run" / "certificates" / "gone.public.json"
    sifu.restore(tmp_path / "backup.zip", tmp_path / "back", anchor, certificates=[issued])
    listed = query(tmp_path / "back", "SELECT file, clients FROM statistics")
    assert all(2 not in json.loads(members) for _, members in listed)
    assert {path.name for path in (tmp_path / "back" / "statistics").iterdir()} == {file for file, _ in listed}
    back = sifu.open_run(tmp_path / "back", clients=clients)
    (outcome,) = back.forget()
    assert (outcome.request, outcome.level) == ("gone", "exact")
    # this premise does not lower the level, because the head is a fresh one
    assert premises(back, "gone")["record"] == "assumed"
    sifu.train(spec, run=tmp_path / "never", clients=[client for client in clients if client.name != "client-002"])
    heads = []
    for folder in ("back", "never"):
        with sifu.open_run(tmp_path / folder).reader() as reader:
            heads.append(reader.load_model(reader.tip))
    np.testing.assert_array_equal(*heads)
    assert_verifies(tmp_path / "back")


def test_events_that_were_signed_late_are_trusted_at_best(tmp_path: Path) -> None:
    run = sifu.train(small_spec(), run=tmp_path / "run")
    run.forget(["client-000"], "before", sigma=1.0)
    key = tmp_path / "run" / "operator.key"
    key.rename(tmp_path / "elsewhere")
    run.request(["client-001"], "late", sigma=1.0)
    (tmp_path / "elsewhere").rename(key)
    assert run.sign() is not None
    run.forget(level="none")
    assert "signatures" not in premises(run, "before")
    assert premises(run, "late")["signatures"] == "trusted"
    assert run.outcomes()[0].level == run.outcomes()[1].level
    assert_verifies(tmp_path / "run")
