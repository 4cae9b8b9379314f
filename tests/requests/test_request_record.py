"""Lifecycle of requests: every step is an event with time and actor; deadlines, a public record, a plain answer."""

from __future__ import annotations

import datetime
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import sifu
from run_tools import Command, dump, query, start_cli
from sifu.errors import InputError, SifuError
from sifu.requests.deadlines import is_overdue
from sifu.requests.messages import ingest
from sifu.store.inbox import messages
from sifu.store.projection import NewEvent
from sifu.store.writer import RunWriter


def test_every_step_is_an_event_with_time_and_actor(own_trained: Path, cli: Command, monkeypatch: Any) -> None:
    monkeypatch.setenv("SIFU_ACTOR", "the desk")
    assert cli("request", own_trained, "--clients", "client-003", "--id", "a", "--actor", "portal").code == 0
    assert cli("decide", own_trained, "a", "verify", "--actor", "ann").code == 0
    run = sifu.open_run(own_trained)
    run.forget(request="a")
    steps = run.request_record("a").steps
    assert [step.status for step in steps] == ["received", "verified", "planned", "running", "done"]
    assert [step.actor for step in steps] == ["portal", "ann", "the desk", "the desk", "the desk"]
    assert all(step.time for step in steps)
    assert run.verify().problems == []
    shown = cli("requests", own_trained)
    assert "verified by ann" in shown.out


@pytest.mark.parametrize("decision", ["refused", "withdrawn"])
def test_a_refused_or_withdrawn_request_is_not_carried_out(own_trained: Path, cli: Command, decision: str) -> None:
    run = sifu.open_run(own_trained)
    run.request(["client-003"], "a")
    word = {"refused": "refuse", "withdrawn": "withdraw"}[decision]
    assert run.status().clients[3].state == "waiting"
    assert cli("decide", own_trained, "a", word, "--reason", "not theirs").code == 0
    assert run.status().clients[3].state == "active"
    assert run.forget() == []
    with pytest.raises(InputError, match=decision):
        run.forget(request="a")
    with pytest.raises(InputError, match=decision):
        run.forget(["client-003"], "a")
    before = dump(own_trained)
    # A decided request is not reported as waiting.
    assert f"was {decision}" in cli("request", own_trained, "--clients", "client-003", "--id", "a").err
    assert run.decide("a", decision, "again") == "unchanged"  # idempotent
    assert dump(own_trained) == before
    other = {"refused": "withdrawn", "withdrawn": "refused"}[decision]
    with pytest.raises(InputError, match="can no longer be"):
        run.decide("a", other, "x")
    run.request(["client-003"], "b")  # the same client may ask again
    assert f"next: sifu forget {own_trained}" in cli("status", own_trained).out
    (outcome,) = run.forget()
    assert outcome.request == "b"
    assert run.verify().problems == []


def test_decisions_that_make_no_sense_are_refused(own_trained: Path) -> None:
    run = sifu.open_run(own_trained)
    run.forget(["client-003"], "done", sigma=0.5)
    run.request(["client-004"], "waits")
    before = dump(own_trained)
    for request, decision, reason in [
        ("done", "refused", "x"),
        ("done", "verified", ""),
        ("nobody", "verified", ""),
        ("waits", "carried out", ""),
        ("waits", "refused", " "),
        ("waits", "refused", "x" * 2000),
    ]:
        with pytest.raises(InputError):
            run.decide(request, decision, reason)
    with pytest.raises(InputError, match="actor"):
        run.decide("waits", "verified", actor="a\nb")
    assert dump(own_trained) == before


def test_a_refused_request_that_is_carried_out_all_the_same_is_caught(own_trained: Path) -> None:
    run = sifu.open_run(own_trained)
    run.forget(["client-003"], "a", sigma=0.5)
    writer = RunWriter.open(own_trained)
    writer.record(NewEvent("request refused", {"request": "a", "actor": "mallory", "reason": "x"}))
    writer.close()
    assert any("makes it refused, but it was done" in problem for problem in run.verify().problems)


def test_a_deadline_is_shown_with_what_is_overdue(own_trained: Path, cli: Command) -> None:
    assert cli("request", own_trained, "--clients", "client-003", "--id", "late", "--deadline", "0").code == 0
    assert cli("request", own_trained, "--clients", "client-004", "--id", "usual").code == 0
    requests = {
        request["request"]: request for request in cli("status", own_trained, "--format", "json").json["requests"]
    }
    received = datetime.datetime.fromisoformat(requests["usual"]["received"])
    assert datetime.datetime.fromisoformat(requests["usual"]["deadline"]) - received == datetime.timedelta(days=30)
    assert not requests["usual"]["overdue"]
    rows = {request.request: request for request in sifu.open_run(own_trained).reader().requests()}
    end_of_the_day = datetime.datetime.fromisoformat(requests["late"]["deadline"]).replace(
        hour=23, minute=59, second=59
    )
    assert not is_overdue(rows["late"], end_of_the_day)  # a deadline of today is not overdue today
    assert is_overdue(rows["late"], end_of_the_day + datetime.timedelta(seconds=1))
    assert not is_overdue(rows["usual"], end_of_the_day + datetime.timedelta(seconds=1))
    assert is_overdue(rows["usual"], end_of_the_day + datetime.timedelta(days=31))
    assert cli("request", own_trained, "--clients", "client-005", "--deadline", "-1").code == 2


def test_the_public_record_holds_no_personal_data(own_trained: Path, cli: Command) -> None:
    run = sifu.open_run(own_trained)
    run.forget(["client-003"], "Jane-Doe", sigma=0.5)
    run.request(["client-004", "client-005"], "secret-id", actor="Ann")
    run.decide("secret-id", "refused", "Jane said so", "Ann")
    for answer in (
        cli("requests", own_trained, "--public"),
        cli("requests", own_trained, "--public", "--format", "json"),
    ):
        assert answer.code == 0
        for word in ("client-00", "Jane", "secret", "Ann"):
            assert word not in answer.out
    record = answer.json["requests"]
    assert [(row["number"], row["status"], row["clients"]) for row in record] == [(1, "done", 1), (2, "refused", 2)]
    assert set(record[0]) == {
        "number", "status", "clients", "records", "received", "deadline", "finished", "overdue", "method", "level",
        "epsilon", "delta",
    }  # fmt: skip


@pytest.mark.long
def test_a_request_that_arrives_during_training_is_served_after_it(tmp_path: Path) -> None:
    """A request filed while another process trains is passed to it, survives it, and counts once."""
    spec = tmp_path / "spec.toml"
    spec.write_text("[data]\nclients = 12\n[stop]\ntarget = 0.0\nmax_rounds = 4000\n")
    training = start_cli("train", spec, "--run", tmp_path / "run")
    try:
        while not (tmp_path / "run" / "run.db").exists() and training.poll() is None:
            pass
        requesting = start_cli("request", tmp_path / "run", "--clients", "client-003", "--id", "a")
        _, err = requesting.communicate(timeout=120)
        assert requesting.returncode == 0, err
    finally:
        training.kill()
        training.communicate()
    run = sifu.open_run(tmp_path / "run")
    assert run.request(["client-003"], "a") == "a"
    assert run.request(["client-003"], "a") == "a"  # a repeated request counts once
    assert query(tmp_path / "run", "SELECT COUNT(*) FROM requests") == [(1,)]
    with pytest.raises(InputError, match="already waits"):
        run.request(["client-003"], "b")


def test_two_processes_that_ask_at_once_lose_nothing(own_trained: Path) -> None:
    answers: list[str] = []

    def ask(number: int) -> None:
        for _ in range(200):
            try:
                answers.append(sifu.open_run(own_trained).request([f"client-{number:03d}"], f"r-{number}"))
                return
            except SifuError:
                continue

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [f"r-{number}" for number in range(4)]
    # A command that found the run in use left a message; status names it, and the next writer ingests it.
    run = sifu.open_run(own_trained)
    status = run.status()
    assert {request.request for request in status.requests} | {message.id for message in status.inbox} == set(answers)
    run.request(["client-000"], "r-0")
    assert not run.status().inbox
    assert query(own_trained, "SELECT COUNT(*) FROM requests") == [(4,)]
    assert sifu.open_run(own_trained).verify().problems == []


def test_the_actor_is_in_every_event_of_a_request(own_run: Path) -> None:
    rows = query(own_run, "SELECT kind, payload FROM events WHERE kind LIKE 'request %' OR kind = 'rolled back'")
    assert len(rows) >= 13
    assert all(json.loads(payload)["actor"] for _, payload in rows)


@pytest.mark.parametrize(("waited", "left"), [(0.0, 30), (0.9, 30), (3.1, 27), (45.0, 0), (-2.0, 30)])
def test_a_deadline_runs_from_when_the_message_was_posted(own_trained: Path, waited: float, left: int) -> None:
    writer = RunWriter.open(own_trained)
    try:
        # the writer holds the lock, so the request is posted
        sifu.open_run(own_trained).request(["client-003"], "late")
        (message,) = messages(own_trained)
        then = time.time() - waited * 86400
        os.utime(message.path, (then, then))
        assert ingest(writer) == []
    finally:
        writer.close()
    ((days,),) = query(own_trained, "SELECT deadline_days FROM requests")
    assert days == left
