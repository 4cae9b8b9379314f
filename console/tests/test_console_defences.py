"""Defences of the console: roles, tokens, sessions, headers, hostile names and forms, limits."""

from __future__ import annotations

import html
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from service_for_tests import PEOPLE, ServiceForTests

import sifu
from forged_runs import execute
from run_tools import small_spec, state

PAGES = ("", "/clients", "/trail", "/requests/1")
OVER_ALL = ("/", "/requests", "/overview", "/people", "/trail")
"""Pages that cover all runs."""


MATRIX: list[tuple[str, str, dict[str, Any], set[str]]] = [
    ("GET", "/api/v1/runs", {}, {"rita", "ann", "eve", "otto"}),
    ("GET", "/api/v1/pending", {}, {"ann", "eve", "otto"}),
    ("GET", "/api/v1/runs/SOUTH", {}, {"ann", "eve", "otto"}),
    ("GET", "/api/v1/runs/SOUTH/requests/1", {}, {"ann", "eve", "otto"}),
    ("GET", "/api/v1/runs/SOUTH/requests/1/certificate", {}, {"ann", "eve", "otto"}),
    ("GET", "/api/v1/runs/SOUTH/requests/1/bundle", {}, {"eve", "otto"}),
    ("POST", "/api/v1/runs/SOUTH/plan", {"clients": ["client-007"]}, {"ann", "eve", "otto"}),
    ("POST", "/api/v1/runs/SOUTH/requests", {"clients": ["client-007"], "request": "new"}, {"rita", "otto"}),
    ("POST", "/api/v1/runs/SOUTH/decisions", {"request": "waits", "decision": "approved"}, {"ann"}),
    ("POST", "/api/v1/runs/SOUTH/decisions", {"request": "waits", "decision": "verified"}, {"ann", "otto"}),
    ("POST", "/api/v1/runs/SOUTH/decisions", {"request": "waits", "decision": "withdrawn"}, {"otto"}),
    ("POST", "/api/v1/runs/SOUTH/carry-out", {"request": "to-the-middle"}, {"otto"}),
    ("GET", "/runs/SOUTH/trail", {}, {"eve", "otto"}),
    ("GET", "/runs/SOUTH/clients", {}, {"ann", "eve", "otto"}),
    ("GET", "/runs/SOUTH/requests/1", {}, {"ann", "eve", "otto"}),
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
    ("GET", "/runs/SOUTH/requests/1/bundle", {}, {"eve", "otto"}),
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
OPEN = {"/login", "/logout"}
"""Routes for everybody, and one that only ends a session."""


def test_the_table_of_roles_names_every_route() -> None:
    from sifu_console import finding, json_api, pages, request_pages

    routes = {
        (method, route.path)
        for part in (pages, request_pages, finding, json_api)
        for route in part.router.routes
        for method in route.methods
    }
    tested = {(method, re.sub(r"/requests/\d", "/requests/N", path)) for method, path, _, _ in MATRIX}
    for method, path in routes:
        plain = path.replace("{run}", "SOUTH").replace("{number:int}", "N")
        assert plain in OPEN or (method, plain) in tested, (method, path)


@pytest.mark.parametrize("name", ["rita", "ann", "eve", "otto"])
def test_everybody_may_do_what_their_role_allows_and_nothing_else(
    service: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sifu_console.jobs import Job, Jobs

    monkeypatch.setattr(Jobs, "start", lambda *arguments: Job("1", "verify", "", name, 0.0))
    south, program = service.key("south"), service.program(name)
    for method, path, body, allowed in MATRIX:
        form = method == "POST" and not path.startswith("/api/")
        sent = {"data": body} if form else {"json": body} if method == "POST" else {}
        answer = program.request(method, path.replace("SOUTH", south), **sent)
        # An allowed request may still fail (400, or 404 for a report that was not written). A refusal is 401 or 403,
        # or 404 where even the existence of a resource is confidential.
        refused = answer.status_code in (401, 403) or (answer.status_code == 404 and not path.endswith("/report"))
        assert refused == (name not in allowed), (name, method, path, answer.status_code, answer.text[:200])


def test_nobody_gets_in_without_a_token_that_works(service: Any, cli: Any) -> None:
    south = service.key("south")
    stranger = service.stranger()
    for path in ("/", *(f"/runs/{south}{page}" for page in PAGES)):
        answer = stranger.get(path)
        assert (answer.status_code, answer.headers["location"]) == (303, "/login")
    for secret in ("", "sifu_forged", service.secrets["otto"][:-1], service.secrets["otto"] + "x"):
        stranger.headers["Authorization"] = f"Bearer {secret}"
        for path in ("/api/v1/runs", f"/api/v1/runs/{south}"):
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
    """The cookie and form of a logged-out person are refused, and so are run names that are paths."""
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
        for way in ("", "/clients", "/report", "/trail", "/requests/1/bundle"):
            for start in ("/runs", "/api/v1/runs"):
                answer = eve.get(f"{start}/{name}{way}")
                assert answer.status_code in (307, 404), (start, name, way, answer.status_code)
                assert "root:" not in answer.text


def test_an_error_of_a_run_is_told_to_those_who_may_see_it(service: Any) -> None:
    """Errors may name folders and clients; requesters and strangers learn nothing of them."""
    north, rita, otto = service.key("north"), service.browser("rita"), service.browser("otto")
    execute(service.folder / "north", "UPDATE run SET value = '[[[' WHERE key IN ('facts', 'spec')")
    body = {"clients": ["client-003"], "request": "x"}
    paths = (f"/api/v1/runs/{north}/requests", f"/runs/{north}")
    seen = [otto.get(path) for path in paths]
    hidden = [rita.get(path) for path in paths]
    hidden += [
        service.program("rita").post(paths[0], json=body),
        rita.send(f"{paths[1]}/requests", clients="client-003"),
    ]
    assert any(str(service.folder) in answer.text for answer in seen)
    for answer in hidden:
        assert str(service.folder) not in answer.text
    assert "tell an operator" in hidden[2].text
    (service.folder / ".sifu-console" / "tokens.json").write_text("{}")
    for path in paths:
        answer = service.stranger().get(path, headers={"Authorization": "Bearer sifu_guessed"})
        assert answer.status_code == 500
        assert str(service.folder) not in answer.text
        assert "tell an operator" in answer.text


def test_a_change_needs_the_token_of_its_page(service: Any) -> None:
    """CSRF: the cookie alone is not enough to change anything, by form or by JSON."""
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


def test_an_address_of_any_length_gets_an_answer(service: Any) -> None:
    south = service.key("south")
    for length in (100, 990, 5000):
        path = f"/api/v1/runs/{south}/requests/"
        answer = service.program("otto").get(path + "9" * (length - len(path)))
        assert answer.status_code == (404 if length < 1000 else 414)
        assert "error" in answer.json()


def test_other_sites_and_other_names_are_refused(service: Any) -> None:
    north, program = service.key("north"), service.program("otto")
    body = {"clients": ["client-001"], "request": "x"}
    for headers in (
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://["},
        {"Origin": "http://localhost@evil.example"},
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
    answer = program.post(f"/api/v1/runs/{north}/plan", json=body, headers={"Origin": "http://LOCALHOST"})
    assert answer.status_code == 400  # from this site, but with a field that the schema forbids
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
    for path in (*OVER_ALL, *(f"/runs/{south}{page}" for page in PAGES)):
        page = eve.get(path).text
        assert "http://" not in page
        assert "https://" not in page
        assert "style=" not in page
        assert "onclick" not in page
        assert page.count("<script") == 1


HOSTILE = "<img src=x onerror=alert(1)>\"'&{{7*7}}"


@pytest.fixture
def hostile_service(tmp_path: Path) -> Any:
    """Return a service with hostile names of clients, folder and people, and hostile reasons and ids."""
    from sifu_console.app import Settings, make_app
    from sifu_console.tokens import TokenFile, state_folder

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
        for path in (*OVER_ALL, *(f"/runs/{key}{page}" for page in PAGES), f"/runs/{key}/requests/2", "/runs/<b>x")
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
    from sifu_console.runs import ServedRun

    def broken(*arguments: object) -> None:
        raise ZeroDivisionError("client-001 is in this text")

    monkeypatch.setattr(ServedRun, "requests", broken)
    answer = service.program("eve").get(f"/api/v1/runs/{service.key('north')}/requests")
    assert answer.status_code == 500
    assert "client-001" not in answer.text + caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_sizes_and_rates_are_limited(service: Any) -> None:
    from sifu_console.security import LARGEST_BODY, Guard

    north, program = service.key("north"), service.program("otto")
    huge = {"clients": ["x" * 100] * (LARGEST_BODY // 100)}
    assert program.post(f"/api/v1/runs/{north}/requests", json=huge).status_code == 413
    parts = (b" " * 10_000 for _ in range(LARGEST_BODY // 10_000 + 2))  # without a content length
    assert program.post(f"/api/v1/runs/{north}/requests", content=parts).status_code == 413
    for _ in range(12):
        last = service.stranger().post("/login", data={"token": "sifu_guess"})
    assert last.status_code == 429
    assert service.browser("rita")  # failed logins from an address do not lock out people with a token
    service.app = Guard(service.app._app, {"localhost"}, per_second=1.0, burst=5)
    assert [service.program("eve").get("/api/v1/runs").status_code for _ in range(8)][-1] == 429


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"", "the body"),
        (b"[]", "the body"),
        (b"{", "1"),
        (b"[" * 100_000, "parsing"),
        (b'{"clients": "client-001", "request": 7}', "clients"),
        (b'{"clients": ["client-001"], "request": 7}', "request"),
        (b'{"clients": ["client-001"], "terms": null}', "terms"),
        (b'{"clients": ["client-001"], "deadline_days": "7"}', "deadline_days"),
        (b'{"clients": ["client-001"], "terms": {"epsilon": "x"}}', "terms.epsilon"),
        (b'{"clients": ["client-001"], "terms": {"colour": 1}}', "terms.colour"),
        (b'{"clients": ["client-001"], "request": "../../x"}', "request id"),
        (b'{"clients": ["client-001"], "deadline_days": -4}', "deadline_days"),
        (b'{"clients": ["nobody"]}', "nobody"),
        (b'{"clients": ["client-001"], "x": 1}', "x"),
        (b'{"clients": []}', "clients"),
        (b'{"clients": [{"a": 1}]}', "clients.0"),
        (b'{"clients": ["\\ud800"]}', "body"),
        (b'{"clients": ["\xff"]}', "parsing"),
        (b'{"clients": [NaN]}', "clients.0"),
        (b'{"clients": ["client-001"], "terms": {"epsilon": NaN}}', "terms.epsilon"),
        (b'{"clients": ["client-001"], "terms": {"epsilon": 1e999}}', "terms.epsilon"),
        (b'{"clients": ["client-001"], "deadline_days": 2.5}', "deadline_days"),
        (b'{"clients": ["client-001"], "deadline_days": true}', "deadline_days"),
        (b'{"clients": ["client-001"], "deadline_days": 1' + b"0" * 400 + b"}", "deadline"),
    ],
)
def test_what_cannot_be_used_names_the_field(service: Any, body: bytes, named: str) -> None:
    path, headers = f"/api/v1/runs/{service.key('north')}/requests", {"content-type": "application/json"}
    answer = service.program("otto").post(path, content=body, headers=headers)
    assert answer.status_code == 400
    assert named in answer.json()["error"]
    assert service.stranger().post(path, content=body, headers=headers).status_code in (400, 401)


def test_odd_forms_are_refused_with_a_sentence(service: Any) -> None:
    browser, north = service.browser("otto"), service.key("north")
    headers = {"content-type": "application/x-www-form-urlencoded"}
    for body in (
        b"clients=%ff%fe",
        b"clients=%ed%a0%80",
        "clients=\u00e9".encode("latin-1"),
        b"&".join([b"a=1"] * 101),
    ):
        for path in (f"/runs/{north}/requests", f"/runs/{north}/decide"):
            answer = browser.client.post(path, content=body, headers=headers, follow_redirects=False)
            assert answer.status_code in (303, 400), answer.text  # redirected to the page with the error message
        assert service.stranger().post("/login", content=body, headers=headers).status_code == 400
        assert "more than 100 fields" in browser.get("/").text


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
    assert sifu.open_run(service.folder / "north").request_record("a").approvals == ("ann", "bob")


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
    assert sifu.open_run(service.folder / "north").request_record("b").approvals == ()


def test_one_person_approves_once_and_never_their_own(service: Any) -> None:
    """Two simultaneous approvals by one person count once, and a requester cannot approve their own request."""
    from concurrent.futures import ThreadPoolExecutor

    from sifu_console.tokens import TokenFile, state_folder

    north = service.key("north")
    secret = TokenFile(state_folder(service.folder)).create("Mia", ["requester", "approver"])[1]
    service.secrets["Mia"] = secret
    mia = service.program("Mia")
    assert mia.post(f"/api/v1/runs/{north}/requests", json={"clients": ["client-003"], "request": "a"}).is_success
    assert not service.approve("Mia", north, 1).is_success
    with ThreadPoolExecutor(4) as people:
        answers = list(people.map(lambda name: service.approve(name, north, 1), ["ann", "ann", "ann", "ann"]))
    assert sum(answer.is_success and answer.json()["outcome"] == "recorded" for answer in answers) == 1
    status = sifu.open_run(service.folder / "north").request_record("a")
    assert (status.approvals, status.approvals_missing) == (("ann",), 1)
    carried = service.program("otto").post(f"/api/v1/runs/{north}/carry-out", json={"request": "a"})
    assert carried.status_code == 400
    assert sifu.open_run(service.folder / "north").verify().problems == []
