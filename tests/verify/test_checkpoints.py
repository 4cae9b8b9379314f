"""Signed events: without the key, nothing before the last signature can be changed."""

from __future__ import annotations

import datetime
import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest

import sifu
from forged_runs import execute, rebuild_chain
from run_tools import Command, connect, copy_run, query, small_spec
from sifu.api import verify_run
from sifu.errors import RunDamagedError
from sifu.store import keys, writer
from sifu.store.checkpoints import Checkpoint, latest_checkpoint
from sifu.store.head_file import HEAD_FILE
from sifu.store.reader import RunReader


def shrink_drifts(folder: Path) -> None:
    """Make one client's drifts a thousand times smaller and update every hash, without the key."""
    execute(folder, "UPDATE participation SET drift = drift / 1000 WHERE client = 0")
    rebuild_chain(folder, with_key=False)


def test_drifts_shrunk_before_the_first_certificate_are_caught_without_a_key(own_trained: Path) -> None:
    shrink_drifts(own_trained)
    result = verify_run(own_trained)
    assert any("no signature covers events 2 to" in problem for problem in result.problems), result.problems
    with pytest.raises(RunDamagedError, match="no signature covers"):
        sifu.open_run(own_trained).forget(["client-000"])


def test_no_event_up_to_the_last_checkpoint_can_be_changed_without_the_key(own_trained: Path, tmp_path: Path) -> None:
    """A change of any event, with all hashes, digests and the head updated, is found and named."""
    sifu.open_run(own_trained).forget(["client-000"], "mine", sigma=0.5)
    (last,) = query(own_trained, "SELECT MAX(seq) FROM events")[0]
    for seq in range(1, last + 1):
        forged = copy_run(own_trained, tmp_path / str(seq))
        numbers = itertools.count(1)

        def edit(kind: str, content: dict[str, Any], numbers: Any = numbers, seq: int = seq) -> None:
            if next(numbers) == seq:
                content["remark"] = "added later"

        rebuild_chain(forged, edit, with_key=False)
        events = f"event {last}:" if seq == last else f"events {seq} to {last}:"
        problems = verify_run(forged).problems
        assert any(f"no signature covers {events}" in problem for problem in problems), (seq, problems)
        with pytest.raises(RunDamagedError):
            sifu.open_run(forged).request(["client-001"])


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


def test_without_the_passphrase_events_stay_unsigned_until_the_operator_vouches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cli: Command
) -> None:
    monkeypatch.setenv(keys.PASSPHRASE, "open sesame")
    run = sifu.train(small_spec(), run=tmp_path / "run")
    monkeypatch.delenv(keys.PASSPHRASE)
    with caplog.at_level(logging.WARNING):
        run.request(["client-000"], "waits")
    assert "no signature" in caplog.text
    (last,) = query(run.folder, "SELECT MAX(seq) FROM events")[0]
    (problem,) = run.verify().problems
    assert f"no signature covers event {last}:" in problem
    monkeypatch.setenv(keys.PASSPHRASE, "open sesame")
    with pytest.raises(RunDamagedError, match=f"no signature covers event {last}"):
        run.forget(["client-001"], method="sifu", level="none")
    assert cli("sign", run.folder).code == 0
    result = run.verify()
    assert result.problems == []
    assert any(f"events {last} to {last} were written without a signature" in note for note in result.notes)
    run.forget(["client-001"], method="sifu", level="none")
    assert run.verify().problems == []


def test_nobody_vouches_by_going_on(own_trained: Path) -> None:
    """A signed event of another kind after an unsigned one does not vouch for it and is reported."""
    (last,) = query(own_trained, "SELECT MAX(seq) FROM events")[0]
    execute(own_trained, f"UPDATE events SET signature = NULL WHERE seq = {last - 1}")
    assert any("does not vouch" in problem for problem in verify_run(own_trained).problems)


def test_times_never_run_backwards(own_trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer keeps the last time if the clock is slightly behind; a ledger whose times run
    backwards is reported.
    """
    behind = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=50)
    monkeypatch.setattr(writer, "utc_now", lambda: behind.strftime("%Y-%m-%dT%H:%M:%SZ"))
    sifu.open_run(own_trained).request(["client-000"], "late")
    times = [time for (time,) in query(own_trained, "SELECT time FROM events ORDER BY seq")]
    assert times == sorted(times)
    assert verify_run(own_trained).problems == []
    future = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    execute(own_trained, f"UPDATE events SET time = '{future}' WHERE seq = 2")
    rebuild_chain(own_trained)
    assert any("is dated before event 2" in problem for problem in verify_run(own_trained).problems)


def older_head(folder: Path) -> None:
    seq, digest = query(folder, "SELECT seq, hash FROM events ORDER BY seq DESC LIMIT 1 OFFSET 1")[0]
    (folder / HEAD_FILE).write_text(f"{seq}:{digest.hex()}\n")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / HEAD_FILE).unlink(), "file head is missing"),
        (older_head, "file head names event"),
        (lambda folder: (folder / HEAD_FILE).write_text("nothing"), "file head cannot be read"),
        (lambda folder: (folder / HEAD_FILE).write_bytes(b"\xff\n" * 3), "file head cannot be read"),
    ],
)
def test_the_file_head_fails_closed(own_trained: Path, change: Any, words: str) -> None:
    change(own_trained)
    assert any(words in problem for problem in verify_run(own_trained).problems)
    with pytest.raises(RunDamagedError, match=words):
        sifu.open_run(own_trained).request(["client-000"])


def test_a_lost_head_is_written_again_by_whoever_vouches(own_trained: Path) -> None:
    (own_trained / HEAD_FILE).unlink()
    assert sifu.open_run(own_trained).sign() is None
    assert verify_run(own_trained).problems == []


@pytest.mark.parametrize("damage", ["gone", "garbage", "another"])
def test_a_destroyed_key_is_noted_in_the_ledger_once(
    own_trained: Path, tmp_path: Path, damage: str, cli: Command
) -> None:
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
    assert kinds == ["key lost", "request received", "request received"]
    result = run.verify()
    assert any("no signature covers" in problem for problem in result.problems)
    assert any("the operator's key was gone, or was another one, at" in note for note in result.notes)
    if damage == "gone":
        assert any("the folder has no operator.key" in note for note in result.notes)
        answer = cli("backup", own_trained, tmp_path / "b.zip")
        assert answer.code == 5
        assert "put the key back first" in " ".join(answer.err.split())
    path.write_bytes(kept)
    run.sign()
    result = run.verify()
    assert result.problems == []
    assert any("the operator's key was gone" in note for note in result.notes)  # it stays in the record permanently
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
