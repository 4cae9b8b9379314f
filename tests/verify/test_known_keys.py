"""Operator's keys remembered outside the run: a folder that was signed again as a whole stops every command."""

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
from forged_runs import add_event, sign_again
from run_tools import Command, copy_run, query, small_spec, state
from sifu.api import verify_certificate, verify_run
from sifu.api.operator_key import accept_key
from sifu.console.live import LiveView
from sifu.console.service import ConsoleService
from sifu.errors import RunDamagedError
from sifu.store import keys, witnesses
from sifu.store.checkpoints import checkpoint_body, latest_checkpoint
from sifu.store.files import certificate_path
from sifu.store.reader import RunReader
from sifu.store.writer import RunWriter


@pytest.fixture
def used(own_trained: Path) -> Path:
    """Return a run that was used before on this machine."""
    assert verify_run(own_trained).problems == []
    return own_trained


COMMANDS = (
    ("status",),
    ("plan", "--clients", "client-000"),
    ("forget", "--clients", "client-000"),
    ("request", "--clients", "client-000"),
    ("requests", "list"),
    ("key", "show"),
    ("clients", "list"),
    ("report",),
    ("purge",),
)


@pytest.mark.parametrize("run", [None, "0123456789abcdef"])
def test_a_folder_that_was_signed_again_stops_every_command(used: Path, run: str | None, cli: Command) -> None:
    public = sign_again(used, run=run)
    answer = cli("verify", used)
    assert answer.code == 3
    assert "key: " in answer.err
    before = state(used)
    for command, *options in COMMANDS:
        parts = [command, options.pop(0)] if command in ("requests", "key", "clients") else [command]
        answer = cli(*parts, used, *options)
        assert answer.code == 5, (parts, answer.out)
        assert "key: " in answer.err
        assert "sifu key accept" in " ".join(answer.err.split())
    assert state(used) == before
    # Negative control: a user who accepts the new key deliberately may continue.
    assert cli("key", "accept", used, "00" * 32).code == 2
    assert cli("key", "accept", used, public).code == 0
    assert verify_run(used).problems == []
    assert cli("status", used).code == 0


def test_without_a_first_use_nothing_is_known(own_trained: Path) -> None:
    """Control: without a remembered key the forged folder verifies."""
    sign_again(own_trained)
    assert verify_run(own_trained).problems == []


def test_copies_moves_and_a_new_run_in_the_same_place_are_no_alarm(tmp_path: Path, cli: Command) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"
    first = sifu.train(small_spec(), run=folder)
    copied = sifu.open_run(copy_run(folder, tmp_path / "copied"))
    copied.request(["client-000"], "mine")
    folder.rename(tmp_path / "moved")
    assert cli("status", tmp_path / "moved").code == 0
    sifu.train(small_spec(seed=7), run=folder)  # a new run in the folder of the first
    assert verify_run(folder).problems == []
    assert cli("backup", folder, tmp_path / "b.zip").code == 0
    shutil.rmtree(folder)
    assert cli("restore", tmp_path / "b.zip", folder).code == 0
    sifu.train(small_spec(seed=8), run=other)
    shutil.rmtree(folder)
    other.rename(folder)  # a run known under another folder does not replace the one that was here
    assert cli("status", folder).code == 5
    shutil.rmtree(tmp_path / "moved")
    assert "held run" in cli("restore", tmp_path / "b.zip", tmp_path / "moved").err  # the first run was in that folder
    assert cli("key", "accept", folder, RunReader(folder).value("public_key")).code == 0
    assert verify_run(folder).problems == []
    assert first.folder == folder


def test_a_signed_rotation_is_followed_and_an_invented_one_is_not(used: Path, tmp_path: Path, cli: Command) -> None:
    older = copy_run(used, tmp_path / "older")
    sifu.open_run(used).rotate_key()
    assert verify_run(used).problems == []
    # An older state, signed with the replaced key, which may have been stolen.
    (problem,) = verify_run(older).problems
    assert problem.startswith("key: ")
    assert cli("request", older, "--clients", "client-000").code == 5
    # A stranger's ledger that claims a rotation to the operator's key, without the operator's signature.
    genuine = (used / keys.KEY_FILE).read_bytes()
    operator = sifu.open_run(used).keys().public_keys[-1].key
    forged = copy_run(older, tmp_path / "forged")
    stranger = sign_again(forged)
    add_event(
        forged,
        "key rotated",
        {
            "run": {"public_key": operator},
            "old_key": stranger,
            "signature_by_old": "00" * 64,
            "signature_by_new": "00" * 64,
        },
    )
    (forged / keys.KEY_FILE).write_bytes(genuine)
    assert cli("forget", forged, "--clients", "client-000").code == 5


def test_a_certificate_of_a_known_run_must_be_signed_with_its_key(run_with_requests: Path, tmp_path: Path) -> None:
    path = tmp_path / "certificate.json"
    certificate = json.loads(certificate_path(run_with_requests, "strictly", "public").read_bytes())
    keys.create_key(tmp_path)
    stranger = keys.public_hex(keys.read_key(tmp_path / keys.KEY_FILE))
    ledger = certificate["body"]["ledger"]
    head = checkpoint_body(certificate["body"]["run"], ledger["seq"], ledger["head"], ledger["time"])
    ledger["signature"] = keys.sign(tmp_path, head, stranger)["signature"]
    path.write_text(json.dumps(keys.sign(tmp_path, certificate["body"], stranger)))
    assert verify_certificate(path).problems == []
    sifu.open_run(run_with_requests)
    (problem,) = verify_certificate(path).problems
    assert problem.startswith("key: ")
    assert verify_certificate(certificate_path(run_with_requests, "strictly", "public")).problems == []


def test_a_plain_key_where_an_encrypted_one_was_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Command
) -> None:
    monkeypatch.setenv(keys.PASSPHRASE, "open sesame")
    run = sifu.train(small_spec(), run=tmp_path / "run")
    key = keys.read_key(run.folder / keys.KEY_FILE)
    monkeypatch.delenv(keys.PASSPHRASE)
    keys.write_key(run.folder / keys.KEY_FILE, key)  # the same key without its passphrase
    assert any(problem.startswith("key: operator.key") for problem in verify_run(run.folder).problems)
    assert cli("forget", run.folder, "--clients", "client-000").code == 5
    assert cli("key", "accept", run.folder, keys.public_hex(key)).code == 0
    assert verify_run(run.folder).problems == []


def test_a_new_key_is_encrypted_where_the_old_one_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(keys.PASSPHRASE, "open sesame")
    run = sifu.train(small_spec(), run=tmp_path / "run")
    monkeypatch.delenv(keys.PASSPHRASE)
    monkeypatch.setattr(keys, "_typed", [b"open sesame"])  # as typed on a terminal
    run.rotate_key()
    assert keys.is_encrypted(run.folder)
    assert run.verify().problems == []


def test_a_file_of_known_keys_that_cannot_be_used_is_a_sentence(
    used: Path, known_keys: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cli: Command
) -> None:
    known_keys.write_text("nothing\n")
    answer = cli("status", used)
    assert answer.code == 2
    assert "line 1" in answer.err
    monkeypatch.setenv("SIFU_KNOWN_KEYS", str(used / "run.db" / "nowhere"))  # as in a read-only home directory
    with caplog.at_level(logging.WARNING):
        assert verify_run(used).problems == []
    assert "cannot be remembered" in caplog.text
    elsewhere = known_keys.with_name("elsewhere")
    assert cli("--known-keys", elsewhere, "status", used).code == 0
    assert query(used, "SELECT value FROM run WHERE key = 'run'")[0][0] in elsewhere.read_text()


@pytest.mark.parametrize("left", [0.0, 0.4, 1.0])
def test_an_interrupted_append_to_the_known_keys_stops_nothing(
    used: Path, known_keys: Path, left: float, tmp_path: Path, cli: Command
) -> None:
    """An append that was cut off anywhere loses at most its own entry, and the next append repairs the file."""
    other = sifu.train(small_spec(seed=9), run=tmp_path / "other").folder
    *before, last = known_keys.read_text().splitlines(keepends=True)
    assert str(other) in last
    cut = 1 + round(left * (len(last) - 2))  # at least a byte is written, and the end of the line is missing
    known_keys.write_text("".join(before) + last[:cut])
    assert cli("verify", used).code == 0
    assert cli("status", other).code == 0
    lines = known_keys.read_text().splitlines()
    assert [json.loads(line)["folder"] for line in lines].count(str(other)) == 1
    known_keys.write_text("".join(before) + last[:cut] + "\n" + last)  # no interrupted append leaves this
    if left < 1.0:
        answer = cli("status", used)
        assert answer.code == 2
        assert "does not contain a run's key" in answer.err


def test_an_incomplete_last_line_of_a_witness_is_skipped(own_trained: Path, tmp_path: Path, cli: Command) -> None:
    with RunReader(own_trained) as reader:
        checkpoint = latest_checkpoint(reader)
    assert checkpoint is not None
    line = json.dumps(checkpoint.to_mapping()) + "\n"
    kept = tmp_path / "kept.jsonl"
    kept.write_text(line + line[:40])
    assert cli("verify", own_trained, "--witness", kept).code == 0
    kept.write_text(line[:40] + "\n" + line)
    assert cli("verify", own_trained, "--witness", kept).code == 2


def test_a_witness_is_read_before_anything_is_added(
    own_trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Command
) -> None:
    kept = tmp_path / "kept.jsonl"
    monkeypatch.setenv(witnesses.WITNESSES, f"file:{kept}")
    older, other = copy_run(own_trained, tmp_path / "older"), copy_run(own_trained, tmp_path / "other")
    sifu.open_run(own_trained).request(["client-000"], "mine")
    content = kept.read_bytes()
    answer = cli("forget", older, "--clients", "client-001")
    assert answer.code == 5
    assert "an older state was put back" in " ".join(answer.err.split())
    # The other copy continued differently, without notifying the witness.
    monkeypatch.delenv(witnesses.WITNESSES)
    sifu.open_run(other).request(["client-002"], "theirs")
    sifu.open_run(other).request(["client-003"], "theirs-too")
    monkeypatch.setenv(witnesses.WITNESSES, f"file:{kept}")
    with pytest.raises(RunDamagedError, match="fork: "):
        sifu.open_run(other).request(["client-004"], "more")
    assert kept.read_bytes() == content
    # Another run may use the same file, and a truncated line after a kill is accepted.
    kept.write_bytes(content + content[:40])
    sifu.train(small_spec(), run=tmp_path / "another")
    sifu.open_run(own_trained).request(["client-005"], "goes-on")


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

    return {
        "open a copy": copy_and(sifu.open_run),
        "verify a copy": copy_and(verify_run),
        "write to a copy": copy_and(lambda copy: sifu.open_run(copy).request(["client-000"])),
        "list in the console": lambda: ConsoleService([folder.parent], folder.parent / "state").every_run(),
        "watch in the console": lambda: LiveView(folder).read(),
        "list what waits": lambda: sifu.pending_requests(folder.parent),
        "a link in its place": link,
    }


@pytest.mark.parametrize("seed", range(8))
def test_no_use_of_a_forged_folder_makes_it_pass_in_its_place(used: Path, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    public = sign_again(used, run=f"{seed:016x}")
    ways = ways_to_launder(used, tmp_path / "elsewhere" / "copy")
    for name in draw.sample(sorted(ways), 3):
        with suppress(RunDamagedError):
            ways[name]()
        with pytest.raises(RunDamagedError, match="held run"):
            RunWriter.open(used)
        assert any(problem.startswith("key: ") for problem in verify_run(used).problems), name
    accept_key(used, public)  # control
    RunWriter.open(used).close()


def test_listing_runs_remembers_none(own_trained: Path, known_keys: Path, tmp_path: Path, cli: Command) -> None:
    for name in ("list in the console", "watch in the console", "list what waits"):
        ways_to_launder(own_trained, tmp_path / "unused")[name]()
    assert cli("requests", "list", own_trained).code == 0
    assert not known_keys.exists()
    sifu.open_run(own_trained)
    assert known_keys.exists()


def test_a_witness_that_knows_only_another_run_stops_writers(
    tmp_path: Path, known_keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, folder = tmp_path / "kept.jsonl", tmp_path / "run"
    monkeypatch.setenv(witnesses.WITNESSES, f"file:{kept}")
    sifu.train(small_spec(), run=folder)
    sign_again(folder, run="0123456789abcdef")
    known_keys.unlink()  # another person, who has the witness's file
    with pytest.raises(RunDamagedError, match="does not know run 0123456789abcdef"):
        RunWriter.open(folder)
    # A run from before the witness was configured may join the runs known here, in another folder.
    monkeypatch.delenv(witnesses.WITNESSES)
    earlier = sifu.train(small_spec(), run=tmp_path / "earlier")
    monkeypatch.setenv(witnesses.WITNESSES, f"file:{tmp_path / 'shared.jsonl'}")
    sifu.train(small_spec(), run=tmp_path / "first")
    earlier.request(["client-000"], "mine")
