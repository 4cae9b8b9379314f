"""Requests that failed after their rollback: the console reports the failure, offers a remedy, and continues them."""

from __future__ import annotations

from typing import Any

import pytest
from service_for_tests import wait_for_jobs

import sifu
from sifu.errors import InputError
from sifu.run.run_engines import RunEngines
from sifu.run.training import RecordedTraining

WHY = "the nodes refuse every round"


def fail_once(service: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make the waiting request of a run fail after its rollback, on the command line; return the key of the run."""

    def refuse(*_: Any) -> bool:
        raise InputError(WHY)

    with monkeypatch.context() as patched:
        patched.setattr(RecordedTraining, "run", refuse)
        with pytest.raises(InputError, match=WHY):
            sifu.open_run(service.folder / "south").forget(request="waits")
    return str(service.key("south"))


def test_a_failed_request_shows_its_error_and_the_way_out(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert service.browser("otto").get("/").status_code == 200  # read and cached before the failure
    before = service.program("otto").get(f"/api/v1/runs/{service.key('south')}/requests/5").json()
    assert (before["state"], before["failure"]) == ("received", "")
    south = fail_once(service, monkeypatch)
    shown = service.program("otto").get(f"/api/v1/runs/{south}/requests/5").json()
    assert shown["state"] == "failed"
    assert shown["failure"].startswith(f"{WHY}. Request waits is unfinished")
    page = service.browser("otto").get(f"/runs/{south}/requests/5").text
    assert f"It could not be executed: {WHY}" in page
    assert "settle --reason" in page
    assert ">Continue</button>" in page
    assert ">Continue</button>" not in service.browser("eve").get(f"/runs/{south}/requests/5").text


def test_the_page_of_a_request_that_was_not_begun_names_the_command(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*_: Any, **__: Any) -> Any:
        raise InputError("there is no file rows.csv")

    with monkeypatch.context() as patched:
        patched.setattr(RunEngines, "for_requests", unreadable)
        with pytest.raises(InputError, match=r"rows\.csv"):
            sifu.open_run(service.folder / "south").forget(request="waits")
    page = service.browser("otto").get(f"/runs/{service.key('south')}/requests/5").text
    assert "It could not be executed: there is no file rows.csv. Request waits waits: sifu forget" in page
    assert ">Continue</button>" not in page  # it is executed as any other waiting request


@pytest.mark.long
def test_the_console_continues_a_failed_request(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    south = fail_once(service, monkeypatch)
    answer = service.browser("otto").send(f"/runs/{south}/carry-out", request="waits", number="5", confirm="yes")
    assert answer.status_code == 200
    (job,) = wait_for_jobs(service, south)  # a process that outlives the test would write where its folder was
    assert job["state"] == "done", job
    shown = service.program("otto").get(f"/api/v1/runs/{south}/requests/5").json()
    assert (shown["state"], shown["failure"]) == ("done", "")
