"""Requests whose rounds can never be finished: they are settled with their current model, and the run stays usable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import sifu
import sifu_verifier
from run_tools import Command
from sifu.errors import InputError, NotCertifiableError
from sifu.run.training import RecordedTraining

SMALL: dict[str, Any] = {
    "data": {"clients": 10, "samples_per_client": 5},
    "local": {"rate": 0.05, "steps": 2},
    "stop": {"target": 0.0, "max_rounds": 3},
}
RIDGE: dict[str, Any] = {"data": SMALL["data"], "model": {"kind": "ridge"}}
WHY = "two sites left the study for good"


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Refuse every round of retraining, like nodes that can never satisfy it."""
    run = RecordedTraining.run

    def refuse(self: RecordedTraining, phase: str, *rest: Any) -> bool:
        if phase.startswith("retraining"):
            raise InputError("the nodes refuse every round")
        return run(self, phase, *rest)

    monkeypatch.setattr(RecordedTraining, "run", refuse)
    return monkeypatch


def status_of(run: sifu.Run, request: str = "gone") -> str:
    return run.request_record(request).status


@pytest.mark.parametrize("terms", [{"method": "scratch"}, {"method": "sifu", "sigma": 0.5, "level": "none"}])
def test_a_request_that_cannot_be_finished_is_settled(
    terms: dict[str, Any], tmp_path: Path, refusing: pytest.MonkeyPatch
) -> None:
    run = sifu.train(SMALL, run=tmp_path / "run")
    for _ in range(2):  # the same command fails in the same way
        with pytest.raises(InputError, match="refuse every round"):
            run.forget(["client-003"], "gone", **terms)
        assert status_of(run) == "running"
    with pytest.raises(InputError, match="needs a reason"):
        run.settle("gone", " ")
    level = run.settle("gone", WHY)
    assert (status_of(run), run.status().phase) == ("done", "ready")
    assert level == run.certificate("gone").body["level"]
    if terms["method"] == "scratch":
        assert level == "exact"
    assert run.request_record("gone").steps[-1].reason == WHY
    assert run.verify().problems == sifu_verifier.verify(run.folder) == []
    refusing.undo()
    run.forget(["client-004"], "next", method="scratch")
    assert run.verify().problems == sifu_verifier.verify(run.folder) == []
    assert "client-003" not in {client for row in run.outcomes() if row.request == "next" for client in row.clients}


def test_only_a_running_request_can_be_settled(tmp_path: Path) -> None:
    run = sifu.train(SMALL, run=tmp_path / "run")
    with pytest.raises(InputError, match="request gone is not in this run"):
        run.settle("gone", WHY)
    run.request(["client-003"], "gone")
    with pytest.raises(InputError, match="request gone is received"):
        run.settle("gone", WHY)
    run.forget(request="gone")
    with pytest.raises(InputError, match="request gone is done"):
        run.settle("gone", WHY)


def test_a_head_that_was_not_solved_cannot_be_settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = sifu.train(RIDGE, run=tmp_path / "run")

    def refuse(*_: Any) -> bool:
        raise InputError("no statistics")

    monkeypatch.setattr("sifu.run.closed_form_round.RecordedSolve.run", refuse)
    with pytest.raises(InputError, match="no statistics"):
        run.forget(["client-003"], "gone")
    with pytest.raises(InputError, match="has no head yet"):
        run.settle("gone", WHY)
    assert status_of(run) == "running"


def test_the_command_settles_and_the_list_says_why(tmp_path: Path, cli: Command, refusing: pytest.MonkeyPatch) -> None:
    run = sifu.train(SMALL, run=tmp_path / "run")
    with pytest.raises(InputError, match="refuse every round"):
        run.forget(["client-003"], "gone", method="scratch")
    settled = cli("decide", run.folder, "gone", "settle", "--reason", WHY, "--format", "json")
    assert settled.json["level"] == "exact"
    assert WHY in cli("requests", run.folder, "gone").out


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def test_a_failure_after_the_rollback_says_what_to_do(
    tmp_path: Path, cli: Command, refusing: pytest.MonkeyPatch
) -> None:
    run = sifu.train(SMALL, run=tmp_path / "run")
    run.request(["client-005"], "later")
    way = f"sifu decide {run.folder} gone settle --reason TEXT"
    for command in (["--client", "client-003", "--request", "gone", "--method", "scratch"], [], ["--request", "later"]):
        failed = cli("forget", run.folder, *command)
        assert failed.code == 2
        assert last_line(failed.err).startswith("sifu: the nodes refuse every round. Request gone is unfinished")
        assert way in last_line(failed.err)
    for shown in (cli("status", run.folder), cli("requests", run.folder, "gone")):
        assert "the nodes refuse every round. Request gone is unfinished" in " ".join(shown.out.split())
        assert "".join(way.split()) in "".join(shown.out.split())  # a long path may be broken at any place
    assert way in run.request_record("gone").failure
    assert run.request_record("later").failure == ""
    run.settle("gone", WHY)
    assert run.request_record("gone").failure == ""
    assert not list(run.folder.glob("failure*"))
    refusing.undo()
    (outcome,) = run.forget(request="later")
    assert outcome.request == "later"


def test_a_level_that_fails_after_the_rollback_is_no_waiting_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the rollback the run was changed, so the request is unfinished and no longer waiting."""
    run = sifu.train(SMALL, run=tmp_path / "run")
    run.request(["client-003"], "gone", method="scratch")
    run.request(["client-004"], "next", method="scratch")

    def refuse(*_: Any) -> bool:
        raise NotCertifiableError("rounding is not bounded")

    with monkeypatch.context() as patched:
        patched.setattr(RecordedTraining, "run", refuse)
        with pytest.raises(NotCertifiableError, match="rounding is not bounded") as failed:
            run.forget()
    assert "request gone:" not in str(failed.value)
    assert any("Request gone is unfinished" in note for note in failed.value.__notes__)
    assert [outcome.request for outcome in run.forget()] == ["gone", "next"]
