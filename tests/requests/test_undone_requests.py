"""Requests whose head can never be solved: they are withdrawn or refused, their clients return, and others continue."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sifu
import sifu_verifier
from run_tools import Command
from sifu.api.run import Run
from sifu.errors import InputError
from sifu.run.closed_form_round import RecordedSolve
from sifu.store.projection import NewEvent
from sifu.store.writer import RunWriter

GENERATOR = np.random.default_rng(6)
NAMES = tuple(f"site-{number}" for number in range(6))
CLIENTS = {name: (GENERATOR.normal(size=(9, 4)), GENERATOR.integers(0, 2, 9)) for name in NAMES}
RIDGE: dict[str, Any] = {"data": {"preprocessing": "fixed", "classes": "0,1"}, "model": {"kind": "ridge"}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "statistics of clients": (RIDGE, {}),
    "one sum": (RIDGE | {"keep": {"statistics": "sum"}}, {}),
    "records": (RIDGE, {"records": [1, 3]}),
    "strict": (RIDGE, {"retention": "strict"}),
    "noise on releases": (
        RIDGE | {"release": {"noise": 0.5}, "ridge": {"regularisation": 0.01}},
        {},
    ),
}


def model_of(run: Run) -> Any:
    with run.reader() as reader:
        return reader.load_model(reader.tip)


def sound(run: Run) -> bool:
    return run.verify().problems == sifu_verifier.verify(run.folder) == []


def never_had(folder: Path, spec: dict[str, Any], without: set[str]) -> Any:
    """Return the head of a run that never had these clients."""
    clients = {name: data for name, data in CLIENTS.items() if name not in without}
    return model_of(sifu.train(spec, run=folder, clients=clients))


@pytest.fixture
def unsolvable(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Make every solve of the request `gone` fail."""
    run = RecordedSolve.run

    def fail(self: RecordedSolve, phase: str, *rest: Any) -> bool:
        if phase == "retraining gone":
            raise np.linalg.LinAlgError("singular matrix")
        return run(self, phase, *rest)

    monkeypatch.setattr(RecordedSolve, "run", fail)
    return monkeypatch


@pytest.mark.parametrize("decision", ["withdrawn", "refused"])
@pytest.mark.parametrize("case", CASES)
def test_a_request_without_a_head_is_undone_and_others_go_on(
    case: str, decision: str, tmp_path: Path, unsolvable: pytest.MonkeyPatch
) -> None:
    spec, terms = CASES[case]
    run = sifu.train(spec, run=tmp_path / "run", clients=CLIENTS)
    run.request(["site-4"], "next")
    for _ in range(2):
        with pytest.raises(np.linalg.LinAlgError):
            run.forget(["site-1"], "gone", **terms)
    run.decide("gone", decision, "its head cannot be solved")
    assert run.request_record("gone").status.status == decision
    assert not list(run.folder.glob("failure*"))
    assert sound(run)
    (outcome,) = run.forget(request="next")
    assert (outcome.request, outcome.level) == ("next", "exact")
    assert sound(run)
    np.testing.assert_array_equal(model_of(run), never_had(tmp_path / "never", spec, {"site-4"}))
    run.purge()
    assert sound(run)
    unsolvable.undo()
    (later,) = run.forget(["site-1"], "again", **terms)  # the client, or its records, can be forgotten later
    assert later.level == "exact"
    assert sound(run)
    if not terms.get("records"):
        np.testing.assert_array_equal(model_of(run), never_had(tmp_path / "both", spec, {"site-1", "site-4"}))


def test_the_next_release_contains_the_client_again(tmp_path: Path, unsolvable: pytest.MonkeyPatch) -> None:
    run = sifu.train(RIDGE, run=tmp_path / "run", clients=CLIENTS)
    before = model_of(run)
    with pytest.raises(np.linalg.LinAlgError):
        run.forget(["site-1", "site-2"], "gone")
    run.decide("gone", "withdrawn")
    run.release()
    np.testing.assert_array_equal(model_of(run), before)
    assert {client.state for client in run.status().clients} == {"active"}
    assert sound(run)


def test_no_model_is_served_until_a_head_is_solved_again(
    tmp_path: Path, cli: Command, unsolvable: pytest.MonkeyPatch
) -> None:
    """The rollback left a head of zeros, which must not be served as the clients' model."""
    run = sifu.train(RIDGE, run=tmp_path / "run", clients=CLIENTS)
    before = run.model().state_dict()
    with pytest.raises(np.linalg.LinAlgError):
        run.forget(["site-1"], "gone")
    run.decide("gone", "withdrawn")
    uses: list[Callable[[], Any]] = [run.model, lambda: run.export(tmp_path / "head.safetensors"), run.evaluate]
    for use in uses:
        with pytest.raises(InputError, match="sifu release"):
            use()
    assert not (tmp_path / "head.safetensors").exists()
    assert f"There is no head: sifu release {run.folder} solves one." in " ".join(cli("status", run.folder).out.split())
    run.release()
    after = run.model().state_dict()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert run.evaluate().rows == 54
    assert "There is no head" not in cli("status", run.folder).out


def test_a_request_with_a_head_is_not_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = sifu.train(RIDGE, run=tmp_path / "run", clients=CLIENTS)

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr("sifu.requests.worker.issue_certificates", fail)
        with pytest.raises(OSError, match="no space left"):
            run.forget(["site-1"], "gone")
    with pytest.raises(InputError, match="request gone is running: it can no longer be withdrawn"):
        run.decide("gone", "withdrawn")
    (outcome,) = run.forget()
    assert outcome.request == "gone"
    assert sound(run)


def test_the_error_says_how_to_end_the_request(tmp_path: Path, cli: Command, unsolvable: pytest.MonkeyPatch) -> None:
    run = sifu.train(RIDGE, run=tmp_path / "run", clients=CLIENTS)
    with pytest.raises(np.linalg.LinAlgError):
        run.forget(["site-1"], "gone")
    way = f"sifu requests decide {run.folder} gone withdrawn ends it, and its clients take part again"
    assert way in run.request_record("gone").status.failure
    assert cli("requests", "decide", run.folder, "gone", "withdrawn").code == 0
    assert run.request_record("gone").status.failure == ""


FORGED: dict[str, dict[str, Any]] = {
    "another subject": {"subjects": [7]},
    "another node": {"noise_node": 0},
    "a client that did not join again": {"unused": [2]},
}


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_undoing_is_noticed(case: str, tmp_path: Path, unsolvable: pytest.MonkeyPatch) -> None:
    run = sifu.train(RIDGE, run=tmp_path / "run", clients=CLIENTS)
    with pytest.raises(np.linalg.LinAlgError):
        run.forget(["site-1"], "gone")
    with RunWriter.open(run.folder) as writer:
        undone = {"noise_node": writer.tip, "subjects": [1], "unused": []} | FORGED[case]
        payload = {"request": "gone", "actor": "m", "reason": "", "run": {"phase": "ready"}, "undone": undone}
        writer.record(NewEvent("request withdrawn", payload))
    assert run.verify().problems
    assert sifu_verifier.verify(run.folder)


def test_a_finished_request_that_is_undone_is_noticed(tmp_path: Path) -> None:
    run = sifu.train(RIDGE, run=tmp_path / "run", clients=CLIENTS)
    run.forget(["site-1"], "gone")
    with RunWriter.open(run.folder) as writer:
        undone = {"noise_node": writer.tip - 1, "subjects": [1], "unused": []}
        payload = {"request": "gone", "actor": "m", "reason": "", "run": {"phase": "ready"}, "undone": undone}
        writer.record(NewEvent("request withdrawn", payload))
    assert run.verify().problems
    assert sifu_verifier.verify(run.folder)
