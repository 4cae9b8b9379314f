"""Links, pipes and folders in place of regular files: named and refused, never followed, never waited for.

Without the defences these tests would hang or write elsewhere, so each has a time limit.
"""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

import runs
import sifu
from run_tools import small_spec
from sifu.api import verify_run
from sifu.errors import InputError, RunDamagedError
from sifu.store.client_accuracy import read_held_out
from sifu.store.files import private_folder, read_plain, write_atomically
from sifu.store.inbox import any_messages
from sifu.store.writer import RunWriter


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    """End the test instead of waiting forever."""

    def too_long(number: int, frame: object) -> None:
        raise TimeoutError("it waits for something that never comes")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def a_pipe(path: Path, victim: Path) -> None:
    os.mkfifo(path)


def a_folder(path: Path, victim: Path) -> None:
    path.mkdir()
    (path / "inside").write_text("x")


def a_link(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def a_link_to_nothing(path: Path, victim: Path) -> None:
    path.symlink_to(victim.parent / "nothing")


def an_endless_link(path: Path, victim: Path) -> None:
    path.symlink_to("/dev/zero")


PLACES = [
    "models/8.safetensors", "models/.tmp-9.safetensors", "models/99.safetensors",
    "certificates/x.json", ".tmp-head", "standing.json", "lock", "scrub", "operator.key", "run.db-wal",
    "report", "inbox",
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_what_is_not_a_regular_file_is_named_and_nothing_is_done(own_trained: Path, tmp_path: Path, place: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("another program's")
    path = own_trained / place
    for make in (a_pipe, a_link, a_link_to_nothing, an_endless_link, a_folder):
        if make is a_folder and place in ("report", "inbox"):
            continue
        kept = path.read_bytes() if path.is_file() else None
        path.unlink(missing_ok=True)
        make(path, victim)
        kind = "folder" if place in ("report", "inbox") else "regular file"
        assert verify_run(own_trained).problems == [f"folder: {place} is not a {kind}, or is a link to one"]
        with pytest.raises(RunDamagedError, match="changed by hand"):
            RunWriter.open(own_trained)
        assert victim.read_text() == "another program's"
        if path.is_dir() and not path.is_symlink():
            (path / "inside").unlink()
            path.rmdir()
        else:
            path.unlink()
        if kept is not None:
            path.write_bytes(kept)
    assert verify_run(own_trained).problems == []


@pytest.mark.parametrize("name", ["models", "statistics", "certificates"])
def test_a_folder_of_ours_is_no_link(own_trained: Path, tmp_path: Path, name: str) -> None:
    """In a linked folder, files with sifu's names would be deleted and certificates written elsewhere."""
    elsewhere = (own_trained / name).rename(tmp_path / "elsewhere")
    (own_trained / name).symlink_to(elsewhere)
    (elsewhere / "123.safetensors").write_text("another program's")
    assert f"folder: {name} is not a folder, or is a link to one" in verify_run(own_trained).problems
    with pytest.raises(RunDamagedError, match="changed by hand"):
        sifu.open_run(own_trained).forget(["client-000"])
    assert (elsewhere / "123.safetensors").exists()


def test_files_that_are_no_messages_are_skipped(own_trained: Path) -> None:
    """A file that is never ingested does not look like a request; otherwise training would stop for it forever."""
    (own_trained / "inbox").mkdir(exist_ok=True)
    (own_trained / "inbox" / "note.json").write_text("{}")
    assert not any_messages(own_trained)


def test_plans_do_not_wait_for_a_pipe(own_trained: Path) -> None:
    (own_trained / "standing.json").unlink()
    os.mkfifo(own_trained / "standing.json")
    assert read_held_out(own_trained, 0) is None
    with pytest.raises(OSError, match="regular file"):
        read_plain(own_trained / "standing.json")


def test_a_file_that_was_there_first_gets_nothing_of_ours(own_trained: Path, tmp_path: Path) -> None:
    """Backups and exports never write into an existing temporary file that another process may hold open."""
    for name in ("b.zip", "b.zip.db", "m.safetensors"):
        (tmp_path / f".tmp-{name}").write_text("mine")
        (tmp_path / f".tmp-{name}").chmod(0o666)
    held = [(tmp_path / f".tmp-{name}").open("rb") for name in ("b.zip", "b.zip.db", "m.safetensors")]
    run = sifu.open_run(own_trained)
    run.backup(tmp_path / "b.zip")
    run.export(tmp_path / "m.safetensors")
    for file in held:
        assert file.read() == b"mine"
        file.close()
    victim = tmp_path / "victim"
    victim.write_text("another program's")
    (tmp_path / ".tmp-c.zip").symlink_to(victim)
    run.backup(tmp_path / "c.zip")
    assert victim.read_text() == "another program's"
    for name in ("b.zip", "c.zip", "m.safetensors"):
        assert stat.S_IMODE((tmp_path / name).lstat().st_mode) == 0o600


@pytest.mark.parametrize("mask", [0o000, 0o177])
def test_files_are_private_under_any_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        run = sifu.train(small_spec(stop={"max_rounds": 3}), run=tmp_path / "run")
        run.forget(["client-000"], sigma=0.1)
        run.backup(tmp_path / "b.zip")
        from sifu.api import restore
        from sifu.report import write_report
        from sifu.store.inbox import post

        write_report(run.folder)
        post(run.folder, "request", "a", {})
        restore(tmp_path / "b.zip", tmp_path / "again")
    finally:
        os.umask(before)
    paths = [tmp_path / "b.zip", *tmp_path.glob("run/**/*"), *tmp_path.glob("again/**/*")]
    assert len(paths) > 30
    wrong = [path for path in paths if stat.S_IMODE(path.lstat().st_mode) != (0o700 if path.is_dir() else 0o600)]
    assert wrong == []


def test_writing_takes_the_place_of_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("another program's")
    for name in ("file", ".tmp-file"):
        (tmp_path / name).symlink_to(victim)
    write_atomically(tmp_path / "file", b"ours")
    assert victim.read_text() == "another program's"
    assert (tmp_path / "file").read_bytes() == b"ours"
    assert not (tmp_path / "file").is_symlink()
    with pytest.raises(FileExistsError):
        private_folder(tmp_path / "file")


def test_a_backup_holds_nothing_from_elsewhere(own_trained: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("another program's")
    (own_trained / "models" / "77.safetensors").symlink_to(secret)
    with pytest.raises((RunDamagedError, InputError)):
        sifu.open_run(own_trained).backup(tmp_path / "b.zip")
    assert not (tmp_path / "b.zip").exists()


def test_hard_links_to_models_are_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = sifu.open_run(runs.own("trained", tmp_path))
    assert not any("hard link" in note for note in verify_run(run.folder).notes)
    for model in sorted((run.folder / "models").iterdir()):
        os.link(model, tmp_path / model.name)
    names = {path.name for path in tmp_path.glob("*.safetensors")}
    noted = [note for note in verify_run(run.folder).notes if "1 hard link to models/" in note]
    assert len(noted) == len(names) > 0
    run.forget(["client-000"], retention="strict", sigma=0.5)
    erased = names - {path.name for path in (run.folder / "models").iterdir()}
    assert erased
    (warning,) = [message for message in caplog.messages if "hard link" in message]
    assert warning.startswith(f"{len(erased)} deleted files, for example {run.folder / 'models' / min(erased)}, ")
