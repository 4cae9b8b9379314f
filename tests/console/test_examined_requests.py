"""Requests submitted through the console and examined on the command line, as an approver sees them."""

from __future__ import annotations

from typing import Any

from run_tools import run_cli
from sifu.store.inbox import messages


def submit(service: Any, request: str, client: str, records: list[int] | None = None) -> None:
    terms = {"records": records} if records else {}
    body = {"clients": [client], "request": request, "terms": terms}
    answer = service.program("rita").post(f"/api/v1/runs/{service.key('north')}/requests", json=body)
    assert answer.status_code == 201


def test_the_command_line_examines_what_the_console_received(service: Any) -> None:
    folder = service.folder / "north"
    submit(service, "mine", "client-003", [2, 4])
    submit(service, "unknown", "nobody")
    listed = run_cli("requests", "list", folder)
    assert "mine was submitted through the console and is not examined yet" in " ".join(listed.out.split())
    assert len(messages(folder)) == 2  # listing messages does not examine them
    shown = run_cli("requests", "show", folder, "mine")
    assert shown.code == 0, shown.err
    assert "2 records of client-003" in shown.out
    assert "received" in shown.out
    assert "by rita" in shown.out
    assert messages(folder) == []
    gone = run_cli("requests", "show", folder, "unknown")
    assert gone.code == 2


def test_a_decision_examines_first_and_names_the_reason_of_a_refusal(service: Any) -> None:
    folder = service.folder / "north"
    submit(service, "mine", "client-003")
    submit(service, "unknown", "nobody")
    refused = run_cli("requests", "decide", folder, "unknown", "approved", "--actor", "ann")
    assert refused.code == 2
    assert "request unknown was submitted through the console and is refused: unknown client" in refused.err
    for person in ("ann", "bob"):
        assert run_cli("requests", "decide", folder, "mine", "approved", "--actor", person).code == 0
    submit(service, "other", "client-004", [1])
    shown = run_cli("requests", "show", folder, "other")
    assert "also left out by pending requests: client-003 (request mine)" in " ".join(shown.out.split())
