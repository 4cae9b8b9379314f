"""Approval of requests: enforced by the ledger, on the command line, while another process writes,
and by verification.
"""

from __future__ import annotations

import json
import random
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import sifu
from run_tools import Command, copy_run, dump, query, small_spec, state
from sifu.core.ledger import canonical_json
from sifu.core.spec import Spec
from sifu.errors import InputError, NotCertifiableError, SifuError
from sifu.requests.messages import ingest
from sifu.requests.worker import Worker
from sifu.run.clients_and_engine import clients_from_spec, engine_from_spec
from sifu.server.server_loop import serve
from sifu.store.actors import same_person
from sifu.store.given_approvals import unapproved
from sifu.store.inbox import messages
from sifu.store.projection import NewEvent
from sifu.store.writer import RunWriter
from sifu_verifier import verify as verify_independently
from sifu_verifier.request_steps import person


@pytest.fixture(scope="module")
def runs_with_approval(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for approval in ("one", "two"):
        folders[approval] = tmp_path_factory.mktemp("approval") / approval
        sifu.train(small_spec(requests={"approval": approval}), run=folders[approval])
    return folders


@pytest.fixture
def two(runs_with_approval: dict[str, Path], tmp_path: Path) -> Path:
    """Return a copy of a run whose requests two people must approve."""
    return copy_run(runs_with_approval["two"], tmp_path / "two")


@pytest.fixture
def one(runs_with_approval: dict[str, Path], tmp_path: Path) -> Path:
    return copy_run(runs_with_approval["one"], tmp_path / "one")


@pytest.mark.parametrize(
    ("filed", "others"),
    [
        ("Ren\u00e9", ["Rene\u0301", "REN\u00c9"]),
        ("Ann Lee", ["Ann  Lee", "\uff21nn lee"]),
        ("fin", ["\ufb01n"]),
        ("Ann", ["An\u034fn", "Ann\u3164", "Ann\ufe0f", "\u2800Ann"]),  # invisible, but printable for Python
    ],
)
def test_another_spelling_is_not_another_person(one: Path, filed: str, others: list[str]) -> None:
    run = sifu.open_run(one)
    run.request(["client-003"], "a", actor=filed)
    for spelling in others:
        with pytest.raises(InputError, match="filed request a, so another person must approve it"):
            run.decide("a", "approved", actor=spelling)
    with pytest.raises(InputError, match="not blank"):
        run.decide("a", "approved", actor=" ")
    assert run.forget() == []


def test_the_independent_verifier_compares_people_alike() -> None:
    dice = random.Random(0)
    signs = "aA\u00df\u0130\u0301\u034f\u1160\u200b\u2800\u3164\ufb01\ufe0f\uff21 \u00a0e"
    names = ["".join(dice.choices(signs, k=dice.randint(1, 5))) for _ in range(2000)]
    assert [same_person(name) for name in names] == [person(name) for name in names]


@pytest.mark.parametrize("decision", ["withdrawn", "refused"])
def test_a_request_that_was_ended_cannot_be_approved_again(one: Path, cli: Command, decision: str) -> None:
    run = sifu.open_run(one)
    run.request(["client-003"], "a", actor="ann")
    approve = ("decide", one, "a", "approve", "--actor", "bob")
    assert cli(*approve).code == 0
    assert "was already approved" in cli(*approve).out  # negative control: it waits
    run.decide("a", decision, "a mistake", actor="ann")
    answer = cli(*approve)
    assert answer.code == 2
    assert f"request a is {decision}: it can no longer be approved" in answer.err


def test_two_different_people_who_did_not_ask_must_approve(two: Path, cli: Command) -> None:
    run = sifu.open_run(two)
    run.request(["client-003"], "a", actor="rita")
    assert run.forget() == []
    with pytest.raises(InputError, match="not approved yet and needs 2 more"):
        run.forget(request="a")
    with pytest.raises(InputError, match="rita filed request a"):
        run.decide("a", "approved", actor=" Rita ")
    answer = cli("decide", two, "a", "approve", "--actor", "ann", "--format", "json").json
    assert (answer["approvals_missing"], answer["next"]) == (1, f"sifu decide {two} a approve --actor NAME")
    # a second approval by the same person does not count
    assert run.decide("a", "approved", actor="ANN") == "unchanged"
    assert "needs 1 more approval" in cli("requests", two).out
    assert "waiting for approval" in cli("status", two).out
    assert cli("forget", two, "--request", "a").code == 2
    answer = cli("decide", two, "a", "approve", "--actor", "bob", "--format", "json").json
    assert (answer["approvals_missing"], answer["next"]) == (0, f"sifu forget {two}")
    for command in ("requests", "status"):
        assert cli(command, two, "--format", "json").json["requests"][0]["status"] == "approved"
        assert "received;" not in cli(command, two).out
    assert cli(*answer["next"].split()[1:]).code == 0
    (outcome,) = run.outcomes()
    assert outcome.request == "a"
    record = run.request_record("a")
    assert [step.status for step in record.steps] == ["received", "approved", "approved", "planned", "running", "done"]
    assert (record.filed_by, record.approvals) == ("rita", ("ann", "bob"))
    assert run.verify().problems == []
    assert verify_independently(two) == []
    with pytest.raises(InputError, match="can no longer be approved"):
        run.decide("a", "approved", actor="carl")


def test_one_approval_is_enough_where_one_is_asked_for(one: Path) -> None:
    run = sifu.open_run(one)
    run.request(["client-003"], "a", actor="rita")
    run.request(["client-004"], "b", actor="rita")
    run.decide("b", "approved", actor="ann")
    assert [outcome.request for outcome in run.forget()] == ["b"]  # the first request waits and does not block others
    assert run.request_record("a").approvals_missing == 1
    run.decide("a", "refused", "not theirs", actor="ann")
    assert run.request_record("a").approvals_missing == 0
    assert run.verify().problems == []


def test_a_new_request_is_not_carried_out_at_once(two: Path, cli: Command) -> None:
    before = state(two)
    answer = cli("forget", two, "--clients", "client-003")
    assert answer.code == 2
    assert "file the request with sifu request" in answer.err
    assert state(two) == before


def test_without_approval_nothing_changes(own_trained: Path) -> None:
    run = sifu.open_run(own_trained)
    run.request(["client-003"], "a", actor="rita")
    run.decide("a", "approved", actor="ann")  # recorded, although no approval is required
    assert [outcome.request for outcome in run.forget()] == ["a"]
    assert run.verify().problems == []
    assert verify_independently(own_trained) == []


def test_an_approval_demanded_of_a_spec_is_one_of_three() -> None:
    with pytest.raises(InputError, match="none, one, two"):
        Spec.from_mapping({"requests": {"approval": "three"}})


def executed_without(two: Path, approvers: list[str]) -> sifu.Run:
    """Execute a request as an operator with the key, although approvals are missing."""
    run = sifu.open_run(two)
    run.request(["client-003"], "a", actor="rita")
    with RunWriter.open(two) as writer:
        for approver in approvers:
            digest = writer.requests()[0].terms.digest("a")
            writer.record(
                NewEvent("request approved", {"request": "a", "actor": approver, "reason": "", "terms": digest})
            )
        row = writer.requests()[0]
        Worker(writer, run.engine())._execute(row, None)
    return run


@pytest.mark.parametrize(
    ("approvers", "caught"),
    [
        ([], "with 0 of the 2 approvals"),
        (["ann"], "with 1 of the 2 approvals"),
        (["ann", "Ann "], "with 1 of the 2 approvals"),
        (["ann", "rita"], "that approval cannot count"),
        (["ann", "bob"], ""),
    ],
)
def test_a_request_carried_out_without_its_approvals_is_caught(two: Path, approvers: list[str], caught: str) -> None:
    run = executed_without(two, approvers)
    problems = run.verify().problems
    assert any(caught in problem for problem in problems) if caught else problems == []
    assert bool(verify_independently(two)) == bool(caught)


def test_an_approval_after_the_fact_is_caught(two: Path) -> None:
    run = executed_without(two, ["ann", "bob"])
    with RunWriter.open(two) as writer:
        digest = writer.requests()[0].terms.digest("a")
        writer.record(NewEvent("request approved", {"request": "a", "actor": "carl", "reason": "", "terms": digest}))
    assert any("it does not wait" in problem for problem in run.verify().problems)
    assert verify_independently(two) != []


def test_decisions_beside_a_process_that_writes_go_through_the_inbox(two: Path, cli: Command) -> None:
    run = sifu.open_run(two)
    with RunWriter.open(two) as writer:
        run.request(["client-003"], "a", actor="rita")  # posted as a message: the request is not in the ledger yet
        answer = cli("decide", two, "a", "approve", "--actor", "ann", "--format", "json")
        assert answer.json == {"request": "a", "status": "approved", "changed": False, "posted": True}
        assert ingest(writer) == []
        assert run.decide("a", "approved", actor="ann") == "unchanged"
        assert run.decide("a", "approved", actor="bob") == "posted"
        assert run.decide("a", "approved", actor="bob") == "posted"  # the same message again
        assert len(messages(two)) == 1
        for decision, actor, reason in (("approved", "rita", ""), ("refused", "ann", ""), ("eaten", "ann", "x")):
            with pytest.raises(InputError):
                run.decide("a", decision, reason, actor)
        with pytest.raises(InputError, match="no request"):
            run.decide("b", "approved", actor="ann")
        assert ingest(writer) == []
    assert run.request_record("a").approvals == ("ann", "bob")
    assert [outcome.request for outcome in run.forget()] == ["a"]
    assert run.verify().problems == []


HOSTILE_DECISIONS: dict[str, dict[str, Any]] = {
    "no actor": {"request": "a", "decision": "approved", "reason": ""},
    "a number for a name": {"request": "a", "decision": "approved", "reason": "", "actor": 7, "terms": ""},
    "an unknown decision": {"request": "a", "decision": "eaten", "reason": "", "actor": "x", "terms": ""},
    "an unknown request": {"request": "b", "decision": "approved", "reason": "", "actor": "x", "terms": ""},
    "an id that is a path": {"request": "../a", "decision": "approved", "reason": "", "actor": "x", "terms": ""},
}
APPROVAL = HOSTILE_DECISIONS["no actor"] | {"actor": "ann", "terms": ""}
HOSTILE_DECISIONS |= {
    "a name with an escape sequence": APPROVAL | {"actor": "x\x1b[2J"},
    "more than a decision": APPROVAL | {"level": "proven"},
    "an approval of other terms": APPROVAL | {"terms": "0" * 64},
    "an approval of no terms": APPROVAL,
}


@pytest.mark.parametrize("name", HOSTILE_DECISIONS)
def test_a_hostile_decision_is_refused_and_recorded(two: Path, name: str) -> None:
    from sifu.store.inbox import post

    sifu.open_run(two).request(["client-003"], "a", actor="rita")
    post(two, "decision", "d-1", HOSTILE_DECISIONS[name])
    with RunWriter.open(two) as writer:
        (refusal,) = ingest(writer)
    assert refusal.startswith("decision d-1: ")
    assert messages(two) == []
    assert query(two, "SELECT COUNT(*) FROM events WHERE kind = 'request approved'") == [(0,)]
    assert sifu.open_run(two).verify().problems == []


def test_a_running_server_waits_for_approvals_and_then_goes_on(two: Path) -> None:
    """A server leaves a request with one of two approvals waiting; after the second approval the next server executes
    it.
    """
    run = sifu.open_run(two)
    spec = run.spec
    engine = engine_from_spec(spec, clients_from_spec(spec))[0]
    told: list[str] = []

    def people(sentence: str) -> None:
        """Act as the people outside the server, whose decisions arrive as messages."""
        told.append(sentence)
        if "waiting" in sentence and not messages(two):
            run.decide("a", "approved", actor=["ann", "bob"][min(1, len(told) - 1)])

    run.request(["client-003"], "a", actor="rita")
    done = serve(run, engine, linger=0.6, tell=people)
    assert done == []
    assert dump(two)["requests"][0][1] == "received"
    assert run.request_record("a").approvals == ("ann",)
    run.decide("a", "approved", actor="bob")
    assert serve(run, engine, linger=0.0) == ["a"]
    assert run.verify().problems == []


OTHER_TERMS: dict[str, Any] = {
    "clients": ["client-004"], "epsilon": 7.5, "delta": 0.003, "sigma": "0.25",
    "retention": "strict", "method": "scratch", "level": "none",
    "records": [2, 5], "before_after": "3,1e-5",
}  # fmt: skip
"""A value that was not approved, for every term."""


@pytest.fixture
def approved(one: Path) -> Path:
    """Return a run with an approved request that is not executed yet."""
    run = sifu.open_run(one)
    run.request(["client-003"], "a", actor="rita")
    run.decide("a", "approved", actor="ann", terms=run.request_record("a").terms_digest)
    return one


def test_terms_changed_after_the_approval_are_not_carried_out(approved: Path, tmp_path: Path) -> None:
    """If any term is changed in the stored row, no command executes the request, and both verifiers report it."""
    from sifu.core.request_terms import TERMS

    assert set(OTHER_TERMS) == set(TERMS)
    ((text,),) = query(approved, "SELECT terms FROM requests")
    for name, value in OTHER_TERMS.items():
        changed = copy_run(approved, tmp_path / name)
        content = json.loads(text) | {name: value}
        with sqlite3.connect(changed / "run.db") as database:
            database.execute("UPDATE requests SET terms = ?", (canonical_json(content).decode(),))
        database.close()
        with sifu.open_run(changed).reader() as reader:
            assert unapproved(reader) == {"a": 1}, name
        with pytest.raises(SifuError):
            sifu.open_run(changed).forget(request="a")
        assert sifu.open_run(changed).verify().problems != [], name
        assert verify_independently(changed) != [], name


def test_an_approval_of_other_terms_does_not_count(one: Path) -> None:
    """An approval of other terms than those of the request does not count, even if it is signed with the key."""
    run = sifu.open_run(one)
    run.request(["client-003"], "a", actor="rita", epsilon=7.5)
    seen = replace(run.request_record("a").terms, epsilon=5.0).digest("a")
    with pytest.raises(InputError, match="does not have the terms of the decision"):
        run.decide("a", "approved", actor="ann", terms=seen)
    with RunWriter.open(one) as writer:
        writer.record(NewEvent("request approved", {"request": "a", "actor": "ann", "reason": "", "terms": seen}))
    assert run.request_record("a").approvals_missing == 1
    assert run.forget() == []
    assert any("approves other terms" in problem for problem in run.verify().problems)
    assert any("terms approved" in problem for problem in verify_independently(one))


@pytest.mark.parametrize("name", ["method", "sigma", "retention"])
def test_what_an_operator_carries_out_otherwise_than_approved_is_caught(
    one: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator with the key can bypass every check of the worker, but the ledger shows the missing approval."""
    run = sifu.open_run(one)
    given: dict[str, Any] = {"method": "sifu", "sigma": 2.0}
    run.request(["client-003"], "a", actor="rita", **given)
    run.decide("a", "approved", actor="ann")
    other: dict[str, Any] = {
        "method": "scratch",
        "sigma": 4.0,
        "retention": "strict",
    }
    with RunWriter.open(one) as writer:
        row = writer.requests()[0]
        worker = Worker(writer, run.engine())
        changed = replace(row.terms, **{name: other[name]})
        monkeypatch.setattr(
            "sifu.requests.worker.row_of", lambda writer, request: replace(row_now(writer), terms=changed)
        )
        worker._execute(replace(row, terms=changed), None)
    assert run.verify().problems != []
    assert verify_independently(one) != []


def row_now(writer: RunWriter) -> Any:
    return writer.requests()[0]


def test_a_command_cannot_set_another_level_than_the_approved_one(approved: Path) -> None:
    run, before = sifu.open_run(approved), state(approved)
    for level in ("none", "exact"):
        with pytest.raises(NotCertifiableError, match="was approved at level 'conditional'"):
            run.forget(request="a", level=level)
    assert state(approved) == before
    (outcome,) = run.forget(request="a", level="conditional")
    assert outcome.request == "a"
    assert run.verify().problems == []
    assert verify_independently(approved) == []


def test_a_reason_is_one_line(own_trained: Path, cli: Command) -> None:
    assert cli("request", own_trained, "--clients", "client-001", "--id", "case").code == 0
    answer = cli("decide", own_trained, "case", "verify", "--reason", "ok\n  approved by Bob")
    assert answer.code == 2
    assert "reason" in answer.err
    assert cli("decide", own_trained, "case", "verify", "--reason", "ok").code == 0
