"""Terms of requests in the console: every interface accepts every term, approvers see all of them, requesters set only
some.
"""

from __future__ import annotations

import html
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

import sifu
from run_tools import Command, environment, query
from sifu.choices import terms_on_offer
from sifu.console.asking import client_names, terms_given
from sifu.core.request_terms import TERMS, RequestTerms, terms_words
from sifu.store.inbox import messages
from sifu_verifier import verify as verify_independently

UNUSUAL: dict[str, Any] = {
    "epsilon": 7.5, "delta": 0.003, "sigma": 0.9,
    "retention": "strict", "method": "sifu", "level": "none", "max_rounds": 3,
    "target": 0.0,
}  # fmt: skip
"""A value other than the default for every term except records."""
CLIENTS = ["client-003", "client-004"]


def file_through(service: Any, interface: str, cli: Command) -> None:
    """File the same unusual request through one of the interfaces."""
    folder, north = service.folder / "north", service.key("north")
    if interface == "command line":
        options = [word for name, value in UNUSUAL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        options = ["--level" if word == "--level" else word for word in options]
        assert cli("request", folder, "--clients", ",".join(CLIENTS), "--id", "a", *options).code == 0
    elif interface == "python":
        sifu.open_run(folder).request(CLIENTS, "a", actor="otto", **UNUSUAL)
    elif interface == "api":
        body = {"clients": CLIENTS, "request": "a", "terms": UNUSUAL}
        assert service.program("otto").post(f"/api/v1/runs/{north}/requests", json=body).status_code == 201
    else:
        fields = {name: str(value) for name, value in UNUSUAL.items()}
        sent = service.browser("otto").send(
            f"/runs/{north}/requests", clients="client-003; client-004", request="a", confirm="yes", **fields
        )
        assert "was filed" in sent.text


def in_words(name: str, value: Any) -> str:
    """Return the value of a term as the console shows it: its meaning, then the stored word in parentheses."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    phrase = terms_on_offer()[name].about.words.get(text)
    return f"{phrase} ({text})" if phrase else text


@pytest.mark.parametrize("interface", ["command line", "python", "api", "form"])
def test_what_is_filed_through_any_interface_is_approved_planned_and_certified(
    service: Any, interface: str, cli: Command
) -> None:
    """The ledger, the API, the plan, the page and both certificates agree on the terms from every interface."""
    file_through(service, interface, cli)
    folder, north = service.folder / "north", service.key("north")
    terms = RequestTerms.from_mapping(UNUSUAL | {"clients": CLIENTS})
    status = sifu.open_run(folder).request_record("a").status
    assert status.terms == terms  # the ledger
    shown = service.program("ann").get(f"/api/v1/runs/{north}/requests/1").json()
    assert {name: shown["terms"][name] for name in TERMS} == {
        name: list(value) if isinstance(value := getattr(terms, name), tuple) else value for name in TERMS
    } | {"records": None}  # the number of records, if there are any
    assert sifu.open_run(folder).plan_of("a").terms == terms
    page = service.browser("ann").get(f"/runs/{north}/requests/1").text
    rows = dict(re.findall(r'<td data-label="Term">(\w+)</td><td data-label="Asked for"><span>(.*?)</span></td>', page))
    for name, value in UNUSUAL.items():
        words = html.unescape(re.sub(r"<[^>]+>", " ", rows[name])).strip()
        assert words.startswith(f"{in_words(name, value)} "), name
        assert "changed" in rows[name], name
    for client in CLIENTS:
        assert f"<li>{client}</li>" in page
    assert terms.digest("a") in page
    assert "σ</dt><dd>0.9<" in page  # the plan has the requested noise

    for name in ("ann", "bob"):
        assert service.approve(name, north, 1).status_code == 200
    run = sifu.open_run(folder)
    run.forget(request="a")
    filed = {name: value for name, value in terms.to_mapping().items() if name not in ("clients", "records")}
    line = f"Terms asked for: {terms_words(filed)}."
    for form in ("public", "auditor"):
        body = run.certificate("a", form).body  # type: ignore[arg-type]
        assert body["terms"] == filed
        assert (body["clients"], body["method"], body["sigma"]) == (CLIENTS, terms.method, terms.sigma)
    for name, value in UNUSUAL.items():
        shown = in_words(name, value).partition(" (")[0]
        assert (shown if isinstance(value, str) and shown != value else f"{name} {shown}") in line, name
    page = service.browser("ann").get(f"/runs/{north}/requests/1").text
    assert line in page
    assert line in " ".join(cli("certificate", "show", folder, "a", "--all").out.split())
    assert run.verify().problems == []
    assert verify_independently(folder) == []


def test_records_are_the_same_through_every_interface(service: Any, cli: Command) -> None:
    """Records are the same in the ledger, the page, the plan and both certificates."""
    folder, north = service.folder / "north", service.key("north")
    otto, given = service.program("otto"), {"records": [2, 5], "epsilon": 3.0}
    assert (
        cli("request", folder, "--clients", "client-001", "--id", "line", "--records", "2,5", "--epsilon", "3").code
        == 0
    )
    sifu.open_run(folder).request(["client-002"], "python", actor="otto", **given)
    body = {"clients": ["client-003"], "request": "api", "terms": given}
    assert otto.post(f"/api/v1/runs/{north}/requests", json=body).status_code == 201
    form = {"clients": "client-004", "request": "form", "records": "2, 5", "epsilon": "3"}
    assert "was filed" in service.browser("otto").send(f"/runs/{north}/requests", **form).text
    run = sifu.open_run(folder)
    for number, record in enumerate(run.request_records(), start=1):
        name = record.status.request
        assert (record.status.terms.records, record.status.terms.epsilon) == ((2, 5), 3.0), name
        assert run.plan_of(name).terms.records == (2, 5)
        page = service.browser("ann").get(f"/runs/{north}/requests/{number}").text
        assert "2 records" in page
        assert record.status.terms.digest(name) in page
    for name in ("ann", "bob"):
        assert service.approve(name, north, 4).status_code == 200
    run.forget(request="form")
    for kind in ("public", "auditor"):
        certificate = run.certificate("form", kind).body  # type: ignore[arg-type]
        assert (certificate["records"], certificate["terms"]["epsilon"]) == (2, 3.0)
    assert run.verify().problems == []


def test_every_client_is_on_the_page(service: Any) -> None:
    run = sifu.open_run(service.folder / "north")
    names = [client.name for client in run.status().clients][:-1]
    run.request(names, "a", actor="otto")
    page = service.browser("ann").get(f"/runs/{service.key('north')}/requests/1").text
    assert [name for name in names if f"<li>{name}</li>" not in page] == []


def test_an_approval_covers_the_terms_that_were_shown(service: Any) -> None:
    north, ann, otto = service.key("north"), service.program("ann"), service.program("otto")
    otto.post(f"/api/v1/runs/{north}/requests", json={"clients": ["client-003"], "request": "a"})
    for terms in ({}, {"terms": ""}, {"terms": "0" * 64}):
        body = {"request": "a", "decision": "approved"} | terms
        assert ann.post(f"/api/v1/runs/{north}/decisions", json=body).status_code == 400
    page = service.browser("ann").send(f"/runs/{north}/decide", request="a", decision="approved", number="1")
    assert "must name the approved terms" in page.text
    assert service.approve("ann", north, 1).json()["outcome"] == "recorded"
    assert service.browser("bob").approve(f"/runs/{north}", 1).status_code == 200
    assert sifu.open_run(service.folder / "north").request_record("a").status.approvals == ("ann", "bob")


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ({"method": "scratch"}, "an operator sets method"),
        ({"max_rounds": 1}, "an operator sets max_rounds"),
        ({"epsilon": 1000}, "protects less"),
        ({"delta": 0.5}, "protects less"),
        ({"level": "none"}, "guarantees nothing"),
    ],
)
def test_a_requester_asks_for_more_protection_and_nothing_else(service: Any, terms: dict[str, Any], words: str) -> None:
    north = service.key("north")
    body = {"clients": ["client-003"], "request": "a", "terms": terms}
    refused = service.program("rita").post(f"/api/v1/runs/{north}/requests", json=body)
    assert refused.status_code == 403
    assert words in refused.json()["error"]
    form = {name: str(value) for name, value in terms.items()}
    sent = service.browser("rita").send(f"/runs/{north}/requests", clients="client-003", confirm="yes", **form)
    assert sent.status_code == 403
    assert service.program("otto").post(f"/api/v1/runs/{north}/requests", json=body).status_code == 201


def test_a_requester_may_ask_for_records_and_more_protection(service: Any) -> None:
    terms = {"records": [2, 5], "epsilon": 1.0, "level": "exact"}
    body = {"clients": ["client-003"], "request": "a", "terms": terms}
    assert service.program("rita").post(f"/api/v1/runs/{service.key('north')}/requests", json=body).status_code == 201
    assert "2 records of" in service.browser("rita").get("/requests").text  # while it waits in the inbox
    service.program("ann").get(f"/api/v1/runs/{service.key('north')}/requests")
    assert "2 records of" in service.browser("ann").get("/overview").text
    page = service.browser("rita").get(f"/runs/{service.key('north')}/requests/1").text
    assert "2 records" in page
    form = service.browser("rita").get(f"/runs/{service.key('north')}").text
    assert 'name="records"' in form
    assert 'name="epsilon"' in form
    assert 'name="method"' not in form


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


def test_an_error_keeps_the_form_and_stands_by_its_field(service: Any) -> None:
    north, otto = service.key("north"), service.browser("otto")
    sent = otto.send(
        f"/runs/{north}/requests", clients="client-003", request="mine", epsilon="seven", deadline_days="9"
    )
    assert sent.status_code == 400
    assert 'id="problem-epsilon">epsilon is a number' in sent.text
    assert 'value="seven" aria-invalid="true" aria-describedby="problem-epsilon"' in sent.text
    for kept in (">client-003</textarea>", 'value="mine"', 'value="9"'):
        assert kept in sent.text
    unknown = otto.send(f"/runs/{north}/requests", clients="client-999")
    assert 'id="problem-clients">unknown client' in unknown.text
    assert sifu.open_run(service.folder / "north").request_records() == []


def test_clients_are_pasted_in_any_separation() -> None:
    clients = ["a", "b", "c", "Smith, Ann", "Mayo Clinic"]
    for text in ("a\nb\nc", "a, b,c", "a;b; c", "a\tb c", "a b\r\nc,", "a|b|c|a"):
        assert client_names(text, clients) == ["a", "b", "c"], text
    assert client_names("Smith, Ann\nMayo Clinic, a", clients) == ["Smith, Ann", "Mayo Clinic", "a"]
    assert client_names("no such", clients) == ["no such"]


def test_a_client_of_the_list_leads_to_the_form(service: Any) -> None:
    north, otto = service.key("north"), service.browser("otto")
    link = re.search(
        r'>(client-\d+)</td><td data-label="Request"><a href="([^"]+)">Forget</a>',
        otto.get(f"/runs/{north}/clients").text,
    )
    assert link
    assert link[1] not in link[2]  # the address contains no name
    assert f">{link[1]}</textarea>" in otto.get(link[2]).text


def test_one_word_for_each_state(service: Any) -> None:
    north, rita, otto = service.key("north"), service.browser("rita"), service.browser("otto")
    assert "You have no requests." in rita.get(f"/runs/{north}").text
    rita.send(f"/runs/{north}/requests", clients="client-003", request="a")

    def states() -> set[str]:
        api = service.program("otto").get(f"/api/v1/runs/{north}/requests").json()["requests"][0]["state"]
        pending = service.program("otto").get("/api/v1/pending").json()["requests"]
        pages = [rita.get("/").text, rita.get(f"/runs/{north}").text, otto.get(f"/runs/{north}/requests/1").text]
        for page in [*pages, otto.get("/").text]:
            assert f">{api}</span>" in page
        assert [row["state"] for row in pending if row["request"] == "a"] == [api]
        return {api}

    assert states() == {"waiting for approval"}
    for name in ("ann", "bob"):
        service.approve(name, north, 1)
    assert states() == {"approved"}
    refused = otto.send(f"/runs/{north}/decide", request="a", decision="refused", reason="x", number="1")
    assert "a refusal cannot be undone: tick the box" in refused.text
    otto.send(f"/runs/{north}/decide", request="a", decision="refused", reason="x", number="1", confirm="yes")
    assert "refused</span>" in rita.get("/").text


def test_what_runs_cannot_be_started_again(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sifu.console.jobs import Job, Jobs

    south, otto = service.key("south"), service.browser("otto")
    waiting = next(
        row for row in service.program("otto").get(f"/api/v1/runs/{south}/requests").json()["requests"]
        if row["state"] == "received"
    )  # fmt: skip
    page = f"/runs/{south}/requests/{waiting['number']}"
    assert "Execute now" in otto.get(page).text
    jobs = [Job("1", "carry out", south, "otto", 0.0, waiting["request"])]
    monkeypatch.setattr(Jobs, "of_run", lambda self, run: jobs)
    running = otto.get(page).text
    assert "running</span>" in running
    assert "Execute now" not in running
    body = {"request": waiting["request"]}
    assert service.program("otto").post(f"/api/v1/runs/{south}/carry-out", json=body).status_code == 409


def test_methods_without_a_guarantee_are_not_offered(service: Any) -> None:
    north, otto = service.key("north"), service.browser("otto")
    form = otto.get(f"/runs/{north}").text
    compared = otto.send(f"/runs/{north}/requests", clients="client-003", plan="1").text
    for page in (form, compared):
        assert ">scratch</option>" in page
        assert "go_on" not in page


@pytest.mark.parametrize(
    "body",
    [b"clients=%ff%fe", b"clients=%ed%a0%80", "clients=\u00e9".encode("latin-1"), b"&".join([b"a=1"] * 101)],
)
def test_odd_forms_are_refused_with_a_sentence(service: Any, body: bytes) -> None:
    browser = service.browser("otto")
    headers = {"content-type": "application/x-www-form-urlencoded"}
    for path in (f"/runs/{service.key('north')}/requests", f"/runs/{service.key('north')}/decide"):
        answer = browser.client.post(path, content=body, headers=headers, follow_redirects=False)
        assert answer.status_code in (303, 400), answer.text  # redirected to the page with the error message
    assert service.stranger().post("/login", content=body, headers=headers).status_code == 400
    assert "more than 100 fields" in browser.get("/").text


@pytest.mark.parametrize("body", [b'{"clients": ["\\ud800"]}', b'{"clients": ["\xff"]}', b'{"clients": [NaN]}'])
def test_odd_json_is_refused_with_a_sentence(service: Any, body: bytes) -> None:
    program, north = service.program("otto"), service.key("north")
    for path in ("requests", "decisions", "plan", "carry-out"):
        answer = program.post(f"/api/v1/runs/{north}/{path}", content=body)
        assert answer.status_code == 400
        assert "not JSON" in answer.json()["error"]
    assert program.get("/runs/x?page=\u00b2").status_code in (200, 404)


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ({"max_rounds": 2.7}, "max_rounds is a whole number"),
        ({"max_rounds": True}, "max_rounds is a whole number"),
        ({"epsilon": True}, "epsilon is a number"),
        ({"epsilon": "1e999"}, "epsilon"),
        ({"sigma": "nan"}, "sigma"),
        ({"records": []}, "records must have 1"),
        ({"records": [1.5]}, "entry 0 of records is a whole number or"),
        ({"records": [True]}, "entry 0 of records is a whole number or"),
        ({"records": "1, 2"}, "records is a list"),
        ({"epsilon": ""}, "epsilon is a number"),
        ({"records": ["9" * 5000]}, "named by identities"),
        ({"records": ["9" * 400]}, "named by identities"),
        ({"records": [10**18]}, "records is a list"),
        ({"method": ["scratch"]}, "method"),
    ],
)
def test_a_term_is_taken_as_it_was_given_or_refused(service: Any, terms: dict[str, Any], words: str) -> None:
    """A term is stored as given or refused: 2.7 rounds are not rounded, and an empty list of records is not the whole
    client.
    """
    body = {"clients": ["client-003"], "request": "a", "terms": terms}
    refused = service.program("otto").post(f"/api/v1/runs/{service.key('north')}/requests", json=body)
    assert refused.status_code == 400, refused.text
    assert words in refused.json()["error"]
    assert sifu.open_run(service.folder / "north").request_records() == []


def test_deadlines_are_whole_days(service: Any) -> None:
    for days in (2.5, True, "soon", 10**400):
        body = {"clients": ["client-003"], "deadline_days": days}
        answer = service.program("otto").post(f"/api/v1/runs/{service.key('north')}/requests", json=body)
        assert answer.status_code == 400, days
        assert "deadline" in answer.json()["error"]


def test_records_are_pasted_in_any_separation() -> None:
    for text, records in {
        "1 2, 3": [1, 2, 3],
        "P-1; P-2|P-3": ["P-1", "P-2", "P-3"],
        "Ann Lee, Bob 7": ["Ann Lee", "Bob 7"],
        "0012\n7": ["0012", 7],
        f"{2**53 - 1} {10**18}": [str(2**53 - 1), str(10**18)],
    }.items():
        assert terms_given({"records": text}) == {"records": records}


def test_two_requesters_at_once_do_not_take_more_than_half_out(service: Any) -> None:
    """Each request alone is allowed, but together they would leave less than half of the clients in training."""
    from concurrent.futures import ThreadPoolExecutor

    north = service.key("north")
    names = [client.name for client in sifu.open_run(service.folder / "north").status().clients]
    third = len(names) // 3
    bodies = [{"clients": names[start : start + third]} for start in (0, third, 2 * third)]
    with ThreadPoolExecutor(3) as people:
        program = service.program("rita")
        answers = list(people.map(lambda body: program.post(f"/api/v1/runs/{north}/requests", json=body), bodies))
    assert [answer.status_code for answer in answers] == [201, 201, 201]
    assert len(service.program("otto").get(f"/api/v1/runs/{north}/requests").json()["requests"]) == 1
    assert len(refusals(service.folder / "north")) == 2


def test_an_approval_of_one_request_is_of_no_use_for_another(service: Any) -> None:
    """An approval does not transfer to another request, nor to one that was withdrawn and filed again."""
    north, ann, otto = service.key("north"), service.program("ann"), service.program("otto")
    for name, client in (("a", "client-003"), ("b", "client-004")):
        otto.post(f"/api/v1/runs/{north}/requests", json={"clients": [client], "request": name})
    digests = {
        row["request"]: row["terms_digest"] for row in ann.get(f"/api/v1/runs/{north}/requests").json()["requests"]
    }
    assert digests["a"] != digests["b"]
    body = {"request": "b", "decision": "approved", "terms": digests["a"]}
    assert ann.post(f"/api/v1/runs/{north}/decisions", json=body).status_code == 400
    withdrawn = otto.post(f"/api/v1/runs/{north}/decisions", json={"request": "a", "decision": "withdrawn"})
    assert withdrawn.json()["outcome"] == "recorded"
    again = {"clients": ["client-003"], "request": "a", "terms": {"method": "scratch"}}
    assert otto.post(f"/api/v1/runs/{north}/requests", json=again).status_code == 400  # an id can be used only once
    body = {"request": "a", "decision": "approved", "terms": digests["a"]}
    assert ann.post(f"/api/v1/runs/{north}/decisions", json=body).status_code == 400
    assert sifu.open_run(service.folder / "north").request_record("b").status.approvals == ()


def test_one_person_approves_once_and_never_their_own(service: Any) -> None:
    """Two simultaneous approvals by one person count once, and a requester cannot approve their own request."""
    from concurrent.futures import ThreadPoolExecutor

    from sifu.console.tokens import TokenFile, state_folder

    north = service.key("north")
    secret = TokenFile(state_folder(service.folder)).create("Mia", ["requester", "approver"])[1]
    service.secrets["Mia"] = secret
    mia = service.program("Mia")
    assert mia.post(f"/api/v1/runs/{north}/requests", json={"clients": ["client-003"], "request": "a"}).is_success
    assert not service.approve("Mia", north, 1).is_success
    with ThreadPoolExecutor(4) as people:
        answers = list(people.map(lambda name: service.approve(name, north, 1), ["ann", "ann", "ann", "ann"]))
    assert sum(answer.is_success and answer.json()["outcome"] == "recorded" for answer in answers) == 1
    status = sifu.open_run(service.folder / "north").request_record("a").status
    assert (status.approvals, status.approvals_missing) == (("ann",), 1)
    carried = service.program("otto").post(f"/api/v1/runs/{north}/carry-out", json={"request": "a"})
    assert carried.status_code == 400
    assert sifu.open_run(service.folder / "north").verify().problems == []


@pytest.mark.long
def test_a_stopped_execution_goes_on_under_the_approved_terms(service: Any) -> None:
    """After a kill at several moments, the same command finishes the request, with one certificate."""
    import signal
    import subprocess
    import sys
    import time

    folder = service.folder / "north"
    run = sifu.open_run(folder)
    run.request(["client-003"], "a", actor="otto", method="scratch", max_rounds=6, target=0.0)
    for name in ("ann", "bob"):
        run.decide("a", "approved", actor=name)
    command = [sys.executable, "-m", "sifu.cli.main", "forget", str(folder), "--request", "a", "--format", "json"]
    for seconds in (0.6, 1.0, 1.4):
        process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL)
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
    # 2: the request was already done
    assert subprocess.run(command, env=environment(), capture_output=True).returncode in (0, 2)
    status = sifu.open_run(folder).request_record("a").status
    assert (status.status, status.terms.method, status.terms.max_rounds) == ("done", "scratch", 6)
    assert sifu.open_run(folder).verify().problems == []
