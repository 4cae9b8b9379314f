"""The console without a browser: filing, deciding, executing, and what each role sees meanwhile."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from service_for_tests import wait_for_jobs

import sifu
from forged_runs import execute, sign_again
from sifu.core.request_terms import TERMS, Terms
from sifu.store.inbox import messages
from sifu.store.projection import NewEvent
from sifu.store.writer import RunWriter
from sifu_console.app import Settings, make_app
from sifu_console.jobs import Jobs
from sifu_console.tokens import state_folder


@pytest.mark.long
def test_the_whole_story_from_filing_to_the_bundle(service: Any) -> None:
    north = service.key("north")
    rita, ann, bob, otto, eve = (service.browser(name) for name in ("rita", "ann", "bob", "otto", "eve"))
    filed = rita.send(f"/runs/{north}/requests", clients="client-003\nclient-004", request="case-1", deadline_days="10")
    assert "Request case-1: received; it will be examined" in filed.text
    ann.get(f"/runs/{north}")  # an approver opens the run's page
    page = ann.get(f"/runs/{north}/requests/1").text
    assert "Not approved yet" in page
    for method in ("<h3>sifu", "<h3>scratch", "<strong>closed_form"):
        assert method in page  # every method, side by side
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
    bundle = eve.get(f"/runs/{north}/requests/1/bundle")
    assert bundle.json()["certificate"]["body"]["request"] == "case-1"
    steps = sifu.open_run(service.folder / "north").request_record("case-1").steps
    assert [(step.status, step.actor) for step in steps] == [
        ("received", "rita"), ("approved", "ann"), ("approved", "bob"),
        ("planned", "otto"), ("running", "otto"), ("done", "otto"),
    ]  # fmt: skip
    assert sifu.verify(service.folder / "north").problems == []
    assert "case-1" in rita.get("/").text  # she sees the outcome
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


def test_a_run_that_was_signed_again_is_not_shown_but_named(service: Any, heads: Path) -> None:
    south, eve, program = service.key("south"), service.browser("eve"), service.program("eve")
    assert eve.get(f"/runs/{south}").status_code == 200
    assert sifu.verify(service.folder / "south").problems == []  # listing runs in the console remembers nothing
    assert heads.exists()
    sign_again(service.folder / "south")
    for answer in (eve.get(f"/runs/{south}"), program.get(f"/api/v1/runs/{south}")):
        assert answer.status_code == 500
        assert "heads: run" in answer.text
    home = eve.get("/")
    assert home.status_code == 200
    assert "cannot be read" in home.text
    assert "heads: run" in home.text
    assert f"/runs/{service.key('north')}" in home.text  # the other runs are listed
    listed = {row["name"]: row for row in program.get("/api/v1/runs").json()["runs"]}
    assert "heads: run" in listed["south"]["error"]
    assert listed["north"]["clients"] > 0
    assert service.browser("rita").get("/").status_code == 200
    assert program.get("/api/v1/pending").status_code == 200


def test_a_run_damaged_before_the_start_is_listed_as_unreadable(service: Any) -> None:
    execute(service.folder / "south", "UPDATE run SET value = '[[[' WHERE key = 'spec'")
    service.app = make_app(Settings([service.folder], state_folder(service.folder)))
    listed = {row["name"]: row for row in service.program("eve").get("/api/v1/runs").json()["runs"]}
    assert ("error" in listed["south"], "error" in listed["north"]) == (True, False)
    assert "cannot be read" in service.browser("eve").get("/").text
    assert "cannot be read" not in service.browser("rita").get("/").text


def test_filing_is_idempotent_by_id(service: Any) -> None:
    north, program = service.key("north"), service.program("otto")
    body = {"clients": ["client-001"], "request": "ticket-7", "deadline_days": 5, "terms": {"epsilon": 5}}
    first = program.post(f"/api/v1/runs/{north}/requests", json=body)
    again = program.post(f"/api/v1/runs/{north}/requests", json=body)
    assert first.status_code == again.status_code == 201
    assert first.json() == again.json() == {"request": "ticket-7", "number": 1, "status": "waiting for approval"}
    other = program.post(f"/api/v1/runs/{north}/requests", json=body | {"clients": ["client-002"]})
    assert other.status_code == 409
    assert "other terms" in other.json()["error"]
    listed = program.get(f"/api/v1/runs/{north}/requests").json()["requests"]
    assert [(row["number"], row["request"], row["terms"]["epsilon"]) for row in listed] == [(1, "ticket-7", 5.0)]


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
        # the decision does not name the terms
        assert ann.post(f"/api/v1/runs/{north}/decisions", json=body).status_code == 400
        content = messages(service.folder / "north")[0].content
        terms = Terms.from_mapping({name: content[name] for name in TERMS if name in content})
        body["terms"] = terms.digest("a")
        assert ann.post(f"/api/v1/runs/{north}/decisions", json=body).json()["outcome"] == "posted"
        listed = otto.get(f"/api/v1/runs/{north}/requests").json()
        assert [row["request"] for row in listed["posted"]] == ["a"]
        assert "in the inbox" in service.browser("otto").get(f"/runs/{north}").text
        assert otto.get(f"/api/v1/runs/{north}").json()["at_work"] is True
        assert len(messages(service.folder / "north")) == 2
    assert sifu.open_run(service.folder / "north").decide("a", "approved", actor="bob") == "recorded"
    assert sifu.open_run(service.folder / "north").request_record("a").approvals == ("ann", "bob")


def test_the_openapi_document_says_what_the_routes_do(service: Any) -> None:
    from sifu_console import json_api

    document = service.stranger().get("/api/v1/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    described = {
        (method.upper(), path, operation["operationId"])
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }
    served = set()
    for route in json_api.router.routes:
        for method in route.methods:
            served.add((method, route.path.replace(":int", ""), route.endpoint.__name__))
    assert described == served
    assert json.dumps(document)


def test_a_page_that_asks_again_leaves_messages_for_the_next_page(service: Any) -> None:
    north, otto = service.key("north"), service.browser("otto")
    otto.client.follow_redirects = False
    otto.send(f"/runs/{north}/requests", clients="client-001", request="a")
    polled = otto.client.get(f"/runs/{north}", headers={"X-Refresh": "1"}).text
    assert "a was filed" not in polled
    assert ">a</a>" in polled  # what it polls for
    assert "a was filed" in otto.get(f"/runs/{north}").text
    assert "a was filed" not in otto.get(f"/runs/{north}").text


def test_a_job_whose_output_is_removed_ends(tmp_path: Path) -> None:
    """Otherwise it would run for ever in the console, and no other job of its kind could start on the run."""
    jobs = Jobs(tmp_path)
    jobs.start("verify", "key", ["verify", str(tmp_path / "nowhere")], "otto")
    for path in (tmp_path / "jobs").iterdir():
        path.unlink(missing_ok=True)
    end = time.monotonic() + 120.0
    while jobs.of_run("key")[0].state == "running" and time.monotonic() < end:
        time.sleep(0.1)
    assert jobs.of_run("key")[0].state == "failed"


@pytest.mark.long
def test_a_failed_job_says_why(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that fails because the run is in use reports the reason."""
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


def test_the_console_names_the_command_for_what_it_cannot_execute(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For runs on Flower's nodes and runs made from Python, the page and the API say what to do instead."""
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
    """Viewers within a second share one read of a busy run."""
    from sifu_console import runs

    looks = 0
    original = sifu.Run.progress

    def counted(run: Any) -> Any:
        nonlocal looks
        looks += 1
        return original(run)

    monkeypatch.setattr(sifu.Run, "progress", counted)
    north, eve = service.key("north"), service.program("eve")
    monkeypatch.setattr(runs, "FRESH_FOR", 1000.0)
    with RunWriter.open(service.folder / "north") as writer:
        assert eve.get(f"/runs/{north}").status_code == 200
        looks = 0
        for number in range(3):
            writer.record(NewEvent("run note", {"note": number}))
            assert eve.get(f"/runs/{north}").status_code == 200
        assert looks == 0
        filed = service.program("otto").post(
            f"/api/v1/runs/{north}/requests", json={"clients": ["client-001"], "request": "a"}
        )
        assert filed.status_code == 201
        # a change made through the console is visible at once
        assert eve.get(f"/api/v1/runs/{north}").json()["waiting"] == 1


def test_viewers_of_a_run_at_work_share_a_plan_and_lists_do_not_wait_for_it(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While rounds are written, a slow plan is computed once for all viewers, and other pages are served meanwhile."""
    from sifu_console import runs

    monkeypatch.setattr(runs, "FRESH_FOR", 0.0)
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
        for number in range(4):  # each viewer arrives after another event
            writer.record(NewEvent("run note", {"note": number}))
            looking.append(viewers.submit(lambda: service.program("eve").get(page).status_code))
            assert begun.wait(60)
        others = ["/", "/requests", f"/runs/{south}", f"/api/v1/runs/{south}/requests"]
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
        assert plans == 2  # a change by this console invalidates the plan


def test_no_more_than_some_results_are_remembered(service: Any) -> None:
    from sifu_console.runs import MOST_REMEMBERED

    run = service.app._app.state.console.runs.every_run()[service.key("north")]
    for number in range(3 * MOST_REMEMBERED):
        assert run.remembered(("plan", number), lambda number=number: number) == number
    assert len(run._memory) <= MOST_REMEMBERED


def test_a_page_of_a_request_that_was_just_begun_is_no_error(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that starts while its page is made no longer has a plan; the page is still served."""
    from sifu.api import Run
    from sifu.errors import InputError

    def begun(*arguments: Any, **terms: Any) -> None:
        raise InputError("already forgotten")

    south, otto = service.key("south"), service.browser("otto")
    monkeypatch.setattr(Run, "plan_of", begun)
    page = otto.get(f"/runs/{south}/requests/5")
    assert page.status_code == 200
    assert "side by side" not in page.text
