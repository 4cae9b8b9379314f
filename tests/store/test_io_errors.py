"""Disks that fail to read or are full: one clear line, nothing lost, and the same command continues later.

`test_crash.py` tries failing writes at every call of a command.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from run_tools import Answer, Command, state
from sifu.api import verify_run
from sifu.store import database, files


def io_error(*arguments: Any, **named: Any) -> Any:
    """Raise the error of a failing disk."""
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def check_one_line(answer: Answer) -> None:
    """Check that one line states the error; before it there may be warnings about files that could not be removed."""
    assert answer.code in (2, 5), answer.err
    assert sum(line.startswith("sifu: ") for line in answer.err.splitlines()) == 1, answer.err
    assert "Traceback" not in answer.err
    assert "unexpected" not in answer.err


@pytest.mark.parametrize("how", ["open", "sql read"])
@pytest.mark.parametrize("command", ["request", "backup"])
def test_a_disk_that_cannot_be_read_is_one_line_and_loses_nothing(
    own_trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Command, command: str, how: str
) -> None:
    calls, at = 0, 0

    def fails() -> bool:
        nonlocal calls
        calls += 1
        return calls >= at

    class FailingConnection(sqlite3.Connection):
        def execute(self, sql: str, *values: Any) -> Any:
            if sql.lstrip().upper().startswith(("SELECT", "PRAGMA")) and fails():
                raise sqlite3.OperationalError("disk I/O error")
            return super().execute(sql, *values)

    def arguments(attempt: int) -> list[Any]:
        more = [tmp_path / f"{attempt}.zip"] if command == "backup" else ["--clients", "client-001", "--id", "later"]
        return [command, own_trained, *more]

    opened, connect = os.open, sqlite3.connect
    for at in (1, 2, 4, 9):
        calls = 0
        with monkeypatch.context() as patch:
            if how == "open":
                patch.setattr(os, "open", lambda *a, **k: (io_error if fails() else opened)(*a, **k))
            else:
                patch.setattr(
                    database.sqlite3, "connect", lambda *a, **k: connect(*a, **(k | {"factory": FailingConnection}))
                )
            answer = cli(*arguments(at))
        if calls < at or answer.code == 0:  # it failed after the work was recorded, where nothing depends on it
            break
        check_one_line(answer)
    if answer.code != 0:
        assert cli(*arguments(10)).code == 0
    assert verify_run(own_trained).problems == []
    assert not list(tmp_path.rglob(".tmp-*"))


def test_a_model_that_cannot_be_read_is_named_and_kept(
    own_trained: Path, monkeypatch: pytest.MonkeyPatch, cli: Command
) -> None:
    """A file whose read fails with EIO is not reported as missing, and nothing is deleted."""
    names = sorted(path.name for path in (own_trained / "models").iterdir())
    opened = os.open
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", lambda path, *a, **k: (
            io_error if str(path).endswith(".safetensors") else opened)(path, *a, **k))  # fmt: skip
        answer = cli("verify", own_trained)
        assert answer.code == 3
        assert "Input/output error" in answer.err
        assert cli("forget", own_trained, "--clients", "client-000", "--sigma", "1000").code == 5
    assert sorted(path.name for path in (own_trained / "models").iterdir()) == names
    assert verify_run(own_trained).problems == []


def test_an_export_to_a_full_disk_leaves_the_old_file(
    monkeypatch: pytest.MonkeyPatch, own_run: Path, tmp_path: Path, cli: Command
) -> None:
    target = tmp_path / "model.safetensors"
    target.write_bytes(b"the old one")
    before = state(own_run)
    with monkeypatch.context() as full:
        full.setattr(files.os, "fsync", io_error)
        check_one_line(cli("export", own_run, "--model", target))
    assert target.read_bytes() == b"the old one"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert state(own_run) == before
