"""Killed backups and restores: no copy of the operator's key stays behind."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import sifu
from run_tools import Command
from sifu.api import restore, verify_run
from sifu.store.unfinished import COPYING_FILE, unfinished_restoration
from sifu.store.writer import RunWriter

CALLS = ("open", "fsync", "replace", "rename", "unlink", "mkdir", "rmdir")


class KilledError(BaseException):
    """End of the process: no later call touches the disk, not even cleaning up."""


@contextmanager
def killed_at(number: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Fail every file-system call from number `number` on, as after a kill; yield a counter of the calls."""
    count = 0

    def counted(real: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            if count >= number:
                raise KilledError
            return real(*arguments, **named)

        return call

    with monkeypatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, counted(getattr(os, name)))
        patch.setattr(zipfile.ZipFile, "write", counted(zipfile.ZipFile.write))
        patch.setattr(zipfile.ZipFile, "writestr", counted(zipfile.ZipFile.writestr))
        yield lambda: count


def holding_the_key(place: Path, key: bytes) -> list[str]:
    """Return the files below a folder that contain the private key."""
    return sorted(
        path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file() and key in path.read_bytes()
    )


def steps_of(action: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> int:
    """Count the file-system calls of an action."""
    with killed_at(1 << 30, monkeypatch) as count:
        action()
        return count()


@pytest.mark.long
def test_a_backup_killed_at_every_step_leaves_no_key(
    own_trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    key = (own_trained / "operator.key").read_bytes()
    run = sifu.open_run(own_trained)
    steps = steps_of(lambda: run.backup(elsewhere / "first.zip"), monkeypatch)
    (elsewhere / "first.zip").unlink()
    assert steps > 30
    seen = 0
    for number in range(1, steps + 1, 2):
        backup = elsewhere / f"{number}.zip"
        with killed_at(number, monkeypatch), pytest.raises(KilledError):
            run.backup(backup)
        left = [path for path in elsewhere.glob(".tmp-*") if key in path.read_bytes()]
        if left:
            seen += 1
            # The copy is named before it is deleted ...
            notes = " ".join(verify_run(own_trained).notes)
            assert left[0].name in notes
        # ... by the next writing command, which has nothing to do with backups.
        RunWriter.open(own_trained).close()
        finished = [f"elsewhere/{number}.zip"] if backup.exists() else []
        own = (own_trained / "operator.key").relative_to(tmp_path).as_posix()
        assert holding_the_key(tmp_path, key) == [*finished, own], number
        backup.unlink(missing_ok=True)
        assert not (own_trained / COPYING_FILE).exists()
        assert verify_run(own_trained).leftovers == []
    assert seen >= 2  # control: the search finds copies


@pytest.mark.long
def test_a_restore_killed_at_every_step_leaves_no_key(
    own_trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = (own_trained / "operator.key").read_bytes()
    place, backups = tmp_path / "place", tmp_path / "backups"
    for folder in (place, backups):
        folder.mkdir()
    backup = backups / "b.zip"
    sifu.open_run(own_trained).backup(backup)
    steps = steps_of(lambda: restore(backup, place / "whole"), monkeypatch)
    whole = steps_of(lambda: restore(backup, place / "second"), monkeypatch)
    assert steps == whole
    seen = 0
    for number in range(1, steps + 1, 3):
        target = place / f"back-{number}"
        with killed_at(number, monkeypatch), pytest.raises(KilledError):
            restore(backup, target)
        there = [f"{name}/operator.key" for name in ("second", "whole")]
        seen += len(holding_the_key(place, key)) > len(there)
        # A writer of any neighbouring run deletes it.
        RunWriter.open(place / "whole").close()
        finished = [f"{target.name}/operator.key"] if target.exists() else []
        assert holding_the_key(place, key) == sorted(there + finished), number
        if finished:
            assert verify_run(target).problems == []
            shutil.rmtree(target)
    assert seen >= 3


def test_a_copy_that_a_process_is_at_work_on_stays(own_trained: Path, tmp_path: Path) -> None:
    """A writer disturbs neither a restoration in progress next to its run nor another program's file."""
    sifu.open_run(own_trained).backup(tmp_path / "b.zip")
    (tmp_path / ".tmp-sifu-mine").write_text("mine")
    (tmp_path / ".tmp-other").write_text("mine")
    with unfinished_restoration(tmp_path) as staged:
        RunWriter.open(own_trained).close()
        assert staged.is_dir()
        assert verify_run(own_trained).leftovers == []
    assert not staged.exists()
    assert (tmp_path / ".tmp-sifu-mine").read_text() == (tmp_path / ".tmp-other").read_text() == "mine"


def test_a_stranger_s_note_deletes_nothing(own_trained: Path, tmp_path: Path) -> None:
    """The `copying` file of a stranger's folder can name only unfinished copies."""
    precious = tmp_path / "elsewhere" / ".tmp-precious"
    precious.parent.mkdir()
    precious.write_text("mine")
    for text in (str(precious), "relative/.tmp-sifu-backup-0123456789abcdef", "", "\0", "/"):
        (own_trained / COPYING_FILE).write_text(text)
        RunWriter.open(own_trained).close()
        assert precious.read_text() == "mine"
        assert not (own_trained / COPYING_FILE).exists()


def test_a_copy_out_of_reach_is_named_until_it_is_gone(own_trained: Path, tmp_path: Path, cli: Command) -> None:
    """If the disk of an interrupted backup is not mounted, verify and purge report the copy, and its note stays."""
    path = tmp_path / "disk" / ".tmp-sifu-backup-0123456789abcdef"
    (own_trained / COPYING_FILE).write_text(f"{path}\n")
    sifu.open_run(own_trained).forget(["client-000"], sigma=0.5)
    assert any(str(path) in note for note in verify_run(own_trained).notes)
    purged = cli("purge", own_trained, "--format", "json").json
    assert any(str(path) in what for what, _ in purged["remains"])
    path.parent.mkdir()
    path.write_bytes(b"an old copy")
    assert cli("purge", own_trained, "--format", "json").json["copies"] == [str(path)]
    assert not path.exists()
    assert not (own_trained / COPYING_FILE).exists()


def test_a_key_that_was_being_written_is_taken_away(own_trained: Path) -> None:
    """A key left by a rotation that was killed while writing it is deleted."""
    (own_trained / ".tmp-operator.key.new-00").write_text("half a key")
    RunWriter.open(own_trained).close()
    assert list(own_trained.glob(".tmp-*")) == []
