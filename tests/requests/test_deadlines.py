"""Deadlines: every command reports waiting and overdue requests, in one run and in many."""

from __future__ import annotations

import datetime
import os
import time
from pathlib import Path

import pytest

import sifu
from run_tools import Command, copy_run, query
from sifu.api import find_runs, pending_requests
from sifu.requests import deadlines
from sifu.store.inbox import messages
from sifu.store.writer import RunWriter


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch):
    """Return a function that shifts the clock of all deadline checks by some days."""

    def pass_days(days: int) -> None:
        original = deadlines.days_until
        monkeypatch.setattr(
            deadlines, "days_until", lambda deadline, now: original(deadline, now + datetime.timedelta(days=days))
        )

    return pass_days


def test_a_deadline_has_the_whole_of_its_day() -> None:
    deadline = datetime.datetime(2026, 11, 16, 9, 30, tzinfo=datetime.UTC)
    for hour, day, left in ((0, 16, 0), (23, 16, 0), (0, 17, -1), (23, 15, 1)):
        assert deadlines.days_until(deadline, datetime.datetime(2026, 11, day, hour, 59, tzinfo=datetime.UTC)) == left
    # Days are counted in UTC, wherever the request comes from.
    east = datetime.timezone(datetime.timedelta(hours=10))
    assert deadlines.days_until(deadline, datetime.datetime(2026, 11, 17, 5, 0, tzinfo=east)) == 0


def test_pending_requests_of_several_runs_by_deadline(trained_run: Path, tmp_path: Path, cli: Command, later) -> None:
    for name in ("north", "south/deep"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        copy_run(trained_run, tmp_path / name)
    north, south = sifu.open_run(tmp_path / "north"), sifu.open_run(tmp_path / "south/deep")
    north.request(["client-001"], "n-late", deadline_days=1)
    north.request(["client-002"], "n-usual")
    south.request(["client-001"], "s-soon", deadline_days=3)
    south.forget(["client-003"], "s-done", sigma=0.5)
    south.request(["client-004"], "s-refused", deadline_days=0)
    south.decide("s-refused", "refused", "not theirs")
    assert find_runs(tmp_path) == [tmp_path / "north", tmp_path / "south/deep"]
    assert [pending.request for pending in pending_requests(tmp_path)] == ["n-late", "s-soon", "n-usual"]
    later(2)
    listed = cli("requests", tmp_path, "--pending", "--format", "json").json["requests"]
    assert [(row["request"], row["overdue"], row["days_left"]) for row in listed] == [
        ("n-late", True, -1),
        ("s-soon", False, 1),
        ("n-usual", False, 28),
    ]
    answer = cli("requests", tmp_path, "--overdue")
    assert "n-late" in answer.out
    assert "s-soon" not in answer.out
    assert cli("requests", tmp_path / "south", "--overdue").out == "No request is overdue.\n"
    every = cli("requests", tmp_path).out
    assert all(name in every for name in ("n-late", "s-done", "s-refused"))
    assert cli("requests", tmp_path, "--public").code == 2
    assert cli("requests", tmp_path / "nowhere").code == 2


def test_a_run_that_cannot_be_read_does_not_hide_the_others(
    trained_run: Path, tmp_path: Path, cli: Command, later
) -> None:
    for name in ("damaged", "whole"):
        copy_run(trained_run, tmp_path / name)
    sifu.open_run(tmp_path / "whole").request(["client-001"], "late", deadline_days=1)
    (tmp_path / "damaged" / "run.db").write_bytes(b"no database")
    answer = cli("requests", tmp_path, "--overdue")
    assert (answer.code, answer.out) == (5, "No request is overdue in the other runs.\n")
    later(2)
    answer = cli("requests", tmp_path, "--overdue", "--format", "json")
    assert answer.code == 5
    assert "damaged cannot be listed: " in answer.err
    assert [row["request"] for row in answer.json["requests"]] == ["late"]
    assert answer.json["unread"] == [str(tmp_path / "damaged")]
    alone = cli("requests", tmp_path / "damaged", "--overdue")
    assert (alone.code, alone.out) == (5, "")


def test_an_export_names_requests_that_wait(own_trained: Path, cli: Command, tmp_path: Path) -> None:
    export = ("export", own_trained, "--model", tmp_path / "model.safetensors")
    assert "may still contain" not in cli(*export).out
    run = sifu.open_run(own_trained)
    run.request(["client-001"], "a")
    assert "\nNot executed yet: a. The model may still contain" in cli(*export).out
    assert cli(*export, "--format", "json").json["pending"] == ["a"]
    run.decide("a", "refused", "not theirs")
    assert "may still contain" not in cli(*export).out


def test_every_command_on_a_run_says_what_is_overdue(own_trained: Path, cli: Command, later, tmp_path: Path) -> None:
    run = sifu.open_run(own_trained)
    run.request(["client-001"], "forgotten-on-the-desk", deadline_days=1)
    commands = [
        ("status", own_trained),
        ("plan", own_trained, "--clients", "client-002"),
        ("verify", own_trained),
        ("requests", own_trained, "forgotten-on-the-desk"),
        ("key", own_trained),
        ("request", own_trained, "--clients", "client-002", "--id", "another"),
    ]
    assert "overdue" not in cli(*commands[0]).err
    later(5)
    for command in commands:
        answer = cli(*command)
        assert answer.code == 0, answer.err
        assert "overdue in" in answer.err, command
        assert "forgotten-on-the-desk" in answer.err
        assert "another" not in answer.err
    assert cli("status", own_trained, "--format", "json").json["requests"][0]["overdue"] is True  # stdout stays JSON
    run.forget(request="forgotten-on-the-desk")
    assert "overdue in" not in cli("status", own_trained).err


def test_a_message_that_nobody_opens_is_overdue_too(own_trained: Path, cli: Command) -> None:
    with RunWriter.open(own_trained):
        sifu.open_run(own_trained).request(["client-003"], "posted-long-ago", deadline_days=2)
    (message,) = messages(own_trained)
    then = time.time() - 4 * 86400
    os.utime(message.path, (then, then))
    (pending,) = pending_requests(own_trained)
    assert (pending.request, pending.status, pending.overdue) == ("posted-long-ago", "posted", True)
    assert "posted-long-ago" in cli("status", own_trained).err
    (own_trained / "inbox" / "request.bad.json").write_text('{"deadline_days": "soon", "clients": 7}')
    assert {pending.request for pending in pending_requests(own_trained)} == {"posted-long-ago", "bad"}
    assert query(own_trained, "SELECT COUNT(*) FROM requests") == [(0,)]
