"""The console without a browser: what everybody sees and may do, and what is refused."""

from __future__ import annotations

import html
import io
import json
import logging
import re
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from service_for_tests import PEOPLE, ServiceForTests

import sifu
from forged_runs import sign_anew
from guessing import ROUNDS, TRUTH, federation
from run_tools import small_spec, state
from sifu.core.request_terms import TERMS, RequestTerms
from sifu.store.inbox import messages
from sifu.store.projection import NewEvent
from sifu.store.writer import RunWriter

PAGES = ("", "/clients", "/trail", "/requests/1", "/live")
OVER_ALL = ("/", "/requests", "/overview", "/people", "/trail")
"""Pages over all runs."""


def wait_for_jobs(service: Any, key: str, seconds: float = 120.0) -> list[dict[str, Any]]:
    """The jobs of a run when none is at work any more."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        jobs = service.program("otto").get(f"/api/v1/runs/{key}").json()["jobs"]
        if jobs and all(job["state"] != "running" for job in jobs):
            return jobs
        time.sleep(0.2)
    raise AssertionError("a job did not end")


@pytest.mark.long
def test_the_whole_story_from_filing_to_evidence(service: Any) -> None:
    north = service.key("north")
    rita, ann, bob, otto, eve = (service.browser(name) for name in ("rita", "ann", "bob", "otto", "eve"))
    filed = rita.send(f"/runs/{north}/requests", clients="client-003\nclient-004", request="case-1", deadline_days="10")
    assert "Request case-1: received; it will be examined" in filed.text
    ann.get(f"/runs/{north}")  # an approver looks
    page = ann.get(f"/runs/{north}/requests/1").text
    assert "Not approved yet" in page
    for method in ("<h3>sifu", "<h3>scratch", "<strong>closed_form"):
        assert method in page  # every way, side by side
    assert "It needs one more approval" in ann.approve(f"/runs/{north}", 1).text
    execute = {"request": "case-1", "number": "1", "confirm": "yes"}
    assert "needs 1 more" in otto.send(f"/runs/{north}/carry-out", **execute).text
    assert "Approved by ann, bob" in bob.approve(f"/runs/{north}", 1).text
    assert "approved</span>" in otto.get(f"/runs/{north}/requests/1").text
    unconfirmed = otto.send(f"/runs/{north}/carry-out", request="case-1", number="1")
    assert "cannot be undone: tick the box" in unconfirmed.text
    assert "is being executed" in otto.send(f"/runs/{north}/carry-out", **execute).text
    (job,) = wait_for_jobs(service, north)
    assert (job["kind"], job["state"], job["message"]) == ("carry out", "done", "")
    done = eve.get(f"/runs/{north}/requests/1").text
    assert "The certificate in words" in done
    assert "case-1 to forget client-003, client-004" in done
    bundle = eve.get(f"/runs/{north}/requests/1/evidence")
    assert bundle.headers["content-type"] == "application/zip"
    assert "evidence-case-1/verify.py" in zipfile.ZipFile(io.BytesIO(bundle.content)).namelist()
    steps = sifu.open_run(service.folder / "north").request_record("case-1").steps
    assert [(step.status, step.actor) for step in steps] == [
        ("received", "rita"), ("approved", "ann"), ("approved", "bob"),
        ("planned", "otto"), ("running", "otto"), ("done", "otto"),
    ]  # fmt: skip
    assert sifu.verify_run(service.folder / "north").problems == []
    assert "case-1" in rita.get("/").text  # she sees what became of it
    assert "The certificate in words" in rita.get(f"/runs/{north}/requests/1").text


@pytest.mark.long
def test_verification_and_report_at_a_click(service: Any) -> None:
    south, eve = service.key("south"), service.browser("eve")
    assert "has not verified the run yet" in eve.get(f"/runs/{south}").text
    assert "is being verified" in eve.send(f"/runs/{south}/verify").text
    eve.send(f"/runs/{south}/report")
    assert {job["state"] for job in wait_for_jobs(service, south)} == {"done"}
    page = eve.get(f"/runs/{south}").text
    assert "verified</span> on" in page
    report = eve.get(f"/runs/{south}/report")
    assert "Forgetting report" in report.text
    assert "script-src" not in report.headers["content-security-policy"]
    assert report.headers["content-security-policy"].startswith("default-src 'none'")
    metrics = service.program("eve").get("/metrics").text
    assert f'sifu_last_verification_holds{{name="south",run="{south}"}} 1' in metrics


def test_a_run_that_was_signed_anew_is_not_shown_but_named(service: Any) -> None:
    south, eve, program = service.key("south"), service.browser("eve"), service.program("eve")
    assert eve.get(f"/runs/{south}").status_code == 200
    sifu.open_run(service.folder / "south")  # the console's listing makes no key known
    sign_anew(service.folder / "south")
    for answer in (eve.get(f"/runs/{south}"), program.get(f"/api/v1/runs/{south}")):
        assert answer.status_code == 500
        assert "key: run" in answer.text
    home = eve.get("/")
    assert home.status_code == 200
    assert "cannot be read" in home.text
    assert "key: run" in home.text
    assert f"/runs/{service.key('north')}" in home.text  # the others are there
    listed = {row["name"]: row for row in program.get("/api/v1/runs").json()["runs"]}
    assert "key: run" in listed["south"]["error"]
    assert listed["north"]["clients"] > 0
    assert service.browser("rita").get("/").status_code == 200
    assert program.get("/api/v1/pending").status_code == 200
    assert f'sifu_readable{{name="south",run="{south}"}} 0.0' in program.get("/metrics").text


MATRIX: list[tuple[str, str, dict[str, Any], set[str]]] = [
    ("GET", "/api/v1/runs", {}, {"rita", "ann", "eve", "otto"}),
    ("GET", "/api/v1/pending", {}, {"ann", "eve", "otto"}),
    ("GET", "/api/v1/runs/SOUTH", {}, {"ann", "eve", "otto"}),
    ("GET", "/api/v1/runs/SOUTH/requests/1", {}, {"ann", "eve", "otto"}),
    ("GET", "/api/v1/runs/SOUTH/requests/1/certificate", {}, {"ann", "eve", "otto"}),
    ("GET", "/api/v1/runs/SOUTH/requests/1/evidence", {}, {"eve", "otto"}),
    ("POST", "/api/v1/runs/SOUTH/plan", {"clients": ["client-007"]}, {"ann", "eve", "otto"}),
    ("POST", "/api/v1/runs/SOUTH/requests", {"clients": ["client-007"], "request": "new"}, {"rita", "otto"}),
    ("POST", "/api/v1/runs/SOUTH/decisions", {"request": "waits", "decision": "approved"}, {"ann"}),
    ("POST", "/api/v1/runs/SOUTH/decisions", {"request": "waits", "decision": "verified"}, {"ann", "otto"}),
    ("POST", "/api/v1/runs/SOUTH/decisions", {"request": "waits", "decision": "withdrawn"}, {"otto"}),
    ("POST", "/api/v1/runs/SOUTH/carry-out", {"request": "to-the-middle"}, {"otto"}),
    ("GET", "/metrics", {}, {"eve", "otto"}),
    ("GET", "/runs/SOUTH/trail", {}, {"eve", "otto"}),
    ("GET", "/runs/SOUTH/clients", {}, {"ann", "eve", "otto"}),
    ("GET", "/runs/SOUTH/live", {}, {"ann", "eve", "otto"}),
    ("GET", "/runs/SOUTH/requests/1", {}, {"ann", "eve", "otto"}),
    ("GET", "/runs/SOUTH/requests/5/figure.svg", {}, {"ann", "eve", "otto"}),
    ("GET", "/runs/SOUTH/report", {}, {"eve", "otto"}),
    ("GET", "/", {}, {"rita", "ann", "eve", "otto"}),
    ("GET", "/requests", {}, {"rita", "ann", "eve", "otto"}),
    ("POST", "/requests", {"text": "client"}, {"rita", "ann", "eve", "otto"}),
    ("GET", "/requests.csv", {}, {"rita", "ann", "eve", "otto"}),
    ("POST", "/requests.csv", {"text": "client"}, {"rita", "ann", "eve", "otto"}),
    ("GET", "/overview", {}, {"ann", "eve", "otto"}),
    ("GET", "/people", {}, {"eve", "otto"}),
    ("GET", "/trail", {}, {"eve", "otto"}),
    ("GET", "/runs/SOUTH", {}, {"rita", "ann", "eve", "otto"}),
    ("GET", "/runs/SOUTH/requests/1/evidence", {}, {"eve", "otto"}),
    ("POST", "/runs/SOUTH/requests", {"clients": "client-008", "request": "form"}, {"rita", "otto"}),
    ("POST", "/runs/SOUTH/requests", {"clients": "client-008", "plan": "1"}, {"ann", "eve", "otto"}),
    ("POST", "/runs/SOUTH/decide", {"request": "waits", "decision": "approved"}, {"ann"}),
    ("POST", "/runs/SOUTH/decide", {"request": "to-the-middle", "decision": "refused"}, {"ann", "otto"}),
    ("POST", "/runs/SOUTH/carry-out", {"request": "to-the-middle"}, {"otto"}),
    ("POST", "/runs/SOUTH/verify", {}, {"eve", "otto"}),
    ("POST", "/runs/SOUTH/report", {}, {"eve", "otto"}),
    ("POST", "/api/v1/runs/SOUTH/verify", {}, {"eve", "otto"}),
    ("GET", "/api/v1/runs/SOUTH/requests", {}, {"rita", "ann", "eve", "otto"}),
]
OPEN = {"/login", "/logout", "/api/v1/openapi.json", "/runs/SOUTH/stream"}
"""Routes for everybody, one that only ends a session, and the stream, which has the rights of /live."""


def test_the_table_of_roles_names_every_route() -> None:
    from sifu.console import finding, json_api, pages, streaming

    routes = {
        (method, route.path)
        for route in (*pages.ROUTES, *finding.ROUTES, *streaming.ROUTES, *json_api.ROUTES)
        for method in (route.methods or set()) - {"HEAD"}
    }
    tested = {(method, re.sub(r"/requests/\d", "/requests/N", path)) for method, path, _, _ in MATRIX}
    for method, path in routes:
        plain = path.replace("{run}", "SOUTH").replace("{number:int}", "N")
        assert plain in OPEN or (method, plain) in tested, (method, path)


@pytest.mark.parametrize("name", ["rita", "ann", "eve", "otto"])
def test_everybody_may_do_what_their_role_allows_and_nothing_else(
    service: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sifu.console.jobs import Job, Jobs

    monkeypatch.setattr(Jobs, "start", lambda *arguments: Job("1", "verify", "", name, 0.0))
    south, program = service.key("south"), service.program(name)
    for method, path, body, allowed in MATRIX:
        form = method == "POST" and not path.startswith("/api/")
        sent = {"data": body} if form else {"json": body} if method == "POST" else {}
        answer = program.request(method, path.replace("SOUTH", south), **sent)
        # What is allowed may still be senseless (400, a report not yet written); a refusal is 403, or 404 where
        # even the existence of something is not for everybody.
        refused = answer.status_code in (401, 403) or (answer.status_code == 404 and not path.endswith("/report"))
        assert refused == (name not in allowed), (name, method, path, answer.status_code, answer.text[:200])


def test_nobody_gets_in_without_a_token_that_works(service: Any, cli: Any) -> None:
    south = service.key("south")
    stranger = service.stranger()
    for path in ("/", *(f"/runs/{south}{page}" for page in PAGES[:4])):
        answer = stranger.get(path)
        assert (answer.status_code, answer.headers["location"]) == (303, "/login")
    for secret in ("", "sifu_forged", service.secrets["otto"][:-1], service.secrets["otto"] + "x"):
        stranger.headers["Authorization"] = f"Bearer {secret}"
        for path in (
            "/api/v1/runs",
            f"/api/v1/runs/{south}",
            "/metrics",
            f"/runs/{south}/live",
            f"/runs/{south}/stream",
        ):
            assert stranger.get(path).status_code == 401
        assert service.stranger().post("/login", data={"token": secret}).status_code == 401
    stranger.cookies.set("sifu_session", "forged")
    del stranger.headers["Authorization"]
    assert stranger.get("/api/v1/runs").status_code == 401
    browser = service.browser("otto")
    assert cli("token", "revoke", service.folder, "otto").code == 0
    assert "Your token" in browser.get("/").text  # the session ended with its token
    assert service.program("otto").get("/api/v1/runs").status_code == 401


def test_a_session_cannot_be_replayed_after_its_end_and_names_lead_nowhere(service: Any) -> None:
    """Cookie and form of a person who logged out; and run names that are paths."""
    north, otto = service.key("north"), service.browser("otto")
    cookie = otto.client.cookies["sifu_session"]
    csrf = re.search(r'name="csrf" value="([^"]+)"', otto.get("/").text)
    assert csrf
    otto.send("/logout")
    thief = service.stranger()
    thief.cookies.set("sifu_session", cookie)
    form = {"csrf": csrf[1], "clients": "client-001", "request": "x"}
    answer = thief.post(f"/runs/{north}/requests", data=form)
    assert (answer.status_code, answer.headers["location"]) == (303, "/login")
    assert thief.get("/api/v1/runs").status_code == 401
    assert sifu.open_run(service.folder / "north").request_records() == []
    eve = service.program("eve")
    for name in (
        "north",
        "%2e%2e",
        "..%2f..%2fetc%2fpasswd",
        "%2fetc%2fpasswd",
        f"{north}%2f..%2f{north}",
        "a%00b",
    ):
        for way in ("", "/live", "/report", "/trail", "/requests/1/evidence"):
            for start in ("/runs", "/api/v1/runs"):
                answer = eve.get(f"{start}/{name}{way}")
                assert answer.status_code in (307, 404), (start, name, way, answer.status_code)
                assert "root:" not in answer.text


def test_a_change_needs_the_token_of_its_page(service: Any) -> None:
    """CSRF: the cookie alone is not enough, for forms and for JSON."""
    north, otto = service.key("north"), service.browser("otto")
    before = state(service.folder / "north")
    for csrf in ({}, {"csrf": ""}, {"csrf": "forged"}):
        for path in ("requests", "decide", "carry-out", "verify", "report"):
            answer = otto.client.post(f"/runs/{north}/{path}", data={"clients": "client-001", "request": "x"} | csrf)
            assert answer.status_code == 403, path
        assert otto.client.post("/logout", data=csrf).status_code == 403
    body = {"clients": ["client-001"], "request": "x"}
    assert otto.client.post(f"/api/v1/runs/{north}/requests", json=body).status_code == 403
    assert state(service.folder / "north") == before


def test_an_unknown_address_is_answered_with_a_page_that_says_so(service: Any) -> None:
    answer = service.stranger().get("/no-such-page")
    assert (answer.status_code, '<html lang="en">' in answer.text) == (404, True)
    assert "There is no page at this address." in answer.text
    assert service.stranger().get("/api/v1/no-such-thing").json() == {"error": "there is nothing at this address"}


def test_other_sites_and_other_names_are_refused(service: Any) -> None:
    north, program = service.key("north"), service.program("otto")
    body = {"clients": ["client-001"], "request": "x"}
    for headers in (
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ):
        answer = program.post(f"/api/v1/runs/{north}/requests", json=body, headers=headers)
        assert answer.status_code == 403, headers
        assert (
            service.stranger().post("/login", data={"token": service.secrets["otto"]}, headers=headers).status_code
            == 403
        )
    for host in ("evil.example", "localhost.evil.example", ""):  # DNS rebinding
        assert program.get("/api/v1/runs", headers={"Host": host}).status_code == 400
    assert program.get("/api/v1/runs").headers.get("access-control-allow-origin") is None
    assert sifu.open_run(service.folder / "north").request_records() == []


def test_every_answer_has_the_headers_that_protect_it(service: Any) -> None:
    south, eve = service.key("south"), service.browser("eve")
    for path in ("/", "/login", f"/runs/{south}", "/static/console.js", "/api/v1/openapi.json", "/nowhere"):
        headers = eve.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-frame-options"] == "DENY"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "same-origin"
        if not path.startswith("/static"):
            assert headers["cache-control"] == "no-store"
    cookie = service.stranger().post("/login", data={"token": service.secrets["eve"]}).headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie


def test_no_page_needs_anything_from_elsewhere_or_inline(service: Any) -> None:
    south, eve = service.key("south"), service.browser("eve")
    for path in (*OVER_ALL, *(f"/runs/{south}{page}" for page in PAGES[:4])):
        page = eve.get(path).text
        assert "http://" not in page
        assert "https://" not in page
        assert "style=" not in page
        assert "onclick" not in page
        assert page.count("<script") == 1


HOSTILE = "<img src=x onerror=alert(1)>\"'&{{7*7}}"


@pytest.fixture
def hostile_service(tmp_path: Path) -> Any:
    """A run whose clients have hostile names; so have its folder, its people, reasons and ids where they can."""
    from sifu.console.app import Settings, make_app
    from sifu.console.tokens import TokenFile, state_folder

    folder = tmp_path / "desk"
    run = folder / "<b>run & {{7*7}}"
    rows = [([[0.1 * k, 0.2], [0.3, 0.1 * k]], [0, 1]) for k in range(6)]
    clients = {f"{HOSTILE}{k}" if k < 3 else f"other-{k}": data for k, data in enumerate(rows)}
    spec = small_spec(model={"kind": "logistic"}, stop={"max_rounds": 3}) | {"data": {}}
    trained = sifu.train(spec, run=run, clients=clients)
    trained.request([f"{HOSTILE}0"], "a", actor="<i>desk</i>")
    trained.decide("a", "verified", reason="<script>alert(2)</script>", actor="<u>ann</u>")
    trained.forget([f"{HOSTILE}1"], "b", sigma=0.5)
    tokens = TokenFile(state_folder(folder))
    names = {name: f"<em>{name}</em>" for name in PEOPLE}
    secrets = {name: tokens.create(names[name], roles)[1] for name, roles in PEOPLE.items()}
    return ServiceForTests(folder, secrets, make_app(Settings([folder], state_folder(folder))))


def test_hostile_names_are_text_everywhere(hostile_service: Any) -> None:
    (run,) = hostile_service.program("eve").get("/api/v1/runs").json()["runs"]
    key, otto = run["run"], hostile_service.browser("otto")
    pages = [
        otto.get(path).text
        for path in (*OVER_ALL, *(f"/runs/{key}{page}" for page in PAGES[:4]), f"/runs/{key}/requests/2", "/runs/<b>x")
    ]
    pages.append(otto.send("/requests", text="<b>x").text)
    pages.append(otto.send(f"/runs/{key}/requests", clients=f"{HOSTILE}2", plan="1").text)
    pages.append(otto.send(f"/runs/{key}/requests", clients="<b>nobody</b>", request="x").text)
    pages.append(otto.send(f"/runs/{key}/requests", clients="other-4", request="<b>id</b>").text)
    pages.append(otto.send(f"/runs/{key}/decide", request="<b>x</b>", decision="<b>y</b>").text)
    pages.append(
        otto.send(
            f"/runs/{key}/decide", request="a", decision="refused", reason="<b>no</b>", number="1", confirm="yes"
        ).text
    )
    for text in pages:
        assert "<img src=x" not in text
        assert "<script>alert" not in text
        for tag in ("<b>", "<i>", "<u>", "<em>"):
            assert tag not in text
        assert "49" not in html.unescape(text).split("run &")[-1][:12]
    assert html.escape(HOSTILE).replace("&#x27;", "&#39;").replace("&quot;", "&#34;") in "".join(pages)
    live = hostile_service.program("eve").get(f"/runs/{key}/live").text
    assert "<img" not in live  # nothing of clients in what is pushed
    metrics = hostile_service.program("eve").get("/metrics").text
    assert 'name="<b>run & {{7*7}}"' in metrics
    assert "img" not in metrics


def test_logs_and_addresses_hold_nothing_confidential(service: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="sifu")
    north, otto = service.key("north"), service.browser("otto")
    otto.send(f"/runs/{north}/requests", clients="client-001", request="telling-id", plan="1")
    answer = otto.send(f"/runs/{north}/requests", clients="client-001", request="telling-id")
    assert "telling-id was filed" in answer.text
    otto.send(f"/runs/{north}/requests", clients="client-nobody", request="x")
    for text in [str(answer.url), *[str(step.headers.get("location")) for step in answer.history], caplog.text]:
        assert "client-" not in text
        assert "telling" not in text
        assert service.secrets["otto"] not in text
    addresses = re.findall(r'(?:href|action|src)="([^"]*)"', otto.get(f"/runs/{north}").text)
    assert f"/runs/{north}/requests/1" in addresses
    assert not any("telling" in address or "client-" in address for address in addresses)


def test_what_breaks_is_logged_by_its_kind_alone(
    service: Any, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    from sifu.console.served_run import ServedRun

    def broken(*arguments: object) -> None:
        raise ZeroDivisionError("client-001 is in this text")

    monkeypatch.setattr(ServedRun, "requests", broken)
    answer = service.program("eve").get(f"/api/v1/runs/{service.key('north')}/requests")
    assert answer.status_code == 500
    assert "client-001" not in answer.text + caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_sizes_and_rates_are_limited(service: Any) -> None:
    from sifu.console.app import Settings, make_app
    from sifu.console.security import LARGEST_BODY
    from sifu.console.tokens import state_folder

    north, program = service.key("north"), service.program("otto")
    huge = {"clients": ["x" * 100] * (LARGEST_BODY // 100)}
    assert program.post(f"/api/v1/runs/{north}/requests", json=huge).status_code == 413
    parts = (b" " * 10_000 for _ in range(LARGEST_BODY // 10_000 + 2))  # without a length in front
    assert program.post(f"/api/v1/runs/{north}/requests", content=parts).status_code == 413
    for _ in range(12):
        last = service.stranger().post("/login", data={"token": "sifu_guess"})
    assert last.status_code == 429
    assert service.browser("rita")  # wrong logins from an address lock out no one who has a token
    service.app = make_app(Settings([service.folder], state_folder(service.folder), per_second=1.0, burst=5))
    assert [service.program("eve").get("/api/v1/runs").status_code for _ in range(8)][-1] == 429


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "clients"),
        (b"[]", "object"),
        (b"{", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b'{"clients": "client-001", "request": 7}', "list"),
        (b'{"clients": ["client-001"], "request": 7}', "text"),
        (b'{"clients": ["client-001"], "clients": ["client-002"]}', "once"),
        (b'{"clients": ["client-001"], "terms": null}', "object"),
        (b'{"clients": ["client-001"], "deadline_days": "7"}', "whole number"),
        (b'{"clients": ["client-001"], "terms": {"epsilon": "x"}}', "number"),
        (b'{"clients": ["client-001"], "terms": {"colour": 1}}', "no field 'colour'"),
        (b'{"clients": ["client-001"], "request": "../../x"}', "cannot be used"),
        (b'{"clients": ["client-001"], "deadline_days": -4}', "deadline"),
        (b'{"clients": ["nobody"]}', "nobody"),
        (b'{"clients": ["client-001"], "x": 1}', "field"),
        (b'{"clients": []}', "entries"),
        (b'{"clients": [{"a": 1}]}', "text"),
    ],
)
def test_what_cannot_be_used_is_a_sentence(service: Any, body: bytes, words: str) -> None:
    answer = service.program("otto").post(f"/api/v1/runs/{service.key('north')}/requests", content=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]


def test_filing_is_idempotent_by_id(service: Any) -> None:
    north, program = service.key("north"), service.program("otto")
    body = {"clients": ["client-001"], "request": "ticket-7", "deadline_days": 5, "terms": {"epsilon": 5}}
    first = program.post(f"/api/v1/runs/{north}/requests", json=body)
    again = program.post(f"/api/v1/runs/{north}/requests", json=body)
    assert first.status_code == again.status_code == 201
    assert first.json() == again.json() == {"request": "ticket-7", "number": 1, "status": "received"}
    other = program.post(f"/api/v1/runs/{north}/requests", json=body | {"clients": ["client-002"]})
    assert other.status_code == 400
    assert "other terms" in other.json()["error"]
    listed = program.get(f"/api/v1/runs/{north}/requests").json()["requests"]
    assert [(row["number"], row["request"], row["epsilon"]) for row in listed] == [(1, "ticket-7", 5.0)]


def test_a_requester_sees_and_withdraws_only_their_own(service: Any) -> None:
    north, rita, otto = service.key("north"), service.program("rita"), service.program("otto")
    otto.post(f"/api/v1/runs/{north}/requests", json={"clients": ["client-001"], "request": "of-otto"})
    rita.post(f"/api/v1/runs/{north}/requests", json={"clients": ["client-002"], "request": "of-rita"})
    listed = rita.get(f"/api/v1/runs/{north}/requests")
    assert [row["request"] for row in listed.json()["posted"]] == ["of-rita"]
    assert "of-otto" not in listed.text
    assert rita.get(f"/api/v1/runs/{north}/requests/1").status_code == 404
    decision = {"request": "of-otto", "decision": "withdrawn"}
    assert rita.post(f"/api/v1/runs/{north}/decisions", json=decision).status_code == 404
    mine = rita.post(f"/api/v1/runs/{north}/decisions", json=decision | {"request": "of-rita"})
    assert mine.json()["outcome"] == "recorded"
    taken = rita.post(f"/api/v1/runs/{north}/requests", json={"clients": ["client-001"], "request": "of-otto"})
    unknown = rita.post(f"/api/v1/runs/{north}/requests", json={"clients": ["nobody"], "request": "unused"})
    assert taken.json() | {"request": "unused"} == unknown.json()


def test_beside_a_process_that_writes_everything_goes_through_the_inbox(service: Any) -> None:
    north, ann, otto = service.key("north"), service.program("ann"), service.program("otto")
    with RunWriter.open(service.folder / "north"):
        filed = otto.post(f"/api/v1/runs/{north}/requests", json={"clients": ["client-001"], "request": "a"})
        assert filed.json() == {"request": "a", "number": None, "status": "posted"}
        body = {"request": "a", "decision": "approved"}
        assert ann.post(f"/api/v1/runs/{north}/decisions", json=body).status_code == 400  # which terms?
        content = messages(service.folder / "north")[0].content
        terms = RequestTerms.from_mapping({name: content[name] for name in TERMS if name in content})
        body["terms"] = terms.digest("a")
        assert ann.post(f"/api/v1/runs/{north}/decisions", json=body).json()["outcome"] == "posted"
        listed = otto.get(f"/api/v1/runs/{north}/requests").json()
        assert [row["request"] for row in listed["posted"]] == ["a"]
        assert "in the inbox" in service.browser("otto").get(f"/runs/{north}").text
        assert otto.get(f"/api/v1/runs/{north}").json()["at_work"] is True
        assert len(messages(service.folder / "north")) == 2
    assert sifu.open_run(service.folder / "north").decide("a", "approved", actor="bob") == "recorded"
    assert sifu.open_run(service.folder / "north").request_record("a").status.approvals == ("ann", "bob")


def test_overdue_requests_come_first(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import datetime

    from sifu.requests import approvals as deadlines

    original = deadlines._days_left
    monkeypatch.setattr(
        deadlines, "_days_left", lambda deadline, now: original(deadline, now + datetime.timedelta(days=4))
    )
    north, otto = service.key("north"), service.program("otto")
    for name, client, days in (("later", "client-001", 9), ("soon", "client-002", 1)):
        body = {"clients": [client], "request": name, "deadline_days": days}
        assert otto.post(f"/api/v1/runs/{north}/requests", json=body).status_code == 201
    pending = otto.get("/api/v1/pending").json()["requests"]
    assert [(row["request"], row["overdue"]) for row in pending][:2] == [("soon", True), ("later", False)]
    home = service.browser("eve").get("/").text
    assert home.index("overdue") < home.index("later")
    page = service.browser("eve").get(f"/runs/{north}").text
    assert page.index(">soon<") < page.index(">later<")


def test_the_openapi_document_says_what_the_routes_do(service: Any) -> None:
    from sifu.console import json_api

    document = service.stranger().get("/api/v1/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    described = {
        (method.upper(), path, operation["operationId"])
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }
    served = set()
    for route in json_api.ROUTES:
        path = route.path.removeprefix(json_api.API).replace(":int", "")
        for method in (route.methods or set()) - {"HEAD"}:
            served.add((method, path, route.endpoint.__name__))
    assert described == served - {("GET", "/openapi.json", "openapi"), ("GET", "/metrics", "metrics")}
    assert json.dumps(document)


def test_metrics_are_what_prometheus_reads(service: Any) -> None:
    south = service.key("south")
    lines = service.program("eve").get("/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    label = f'name="south",run="{south}"'
    assert values[f'sifu_requests{{{label},state="done"}}'] == "4.0"
    assert values[f'sifu_requests{{{label},state="received"}}'] == "1.0"
    assert float(values[f"sifu_rounds_total{{{label}}}"]) > 8
    assert float(values[f"sifu_seconds_to_deadline{{{label}}}"]) > 86400
    assert all(line.startswith(("# HELP ", "# TYPE ")) for line in lines if line.startswith("#"))


def test_webhooks_tell_each_thing_once_also_after_a_restart(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib
    import hmac

    from sifu.console.service import ConsoleService
    from sifu.console.tokens import state_folder
    from sifu.console.webhooks import Webhooks, check_address
    from sifu.errors import InputError

    monkeypatch.setenv("SIFU_WEBHOOK_SECRET", "shared")
    told: list[dict[str, Any]] = []
    down = True

    def send(address: str, body: bytes, headers: dict[str, str]) -> None:
        if down:
            raise ConnectionRefusedError
        signature = hmac.new(b"shared", body, hashlib.sha256).hexdigest()
        assert headers["X-Sifu-Signature"] == f"sha256={signature}"
        assert b"client-" not in body
        told.append(json.loads(body))

    north = sifu.open_run(service.folder / "north")
    at_service = ConsoleService([service.folder], state_folder(service.folder))
    webhooks = Webhooks(at_service, ["https://tickets.example/hook"], send)
    assert webhooks.tell() == 0  # what was there before is old news
    north.request(["client-001"], "a", deadline_days=2)
    assert webhooks.tell() == 0  # nothing takes it
    down = False
    assert webhooks.tell() == 2
    assert {(row["event"], row["request"]) for row in told} == {("received", "a"), ("due soon", "a")}
    again = Webhooks(at_service, ["https://tickets.example/hook"], send)
    assert again.tell() == 0
    for person in ("ann", "bob"):
        north.decide("a", "approved", actor=person)
    north.forget(request="a")
    assert again.tell() == 1
    assert told[-1]["event"] == "done"
    with pytest.raises(InputError):
        check_address("file:///etc/passwd")


@pytest.mark.long
def test_a_failed_job_says_why(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is in use: the command that was to carry the request out is refused."""
    south = service.key("south")
    with RunWriter.open(service.folder / "south"):
        started = service.program("otto").post(f"/api/v1/runs/{south}/carry-out", json={"request": "waits"})
        assert started.status_code == 202
        again = service.program("otto").post(f"/api/v1/runs/{south}/carry-out", json={"request": "waits"})
        assert again.status_code == 409
        (job,) = wait_for_jobs(service, south)
    assert job["state"] == "failed"
    assert "in use" in job["message"]
    assert "in use" in service.browser("otto").get(f"/runs/{south}/requests/5").text
    assert list((service.folder / ".sifu-console" / "jobs").iterdir()) == []


def test_a_stream_tells_what_changes_and_ends_with_its_token(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    from sifu.console import streaming
    from sifu.console.asking import Console
    from sifu.console.security import RateLimit
    from sifu.console.service import ConsoleService
    from sifu.console.tokens import Sessions, TokenFile, state_folder

    monkeypatch.setattr(streaming, "EVERY", 0.02)
    monkeypatch.setattr(streaming, "STILL_HERE", 0.3)
    key, tokens = service.key("north"), TokenFile(state_folder(service.folder))
    console = Console(
        ConsoleService([service.folder], state_folder(service.folder)), tokens, Sessions(tokens), False, RateLimit(1, 1)
    )
    who = tokens.owner(service.secrets["eve"])
    assert who is not None

    async def next_message(stream: Any) -> bytes:
        while (line := await anext(stream)).startswith(b":"):
            pass  # nothing new yet
        return bytes(line)

    async def watch() -> list[bytes]:
        broadcast = streaming.Broadcast()
        run = console.service.find(who, key)
        first = streaming.as_message(streaming.live_values(run, who))
        streams = [broadcast.watch(console, who, run, first) for _ in range(20)]
        got = [await anext(stream) for stream in streams]
        assert list(broadcast._readers) == [key]  # one for all of them
        assert set(got) == {first}
        sifu.open_run(service.folder / "north").request(["client-001"], "a")
        changed = [await next_message(stream) for stream in streams]
        tokens.revoke("eve")
        assert [line async for line in streams[0] if not line.startswith(b":")] in ([], changed[:1])  # it ends
        for stream in streams:
            await stream.aclose()
        assert not broadcast._readers
        return changed

    (message, *others) = asyncio.run(watch())
    assert json.loads(message.removeprefix(b"data: "))["waiting"] == 1
    assert all(other == message for other in others)


def test_what_the_console_cannot_carry_out_it_says_how_to(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs on Flower's nodes and runs made from Python: the page and the API say what to do instead."""
    from dataclasses import replace

    from sifu.api import Run

    south, spec = service.key("south"), sifu.open_run(service.folder / "south").spec
    for name, words in (("flower", "start it with flwr run"), ("python", "sifu.open_run(folder")):
        other = replace(spec, data=replace(spec.data, name=name))
        monkeypatch.setattr(Run, "spec", property(lambda run, other=other: other))
        page = service.browser("otto").get(f"/runs/{south}/requests/5").text
        assert words in page
        assert "Execute now" not in page
        answer = service.program("otto").post(f"/api/v1/runs/{south}/carry-out", json={"request": "waits"})
        assert answer.status_code == 400
        assert words in answer.json()["error"]


def test_many_who_look_at_a_run_at_work_share_one_look(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run at work writes all the time; a second look within a second gets what the first one read."""
    from sifu.console import live

    looks = 0
    original = live.LiveView._read

    def counted(view: Any, *arguments: Any) -> Any:
        nonlocal looks
        looks += 1
        return original(view, *arguments)

    monkeypatch.setattr(live.LiveView, "_read", counted)
    north, eve = service.key("north"), service.program("eve")
    monkeypatch.setattr(live, "FRESH_FOR", 1000.0)
    with RunWriter.open(service.folder / "north") as writer:
        assert eve.get(f"/runs/{north}").status_code == 200
        looks = 0
        for number in range(3):
            writer.record(NewEvent("run note", {"note": number}))
            assert eve.get(f"/runs/{north}").status_code == 200
            assert eve.get(f"/runs/{north}/live").status_code == 200
        assert looks == 0
        filed = service.program("otto").post(
            f"/api/v1/runs/{north}/requests", json={"clients": ["client-001"], "request": "a"}
        )
        assert filed.status_code == 201
        assert eve.get(f"/api/v1/runs/{north}").json()["waiting"] == 1  # what we did ourselves is seen at once


def test_viewers_of_a_run_at_work_share_a_plan_and_lists_do_not_wait_for_it(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While rounds are written, a slow plan is worked out once for all who ask for it; other pages are served."""
    from sifu.console import live

    monkeypatch.setattr(live, "FRESH_FOR", 0.0)
    south, begun, may_end, plans = service.key("south"), threading.Event(), threading.Event(), 0
    original = sifu.Run.plan_of

    def slow(run: Any, request: str) -> Any:
        nonlocal plans
        plans += 1
        begun.set()
        assert may_end.wait(60)
        return original(run, request)

    monkeypatch.setattr(sifu.Run, "plan_of", slow)
    page = f"/runs/{south}/requests/5"
    with RunWriter.open(service.folder / "south") as writer, ThreadPoolExecutor(8) as viewers:
        looking = []
        for number in range(4):  # each comes after another event
            writer.record(NewEvent("run note", {"note": number}))
            looking.append(viewers.submit(lambda: service.program("eve").get(page).status_code))
            assert begun.wait(60)
        others = ["/", "/requests", f"/runs/{south}", f"/runs/{south}/live", f"/api/v1/runs/{south}/requests"]
        served = [viewers.submit(lambda path=path: service.program("otto").get(path).status_code) for path in others]
        try:
            assert [answer.result(30) for answer in served] == [200] * len(others)
            assert plans == 1
        finally:
            may_end.set()
        assert [answer.result(60) for answer in looking] == [200] * 4
        assert plans == 1
        decision = {"request": "waits", "decision": "verified"}
        assert service.program("ann").post(f"/api/v1/runs/{south}/decisions", json=decision).status_code == 200
        assert service.program("eve").get(page).status_code == 200
        assert plans == 2  # something other than a round happened


def test_no_more_than_some_results_are_remembered(service: Any) -> None:
    from sifu.console.served_run import MOST_REMEMBERED

    run = service.app._app.state.console.service.every_run()[service.key("north")]
    for number in range(3 * MOST_REMEMBERED):
        assert run.remembered(("plan", number), lambda number=number: number, run.lock) == number
    assert len(run._memory) <= MOST_REMEMBERED


def test_a_page_of_a_request_that_was_just_begun_is_no_error(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited when the page was made, and nothing can be planned when the page asks for the rest."""
    from sifu.api import Run
    from sifu.errors import InputError

    def begun(*arguments: Any, **terms: Any) -> None:
        raise InputError("already forgotten")

    south, otto = service.key("south"), service.browser("otto")
    monkeypatch.setattr(Run, "plan_of", begun)
    page = otto.get(f"/runs/{south}/requests/5")
    assert page.status_code == 200
    assert "side by side" not in page.text
    figure = otto.get(f"/runs/{south}/requests/5/figure.svg")
    assert (figure.status_code, figure.headers["content-type"]) == (200, "image/svg+xml")


def test_pages_of_requests_whose_figures_were_erased(service: Any) -> None:
    """The page says where its certificate is, and a plan that no noise bounds anyone on this history."""
    run = sifu.train(ROUNDS, run=service.folder / "erased", clients=federation(TRUTH))
    run.forget(["c2"], "gone", method="sifu", retention="strict")
    run.purge(figures=True)
    run.request(["c1"], "next", method="sifu")
    browser, key = service.browser("otto"), service.key("erased")
    assert "was erased on" in browser.get(f"/runs/{key}/requests/1").text
    assert "never by noise" in browser.get(f"/runs/{key}/requests/2").text
    answer = service.program("eve").get(f"/api/v1/runs/{key}/requests/1/certificate")
    assert answer.status_code == 400
    assert "was erased on" in answer.text
