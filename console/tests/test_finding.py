"""Searches in the console: the list of all requests, the overview, the people, and the audit trail of all runs."""

from __future__ import annotations

import csv
import io
import re
from typing import Any

import pytest

from forged_runs import execute


@pytest.fixture
def busy_service(service: Any) -> Any:
    """Return a service with three waiting requests in one run, one of them overdue, and four finished ones in the
    other.
    """
    north, rita, otto = service.key("north"), service.program("rita"), service.program("otto")
    for person, request, client, days in (
        (rita, "later", "client-001", 20),
        (rita, "soon", "client-002", 2),
        (otto, "formula", "client-003", 9),
    ):
        body = {"clients": [client], "request": request, "deadline_days": days}
        assert person.post(f"/api/v1/runs/{north}/requests", json=body).status_code == 201
    return service


def listed(page: str) -> list[str]:
    """Return the requests of a page's tables, in order."""
    return re.findall(r'<td data-label="Request"><a href="[^"]+">([^<]+)</a>', page)


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_every_request_is_listed_deadlines_first_and_settled_ones_last(busy_service: Any) -> None:
    page = busy_service.browser("eve").get("/requests").text
    names = listed(page)
    assert [name for name in names if name in ("soon", "formula", "later")] == ["soon", "formula", "later"]
    pending = busy_service.program("eve").get("/api/v1/pending").json()["requests"]
    assert [row["request"] for row in pending if row["name"] == "north"] == ["soon", "formula", "later"]
    states = re.findall(r'<td data-label="State"><span>\s*<span class="badge \w+">([^<]+)<', page)
    first_done = states.index("done")
    assert set(states[first_done:]) == {"done"}
    assert len(names) == 8


def test_a_list_is_narrowed_by_text_state_run_and_level(busy_service: Any) -> None:
    eve, north, south = busy_service.browser("eve"), busy_service.key("north"), busy_service.key("south")
    assert listed(eve.send("/requests", text="CLIENT-002").text)[:1] == ["soon"]
    assert listed(eve.send("/requests", text="rita").text) == ["soon", "later"]
    assert listed(eve.get(f"/requests?run={north}").text) == ["soon", "formula", "later"]
    assert listed(eve.get("/requests?state=waiting+for+approval").text) == ["soon", "formula", "later"]
    done = listed(eve.get(f"/requests?state=done&run={south}").text)
    assert len(done) == 4
    levels = ("exact", "proven", "conditional", "none")
    assert sorted(name for level in levels for name in listed(eve.get(f"/requests?level={level}").text)) == sorted(done)
    assert listed(eve.send("/requests", text="no such thing").text) == []
    assert eve.get("/requests?state=overdue").status_code == 200
    assert len(listed(eve.get("/requests?text=rita").text)) == 8  # control: search terms in the URL are ignored


def test_the_csv_is_what_is_shown_and_holds_no_formula(busy_service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    eve, north = busy_service.browser("eve"), busy_service.key("north")
    rows = rows_of(eve.send("/requests.csv", text="client-00", run=north).text)
    assert [row["request"] for row in rows] == ["soon", "formula", "later"]
    # a request gets a number when somebody examines it
    assert rows[0] | {"deadline": "", "received": "", "number": ""} == {
        "run": north, "name": "north", "number": "", "request": "soon", "state": "waiting for approval", "level": "",
        "deadline": "", "overdue": "False", "received": "", "finished": "", "clients": "client-002", "records": "",
        "method": "auto", "filed_by": "rita", "approvals": "", "approvals_missing": "2",
    }  # fmt: skip
    from sifu_console.finding import _cell

    assert [_cell(text) for text in ("=1+1", "@x", "-2", "a=b")] == ["'=1+1", "'@x", "'-2", "a=b"]
    assert len(rows_of(eve.get("/requests.csv").text)) == 8


def test_a_run_that_cannot_be_read_is_named_where_its_requests_are_missing(busy_service: Any, cli: Any) -> None:
    eve, north = busy_service.browser("eve"), busy_service.key("north")
    paths, api = ("/", "/requests", "/overview"), "/api/v1/pending"
    for damaged in (False, True):
        if damaged:
            execute(busy_service.folder / "north", "UPDATE requests SET received = '2020-13-01'")
        pages = [eve.get(path).text for path in paths]
        assert ["missing here: north<" in page for page in pages] == [damaged] * 3
        unread = busy_service.program("eve").get(api).json()["unread"]
        assert unread == [{"run": north, "name": "north"}] * damaged
        rows = rows_of(eve.get("/requests.csv").text)
        assert [row["state"] for row in rows if row["name"] == "north"].count("cannot be read") == damaged
        for folder in (busy_service.folder / "north", busy_service.folder):
            assert cli("requests", folder, "--pending").code == 5 * damaged


def test_a_requester_finds_their_own_requests_and_no_others(busy_service: Any) -> None:
    rita = busy_service.browser("rita")
    for page in (rita.get("/").text, rita.get("/requests").text, rita.send("/requests", text="client").text):
        assert listed(page) == ["soon", "later"]
    assert [row["request"] for row in rows_of(rita.get("/requests.csv").text)] == ["soon", "later"]
    page = rita.get("/").text
    assert 'href="/requests"' in page
    assert 'href="/people"' not in page
    assert 'href="/overview"' not in page


def test_the_overview_counts_what_is_open_late_and_done(busy_service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import datetime

    from sifu.requests import deadlines

    page = busy_service.browser("ann").get("/overview").text
    facts = dict(re.findall(r"<dt>([^<]+)</dt><dd[^>]*>(\d+)", page))
    assert facts == {
        "Open": "4", "Overdue": "0", "Done in 30 days": "4", "Refused or withdrawn in 30 days": "0", "Done in all": "4",
    }  # fmt: skip
    levels = re.findall(r'class="number">(\d+)</td><td data-label="It says">', page)
    assert len(levels) == 4
    assert sum(map(int, levels)) == 4
    original = deadlines.days_until
    monkeypatch.setattr(
        deadlines, "days_until", lambda deadline, now: original(deadline, now + datetime.timedelta(days=4))
    )
    for run in busy_service.app._app.state.console.runs.every_run().values():
        run.written()
    page = busy_service.browser("ann").get("/overview").text
    assert re.search(r'<dt>Overdue</dt><dd class="bad">1<', page)


def test_people_are_listed_with_what_they_did_and_no_secret(busy_service: Any, cli: Any) -> None:
    north = busy_service.key("north")
    busy_service.approve("ann", north, 1)
    assert cli("token", "revoke", busy_service.folder, "bob").code == 0
    page = busy_service.browser("eve").get("/people").text
    cells = re.findall(r'<td data-label="Name"><span>(\w+) .*?</tr>', page)
    assert cells == ["rita", "ann", "bob", "eve", "otto"]
    filed = dict(re.findall(r'data-label="Name"><span>(\w+) .*?data-label="Filed" class="number">(\d+)<', page))
    assert (filed["rita"], filed["ann"]) == ("2", "0")
    approved = dict(re.findall(r'data-label="Name"><span>(\w+) .*?data-label="Approved" class="number">(\d+)<', page))
    assert approved["ann"] == "1"
    assert '<span class="badge neutral">revoked</span>' in page
    assert "anyone who holds that key" in page  # the limit of an approval's evidence
    assert "anyone who holds that key" in busy_service.browser("ann").get(f"/runs/{north}/requests/1").text
    for secret in busy_service.secrets.values():
        assert secret not in page


def test_the_trail_of_all_runs_is_that_of_each(busy_service: Any) -> None:
    eve, north = busy_service.browser("eve"), busy_service.key("north")
    everything = eve.get("/trail").text
    assert f'href="/runs/{north}"' in everything
    requests = eve.get("/trail?kind=request").text
    kinds = set(re.findall(r'<td data-label="What"><span>([^<]+)<', requests))
    assert kinds
    assert all(kind.startswith("request") for kind in kinds)
    counts = [
        int(re.search(r"(\d+) events", eve.get(path).text)[1])  # type: ignore[index]
        for path in ("/trail", f"/runs/{north}/trail", f"/runs/{busy_service.key('south')}/trail")
    ]
    assert counts[0] == counts[1] + counts[2]
    times = re.findall(r'<td data-label="Time">([^<]+)<', everything)
    assert times == sorted(times, reverse=True)
