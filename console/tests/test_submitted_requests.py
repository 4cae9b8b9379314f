"""Requests that people submit without seeing the run: one answer to all, examined later, and never lost."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

import sifu
from run_tools import query, run_cli
from sifu.requests.messages import ingest
from sifu.store.inbox import messages
from sifu.store.writer import RunWriter
from sifu_console.tokens import TokenFile, state_folder
from sifu_verifier import verify as verify_independently


def refusals(folder: Path) -> list[str]:
    """Return the reasons for which submitted requests were refused."""
    rows = query(folder, "SELECT payload FROM events WHERE kind = 'letter refused' ORDER BY seq")
    return [json.loads(payload)["reason"] for (payload,) in rows]


def test_a_requester_cannot_take_most_clients_out_of_training(service: Any) -> None:
    north, rita, otto = service.key("north"), service.program("rita"), service.program("otto")
    folder = service.folder / "north"
    names = [client.name for client in sifu.open_run(folder).status().clients]
    half = len(names) // 2
    assert rita.post(f"/api/v1/runs/{north}/requests", json={"clients": names[: half + 1]}).status_code == 201
    for name in names[:half]:  # nor by several requests in turn
        otto.get(f"/api/v1/runs/{north}/requests")
        assert rita.post(f"/api/v1/runs/{north}/requests", json={"clients": [name]}).status_code == 201
    otto.get(f"/api/v1/runs/{north}/requests")
    one_more = {"clients": [names[half]], "request": "a"}
    assert rita.post(f"/api/v1/runs/{north}/requests", json=one_more).status_code == 201
    assert len(otto.get(f"/api/v1/runs/{north}/requests").json()["requests"]) == half
    assert [("more than half" in reason, "examined by otto" in reason) for reason in refusals(folder)] == [
        (True, True)
    ] * 2
    assert otto.post(f"/api/v1/runs/{north}/requests", json=one_more).status_code == 201


def test_an_answer_tells_requesters_nothing_of_clients_records_and_ids(service: Any) -> None:
    """Requests for existing and missing clients, records and ids get the same answer and the same list entry."""
    north, rita, otto = service.key("north"), service.program("rita"), service.program("otto")
    folder, draw, answers, listed = service.folder / "north", random.Random(3), set(), set()
    otto.post(f"/api/v1/runs/{north}/requests", json={"clients": ["client-001"], "request": "of-otto"})
    for number in range(12):
        client = draw.choice(("client-001", "client-003", "client-011", "nobody", "client-012", "client-3"))
        records = draw.choice(([999], [1], ["P-7"], [0, 10], ["0" * 9], None))
        if number < 3:
            client, records = (("client-003", [999]), ("client-003", [1]), ("nobody", None))[number]
        request = "of-otto" if number == 5 else f"r{number}"
        body = {"clients": [client], "request": request, "terms": {"records": records} if records else {}}
        answer = rita.post(f"/api/v1/runs/{north}/requests", json=body)
        told = answer.json()
        assert told.pop("request") == request
        assert set(told.pop("nonces", {})) == set(map(str, records or ()))
        answers.add((answer.status_code, json.dumps(told)))
        mine = rita.get(f"/api/v1/runs/{north}/requests").json()
        (row,) = [row for row in mine["posted"] if row["request"] == request]
        listed.add((row["status"], len(mine["requests"])))
    assert answers == {(201, json.dumps({"status": "received; it will be examined"}))}
    assert listed == {("posted", 0)}
    service.program("eve").get(f"/api/v1/runs/{north}/requests")  # an auditor's view does not examine them
    assert len(messages(folder)) == 12
    filed = otto.get(f"/api/v1/runs/{north}/requests").json()["requests"]  # an operator's view examines them
    reasons = refusals(folder)
    assert len(filed) - 1 + len(reasons) == 12
    assert any("unknown client" in reason for reason in reasons)
    assert any("one of its records cannot be forgotten" in reason for reason in reasons)
    for (payload,) in query(folder, "SELECT payload FROM events WHERE kind = 'letter refused'"):
        assert not any(identity in payload for identity in ("999", "P-7", "0" * 9)), "identities cannot be erased"
    assert messages(folder) == []
    assert sifu.open_run(folder).verify().problems == verify_independently(folder) == []
    told = otto.post(f"/api/v1/runs/{north}/requests", json={"clients": ["nobody"], "request": "mine"})
    assert "unknown client" in told.json()["error"]  # control: operators are told
    wrong = rita.post(f"/api/v1/runs/{north}/requests", json={"clients": ["x"], "terms": {"epsilon": -1.0}})
    assert "epsilon" in wrong.text  # errors in the terms themselves are reported


def test_a_submitted_request_keeps_its_id_its_nonces_and_its_withdrawal(service: Any) -> None:
    north, rita, ann = service.key("north"), service.program("rita"), service.program("ann")
    folder, path = service.folder / "north", f"/api/v1/runs/{service.key('north')}/requests"
    body = {"clients": ["client-003"], "request": "a", "terms": {"records": [2]}}
    first, again = rita.post(path, json=body).json(), rita.post(path, json=body).json()
    assert (set(first["nonces"]), again["nonces"]) == ({"2"}, first["nonces"])
    rita.post(path, json={"clients": ["client-004"], "request": "b"})
    with sifu.open_run(folder).writer():  # a writer ingests other messages, not these
        pass
    assert {message.request for message in messages(folder)} == {"a", "b"}
    decided = {"request": "b", "decision": "withdrawn", "reason": "mistyped"}
    assert rita.post(f"/api/v1/runs/{north}/decisions", json=decided).status_code == 200
    (row,) = ann.get(path).json()["requests"]
    assert (row["request"], row["filed_by"]) == ("a", "rita")
    assert sifu.open_run(folder).committed("a", first["nonces"]) == first["nonces"]
    assert refusals(folder) == ["withdrawn by rita: mistyped"]
    held = b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())
    assert first["nonces"]["2"].encode() not in held


def test_only_the_filer_or_an_operator_withdraws_a_request(service: Any) -> None:
    key, rita, otto = service.key("north"), service.program("rita"), service.program("otto")
    path, decided = f"/api/v1/runs/{key}/requests", {"decision": "withdrawn", "reason": "mine"}
    service.secrets["both"] = TokenFile(state_folder(service.folder)).create("both", ["requester", "approver"])[1]
    for person, request, client in ((otto, "theirs", "client-001"), (rita, "hers", "client-002"),
                                    (rita, "theirs", "client-003")):  # fmt: skip
        assert person.post(path, json={"clients": [client], "request": request}).status_code == 201
    assert states(otto, key) == {"hers": "requests", "theirs": "refused"}
    answers = [
        service.program(name).post(f"/api/v1/runs/{key}/decisions", json=decided | {"request": request}).status_code
        for name, request in (("rita", "theirs"), ("both", "theirs"), ("both", "hers"), ("rita", "hers"))
    ]
    assert answers == [404, 404, 404, 200]
    ended = {record.request: record.status for record in sifu.open_run(service.folder / "north").request_records()}
    assert ended == {"theirs": "waiting for approval", "hers": "withdrawn"}


@pytest.mark.parametrize("person", ["rita", "otto"])
def test_a_lost_answer_is_repeated_while_the_request_is_open(service: Any, person: str) -> None:
    """The same person with the same id and terms gets the same nonces again, until the request is settled."""
    program, path = service.program(person), f"/api/v1/runs/{service.key('north')}/requests"
    body = {"clients": ["client-003"], "request": "a", "terms": {"records": [2, 4]}}
    first = program.post(path, json=body).json()["nonces"]
    assert set(first) == {"2", "4"}
    assert program.post(path, json=body).json()["nonces"] == first
    other = program.post(path, json=body | {"terms": {"records": [2]}}).json()
    assert other.get("nonces", {}) == {}  # other terms make another request
    service.program("ann").get(path)  # the request is now examined and in the ledger
    assert program.post(path, json=body).json()["nonces"] == first
    run = sifu.open_run(service.folder / "north")
    assert run.committed("a", first) == first
    stranger = service.program("otto" if person == "rita" else "rita").post(path, json=body).json()
    assert set(stranger.get("nonces", {}).values()).isdisjoint(first.values())
    run.decide("a", "refused", "no", actor="bob")
    service.program("ann").get("/api/v1/pending")
    assert program.post(path, json=body).json().get("nonces", {}) == {}


def submit(service: Any, request: str, client: str, records: list[int] | None = None) -> None:
    terms = {"records": records} if records else {}
    body = {"clients": [client], "request": request, "terms": terms}
    answer = service.program("rita").post(f"/api/v1/runs/{service.key('north')}/requests", json=body)
    assert answer.status_code == 201


def test_the_command_line_examines_what_the_console_received(service: Any) -> None:
    folder = service.folder / "north"
    submit(service, "mine", "client-003", [2, 4])
    submit(service, "unknown", "nobody")
    listed = run_cli("requests", folder)
    assert "mine was submitted through the console and is not examined yet" in " ".join(listed.out.split())
    assert len(messages(folder)) == 2  # listing messages does not examine them
    shown = run_cli("requests", folder, "mine")
    assert shown.code == 0, shown.err
    assert "2 records of client-003" in shown.out
    assert "received" in shown.out
    assert "by rita" in shown.out
    assert messages(folder) == []
    gone = run_cli("requests", folder, "unknown")
    assert gone.code == 2


def test_a_decision_examines_first_and_names_the_reason_of_a_refusal(service: Any) -> None:
    folder = service.folder / "north"
    submit(service, "mine", "client-003")
    submit(service, "unknown", "nobody")
    refused = run_cli("decide", folder, "unknown", "approve", "--actor", "ann")
    assert refused.code == 2
    assert "request unknown was submitted through the console and is refused: unknown client" in refused.err
    for person in ("ann", "bob"):
        assert run_cli("decide", folder, "mine", "approve", "--actor", person).code == 0
    submit(service, "other", "client-004", [1])
    shown = run_cli("requests", folder, "other")
    assert "also left out by pending requests: client-003 (request mine)" in " ".join(shown.out.split())


def states(person: Any, key: str) -> dict[str, str]:
    listed = person.get(f"/api/v1/runs/{key}/requests").json()
    return {row["request"]: name for name in ("requests", "posted", "refused") for row in listed[name]}


@pytest.mark.parametrize("examined", [False, True])
def test_other_terms_under_an_id_are_refused(service: Any, examined: bool) -> None:
    key, rita, otto = service.key("north"), service.program("rita"), service.program("otto")
    path, body = f"/api/v1/runs/{key}/requests", {"clients": ["client-001"], "request": "mine"}
    assert rita.post(path, json=body).status_code == 201
    if examined:
        assert states(otto, key) == {"mine": "requests"}
    assert rita.post(path, json=body).status_code == 201
    for other in ({"clients": ["client-002"]}, {"terms": {"epsilon": 0.5}}, {"deadline_days": 3}):
        assert rita.post(path, json=body | other).status_code == 409
    assert states(rita, key) == {"mine": "requests" if examined else "posted"}
    assert states(otto, key) == {"mine": "requests"}


def test_a_refused_request_stays_in_its_filers_list(service: Any) -> None:
    key, rita, otto = service.key("north"), service.program("rita"), service.program("otto")
    path = f"/api/v1/runs/{key}/requests"
    assert rita.post(path, json={"clients": ["nobody"], "request": "mine"}).status_code == 201
    assert states(otto, key) == states(rita, key) == {"mine": "refused"}
    assert "mine" in service.browser("rita").get("/requests").text
    assert rita.post(path, json={"clients": ["client-001"], "request": "mine"}).status_code == 409
    assert states(rita, key) == {"mine": "refused"}


def test_a_request_refused_by_the_writing_process_stays_visible(service: Any) -> None:
    key, otto = service.key("north"), service.program("otto")
    path, body = f"/api/v1/runs/{key}/requests", {"clients": ["client-001"]}
    with RunWriter.open(service.folder / "north") as writer:
        for name in ("first", "second"):
            assert otto.post(path, json=body | {"request": name}).json()["status"] == "posted"
        ingest(writer)
    assert states(otto, key) == {"first": "requests", "second": "refused"}
