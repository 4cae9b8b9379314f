"""Signed events: without the key, nothing before the last signature can be changed."""

from __future__ import annotations

import datetime
import json
import logging
from pathlib import Path
from typing import Any

import pytest

import sifu
from forged_runs import execute, rebuild_chain
from run_tools import Command, connect, query, state
from sifu.api import verify_run
from sifu.errors import InputError, RunDamagedError
from sifu.store import keys, writer
from sifu.store.checkpoints import Checkpoint, latest_checkpoint
from sifu.store.reader import RunReader
from sifu_verifier import verify


def shrink_drifts(folder: Path) -> None:
    """Make one client's drifts a thousand times smaller and update every hash, without the key."""
    execute(folder, "UPDATE participation SET drift = drift / 1000 WHERE client = 0")
    rebuild_chain(folder, with_key=False)


def test_drifts_shrunk_before_the_first_certificate_are_caught_without_a_key(own_trained: Path) -> None:
    shrink_drifts(own_trained)
    result = verify_run(own_trained)
    assert any("has no signature" in problem for problem in result.problems), result.problems
    with pytest.raises(RunDamagedError, match="has no signature"):
        sifu.open_run(own_trained).forget(["client-000"])


def test_with_the_key_the_same_change_passes_which_is_why_keys_are_guarded(own_trained: Path) -> None:
    """Control: only the missing signature reveals the change."""
    execute(own_trained, "UPDATE participation SET drift = drift / 1000 WHERE client = 0")
    rebuild_chain(own_trained, with_key=True)
    assert verify_run(own_trained).problems == []


def test_signatures_that_were_kept_do_not_hold_over_changed_events(own_trained: Path) -> None:
    signatures = query(own_trained, "SELECT seq, signature FROM events")
    shrink_drifts(own_trained)
    for seq, signature in signatures:
        execute(own_trained, f"UPDATE events SET signature = x'{signature.hex()}' WHERE seq = {seq}")
    problems = verify_run(own_trained).problems
    assert any("the signature of event" in problem for problem in problems)
    with pytest.raises(RunDamagedError, match="the signature of event"):
        sifu.open_run(own_trained).request(["client-000"])


def test_every_event_carries_a_signature_that_holds(run_with_requests: Path) -> None:
    assert query(run_with_requests, "SELECT COUNT(*) FROM events WHERE signature IS NULL") == [(0,)]
    with RunReader(run_with_requests) as reader:
        checkpoint = latest_checkpoint(reader)
        assert checkpoint is not None
        assert checkpoint.holds
        assert checkpoint.seq == reader.last_event()[0]
        assert Checkpoint.from_json(json.dumps(checkpoint.to_mapping())) == checkpoint


def test_without_the_passphrase_requests_are_filed_and_nothing_else(
    own_trained: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(keys.PASSPHRASE, "open sesame")
    run = sifu.open_run(own_trained)
    run.rotate_key()
    monkeypatch.delenv(keys.PASSPHRASE)
    with caplog.at_level(logging.WARNING):
        run.request(["client-000"], "waits")
        run.decide("waits", "verified", actor="ann")
    assert "no signature" in caplog.text
    before = state(run.folder)
    with pytest.raises(InputError, match="needs the operator's key, so nothing was recorded"):
        run.purge()
    assert state(run.folder) == before
    (last,) = query(run.folder, "SELECT MAX(seq) FROM events")[0]
    result = run.verify()
    assert result.problems == verify(run.folder) == []
    assert any(f"event {last - 1}, {last}" in note for note in result.notes)
    monkeypatch.setenv(keys.PASSPHRASE, "open sesame")
    run.forget(method="sifu", level="none")
    result = run.verify()
    assert result.problems == verify(run.folder) == []
    assert any("on waits; the next signed event covers them" in note for note in result.notes)


def test_times_never_run_backwards(own_trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer keeps the last time if the clock is behind; a ledger whose times run backwards is reported."""
    behind = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=50)
    monkeypatch.setattr(writer, "utc_now", lambda: behind.strftime("%Y-%m-%dT%H:%M:%SZ"))
    sifu.open_run(own_trained).request(["client-000"], "late")
    times = [time for (time,) in query(own_trained, "SELECT time FROM events ORDER BY seq")]
    assert times == sorted(times)
    assert verify_run(own_trained).problems == []
    future = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    execute(own_trained, f"UPDATE events SET time = '{future}' WHERE seq = 2")
    rebuild_chain(own_trained)
    assert any("is dated before event 2" in problem for problem in verify_run(own_trained).problems)


@pytest.mark.parametrize("damage", ["gone", "garbage", "another"])
def test_requests_are_filed_without_the_key(own_trained: Path, tmp_path: Path, damage: str, cli: Command) -> None:
    path = own_trained / keys.KEY_FILE
    kept = path.read_bytes()
    path.unlink()
    if damage == "garbage":
        path.write_bytes(b"nothing")
    elif damage == "another":
        keys.write_key(path, keys.new_key())
    run = sifu.open_run(own_trained)
    run.request(["client-000"], "first")
    run.request(["client-001"], "second")
    kinds = [kind for (kind,) in query(own_trained, "SELECT kind FROM events WHERE signature IS NULL ORDER BY seq")]
    assert kinds == ["request received", "request received"]
    result = run.verify()
    assert result.problems == []
    assert any("no signature covers the last" in note for note in result.notes)
    if damage == "gone":
        assert any("the folder has no operator.key" in note for note in result.notes)
        assert cli("backup", own_trained, tmp_path / "b.zip").code == 5
    path.write_bytes(kept)
    run.forget(level="none")
    result = run.verify()
    assert result.problems == []
    assert not any("the folder has no" in note for note in result.notes)


def test_a_payload_that_was_canonical_once_is_looked_at_again_when_it_is_another(own_trained: Path) -> None:
    """A payload known to be canonical is remembered by its own digest, never by the digest in the record."""
    sifu.open_run(own_trained).request(["client-001"], "first")
    seq, payload = query(own_trained, "SELECT seq, payload FROM events ORDER BY seq DESC LIMIT 1")[0]
    connection = connect(own_trained)
    connection.execute("UPDATE events SET payload = ? WHERE seq = ?", (payload.replace(":", ": ", 1), seq))
    connection.close()
    assert any("canonical JSON" in problem for problem in verify_run(own_trained).problems)
    with pytest.raises(RunDamagedError):
        sifu.open_run(own_trained).request(["client-002"], "second")


def test_what_a_process_has_checked_is_checked_again_when_it_is_another(own_trained: Path) -> None:
    """An object that wrote to the run before checks again after every hash was rebuilt with the key."""
    run = sifu.open_run(own_trained)
    run.request(["client-001"], "first")
    run.request(["client-002"], "second")

    def with_tip(kind: str, content: dict[str, Any]) -> None:
        if kind == "training done":
            content["run"]["tip"] = "1"

    def without_tip(kind: str, content: dict[str, Any]) -> None:
        if kind == "training done":
            del content["run"]["tip"]

    rebuild_chain(own_trained, with_tip)
    with pytest.raises(RunDamagedError, match=r"training done. changes tip"):
        run.request(["client-003"], "third")
    rebuild_chain(own_trained, without_tip)
    run.request(["client-003"], "third")
    assert verify_run(own_trained).problems == []
