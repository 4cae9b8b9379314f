"""Heads remembered outside the run: a run that was rewritten, rolled back or copied stops commands."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import sifu
from forged_runs import add_event, execute, rebuild_chain, sign_again
from run_tools import Command, copy_run, query, small_spec, state
from sifu.api import pending_requests, verify_run
from sifu.errors import InputError, RunDamagedError
from sifu.store import keys
from sifu.store.seen_heads import NEW_RUN
from sifu.store.writer import RunWriter
from sifu_console.runs import ServedRuns


@pytest.fixture
def used(own_trained: Path, heads: Path) -> Path:
    """Return a run that this account has verified before."""
    assert verify_run(own_trained).problems == []
    assert heads.exists()
    return own_trained


COMMANDS = (
    ("status",),
    ("plan", "--clients", "client-000"),
    ("forget", "--clients", "client-000"),
    ("request", "--clients", "client-000"),
    ("requests",),
    ("key",),
    ("clients", "list"),
    ("report",),
    ("purge",),
)


def with_another_key(folder: Path) -> None:
    sign_again(folder)


def with_another_id(folder: Path) -> None:
    sign_again(folder, run="0123456789abcdef")


def rewritten(folder: Path) -> None:
    execute(folder, "UPDATE participation SET drift = drift / 1000 WHERE client = 0")
    rebuild_chain(folder)


def cut_off(folder: Path) -> None:
    (last,) = query(folder, "SELECT MAX(seq) FROM events")[0]
    (digest,) = query(folder, f"SELECT hash FROM events WHERE seq = {last - 1}")[0]
    execute(
        folder,
        f"DELETE FROM events WHERE seq = {last}",
        f"UPDATE run SET value = '{last - 1}:{digest.hex()}' WHERE key = 'head'",
    )


def without_hashes(folder: Path) -> None:
    nullable = "UPDATE sqlite_master SET sql = replace(sql, 'BLOB NOT NULL', 'BLOB') WHERE name = 'events'"
    execute(folder, "PRAGMA writable_schema = ON", nullable)
    execute(folder, "UPDATE events SET hash = NULL")


@pytest.mark.parametrize("change", [with_another_key, with_another_id, rewritten, cut_off, without_hashes])
def test_a_changed_run_stops_every_command(
    used: Path, heads: Path, change: Callable[[Path], None], cli: Command
) -> None:
    change(used)
    answer = cli("verify", used)
    assert answer.code == 3
    assert "heads: " in answer.err
    before, known = state(used), heads.read_bytes()
    for command, *options in COMMANDS:
        parts = [command, options.pop(0)] if command == "clients" else [command]
        answer = cli(*parts, used, *options)
        assert answer.code == 5, (parts, answer.out)
    assert (state(used), heads.read_bytes()) == (before, known)
    # Only another run is accepted by an option; anything else needs the line to be removed.
    accepted = cli("--new-run", "status", used).code
    assert accepted == (0 if change is with_another_id else 5)


def test_control_without_a_first_use_nothing_is_known(own_trained: Path, heads: Path) -> None:
    sign_again(own_trained)
    assert verify_run(own_trained).problems == []


def test_a_moved_run_goes_on_and_a_copy_is_only_read(used: Path, tmp_path: Path, cli: Command) -> None:
    copy = copy_run(used, tmp_path / "copy")
    assert cli("status", copy).code == cli("verify", copy).code == 0
    answer = cli("request", copy, "--clients", "client-000")
    assert answer.code == 5
    assert "is a copy of it" in " ".join(answer.err.split())
    used.rename(tmp_path / "moved")
    assert cli("request", tmp_path / "moved", "--clients", "client-000").code == 0
    assert cli("request", copy, "--clients", "client-001").code == 5  # the run is in `moved` now
    assert cli("--new-run", "request", copy, "--clients", "client-001").code == 0
    assert cli("request", copy, "--clients", "client-002").code == 0  # accepted once
    assert cli("verify", copy).code == cli("verify", tmp_path / "moved").code == 0


def test_a_moved_run_that_is_older_is_refused(used: Path, tmp_path: Path, cli: Command) -> None:
    older = copy_run(used, tmp_path / "older")
    assert cli("request", used, "--clients", "client-000").code == 0
    shutil.rmtree(used)
    answer = cli("status", older)
    assert answer.code == 5
    assert "an older state was put back" in " ".join(answer.err.split())


def test_a_restored_run_is_known_and_an_older_backup_is_refused(used: Path, tmp_path: Path, cli: Command) -> None:
    assert cli("backup", used, tmp_path / "old.zip").code == 0
    assert cli("restore", tmp_path / "old.zip", tmp_path / "copy").code == 0
    assert cli("request", used, "--clients", "client-000").code == 0
    assert "not the latest state" in cli("restore", tmp_path / "old.zip", tmp_path / "back").err
    assert not (tmp_path / "back").exists()
    assert cli("restore", tmp_path / "old.zip", tmp_path / "back", "--accept-older").code == 0
    assert cli("request", tmp_path / "back", "--clients", "client-001").code == 0
    other = sifu.train(small_spec(seed=8), run=tmp_path / "other").folder
    assert cli("backup", other, tmp_path / "other.zip").code == 0
    shutil.rmtree(tmp_path / "back")
    with pytest.raises(InputError, match="held run"):
        sifu.restore(tmp_path / "other.zip", tmp_path / "back")


def test_a_signed_rotation_is_followed_and_an_invented_one_is_not(used: Path, tmp_path: Path, cli: Command) -> None:
    older = copy_run(used, tmp_path / "older")
    sifu.open_run(used).rotate_key()
    assert verify_run(used).problems == []
    # A stranger's ledger that claims a rotation to the operator's key, without the operator's signature.
    genuine = (used / keys.KEY_FILE).read_bytes()
    operator = sifu.open_run(used).keys().public_keys[-1].key
    shutil.rmtree(used)
    stranger = sign_again(older)
    content = {"run": {"public_key": operator}, "old_key": stranger}
    add_event(older, "key rotated", content | {"signature_by_old": "00" * 64, "signature_by_new": "00" * 64})
    (older / keys.KEY_FILE).write_bytes(genuine)
    assert cli("status", older).code == 5
    assert cli("forget", older, "--clients", "client-000").code == 5


def test_a_new_key_is_encrypted_where_the_old_one_was(own_trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(keys.PASSPHRASE, "open sesame")
    run = sifu.open_run(own_trained)
    run.rotate_key()
    monkeypatch.delenv(keys.PASSPHRASE)
    monkeypatch.setattr(keys, "_typed", [b"open sesame"])  # as typed on a terminal
    run.rotate_key()
    assert keys.is_encrypted(run.folder)
    assert run.verify().problems == []


def test_a_memory_that_cannot_be_used_is_a_sentence(
    used: Path, heads: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cli: Command
) -> None:
    heads.write_text("nothing\n")
    answer = cli("status", used)
    assert answer.code == 2
    assert "line 1" in answer.err
    monkeypatch.setenv("SIFU_HEADS", str(used / "run.db" / "nowhere"))  # as in a read-only home directory
    with caplog.at_level(logging.WARNING):
        assert verify_run(used).problems == []
    assert "cannot be remembered" in caplog.text


@pytest.mark.parametrize("left", [0.0, 0.4, 1.0])
def test_an_interrupted_append_stops_nothing(
    used: Path, heads: Path, left: float, tmp_path: Path, cli: Command
) -> None:
    """An append that was cut off anywhere loses at most its own line, and the next append repairs the file."""
    other = sifu.train(small_spec(seed=9), run=tmp_path / "other").folder
    *before, last = heads.read_text().splitlines(keepends=True)
    assert str(other) in last
    cut = 1 + round(left * (len(last) - 2))  # at least a byte is written, and the end of the line is missing
    heads.write_text("".join(before) + last[:cut])
    assert cli("verify", used).code == 0
    assert cli("verify", other).code == 0
    assert json.loads(heads.read_text().splitlines()[-1])["folder"] == str(other)


def test_superseded_lines_are_dropped_from_a_full_file(
    used: Path, heads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sifu.store.seen_heads.FULL_FILE", 600)
    for number in range(6):
        sifu.open_run(used).request([f"client-00{number}"], f"r{number}")
    assert heads.stat().st_size < 1000
    assert verify_run(used).problems == []


def ways_to_launder(folder: Path, elsewhere: Path) -> dict[str, Callable[[], object]]:
    """Return uses of a forged folder, or of its copy, that must not make it acceptable in its original place."""

    def copy_and(use: Callable[[Path], object]) -> Callable[[], object]:
        def act() -> None:
            shutil.rmtree(elsewhere, ignore_errors=True)
            use(copy_run(folder, elsewhere))

        return act

    def link() -> None:
        if not folder.is_symlink():
            kept = folder.with_name("kept")
            folder.rename(kept)
            folder.symlink_to(kept)

    served = ServedRuns([folder.parent], folder.parent / "state")
    return {
        "open a copy": copy_and(sifu.open_run),
        "verify a copy": copy_and(verify_run),
        "write to a copy": copy_and(lambda copy: sifu.open_run(copy).request(["client-000"])),
        "watch in the console": lambda: [run.progress() for run in served.every_run().values()],
        "list what waits": lambda: pending_requests(folder.parent),
        "a link in its place": link,
    }


@pytest.mark.parametrize("seed", range(8))
def test_no_use_of_a_forged_folder_makes_it_pass_in_its_place(
    used: Path, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    sign_again(used, run=f"{seed:016x}")
    ways = ways_to_launder(used, tmp_path / "elsewhere" / "copy")
    for name in draw.sample(sorted(ways), 3):
        with suppress(RunDamagedError):
            ways[name]()
        with pytest.raises(RunDamagedError, match="held run"):
            RunWriter.open(used)
        assert any(problem.startswith("heads: ") for problem in verify_run(used).problems), name
    monkeypatch.setenv(NEW_RUN, "1")  # control
    RunWriter.open(used).close()


def test_reading_remembers_nothing(own_trained: Path, heads: Path, tmp_path: Path, cli: Command) -> None:
    for name in ("watch in the console", "list what waits"):
        ways_to_launder(own_trained, tmp_path / "unused")[name]()
    for command in ("status", "report"):
        assert cli(command, own_trained).code == 0
    assert cli("plan", own_trained, "--clients", "client-000").code == 0
    assert cli("requests", own_trained).code == 0
    assert not heads.exists()
    assert verify_run(own_trained).problems == []
    assert heads.exists()
