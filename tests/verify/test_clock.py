"""Jumps of the clock: one jump neither dates later events nor circumvents a deadline."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

import sifu
from forged_runs import execute, rebuild_chain
from run_tools import Command, query
from sifu.api import verify_run
from sifu.errors import RunDamagedError
from sifu.requests.deadlines import is_overdue
from sifu.store import writer
from sifu.store.reader import RunReader
from sifu.verify.outside_record import _check_dates


def moment(**after: float) -> str:
    """Return a time relative to now, as the ledger writes it."""
    return (datetime.datetime.now(datetime.UTC) + datetime.timedelta(**after)).strftime("%Y-%m-%dT%H:%M:%SZ")


def jump(monkeypatch: pytest.MonkeyPatch, **after: float) -> None:
    monkeypatch.setattr(writer, "utc_now", lambda: moment(**after))


@pytest.mark.parametrize("days", [36525, 400, -2])
def test_a_jump_is_refused_before_anything_is_written(
    own_trained: Path, monkeypatch: pytest.MonkeyPatch, days: int, cli: Command
) -> None:
    events = query(own_trained, "SELECT COUNT(*) FROM events")
    jump(monkeypatch, days=days)
    for command in (
        ("forget", own_trained, "--clients", "client-000"),
        ("request", own_trained, "--clients", "client-001"),
    ):
        answer = cli(*command)
        assert answer.code == 5
        assert "clock: " in answer.err
    assert query(own_trained, "SELECT COUNT(*) FROM events") == events
    # After a long pause, or with a ledger dated ahead, the operator must confirm the clock.
    assert cli("sign", own_trained, "--clock").code == 0
    sifu.open_run(own_trained).request(["client-002"], "later")


def test_a_ledger_that_is_dated_ahead_is_a_finding_until_the_clock_is_set(
    own_trained: Path, monkeypatch: pytest.MonkeyPatch, cli: Command
) -> None:
    """A jump of less than a year is not noticed while it lasts, but as soon as it is over."""
    jump(monkeypatch, days=300)
    run = sifu.open_run(own_trained)
    run.request(["client-000"], "during-the-jump")
    monkeypatch.undo()
    monkeypatch.setenv("SIFU_KNOWN_KEYS", str(own_trained.with_name("known")))
    assert any(problem.startswith("clock: ") for problem in verify_run(own_trained).problems)
    with pytest.raises(RunDamagedError, match="clock: "):
        run.forget(["client-000"], "during-the-jump", sigma=0.5)
    # The wall clock does not show when the request was received, so it counts as overdue at once.
    (waiting,) = sifu.pending_requests(own_trained)
    assert waiting.overdue
    with RunReader(own_trained) as reader:
        assert is_overdue(reader.requests()[0], datetime.datetime.now(datetime.UTC))
    run.sign(clock=True)
    result = verify_run(own_trained)
    assert result.problems == []
    assert any("the operator set the clock from" in note for note in result.notes)
    run.request(["client-001"], "after-it")
    (received,) = query(own_trained, "SELECT received FROM requests WHERE request = 'after-it'")[0]
    assert received <= moment(minutes=1)
    run.forget(["client-002"], "certified", method="scratch")
    certificate = json.loads((own_trained / "certificates" / "certified.public.json").read_text())
    assert certificate["body"]["issued"] <= moment(minutes=1)  # not the time of the wrong clock
    assert verify_run(own_trained).problems == []


def test_a_jump_in_the_ledger_that_the_operator_did_not_confirm_is_a_finding(own_trained: Path) -> None:
    """A jump signed with the operator's key, as by a version without clock checks, is reported."""
    (last,) = query(own_trained, "SELECT MAX(seq) FROM events")[0]
    execute(own_trained, f"UPDATE events SET time = '2001-01-01T00:00:00Z' WHERE seq < {last}")
    rebuild_chain(own_trained)
    assert any("did not confirm the clock" in problem for problem in verify_run(own_trained).problems)


def test_dates_are_held_against_timestamps(own_trained: Path) -> None:
    sifu.open_run(own_trained).request(["client-000"], "first")
    with RunReader(own_trained) as reader:
        events = reader.events()
    seq = len(events) - 1
    assert list(_check_dates(events, seq, moment())) == []
    (ahead,) = _check_dates(events, seq, moment(days=-3))
    assert "by its timestamp it existed at" in ahead
    (behind,) = _check_dates(events, seq, moment(days=3))
    assert "after event" in behind


def test_every_command_says_that_the_clock_is_wrong(
    own_trained: Path, monkeypatch: pytest.MonkeyPatch, cli: Command
) -> None:
    from sifu.api import run_search

    monkeypatch.setattr(run_search, "utc_now", lambda: moment(days=36525))
    answer: Any = cli("status", own_trained)
    assert answer.code == 0
    assert "clock: the clock says" in " ".join(answer.err.split())
