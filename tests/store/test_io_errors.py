"""Failing disks in the middle of a command: one clear line, nothing lost, and the same command continues later."""

from __future__ import annotations

import errno
import io
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from run_tools import Command, query
from sifu.api import verify_run
from sifu.store import database
from sifu.store import database as connection


def io_error(*arguments: Any, **named: Any) -> Any:
    """Raise the error of a failing disk."""
    raise OSError(errno.EIO, os.strerror(errno.EIO))


class FailingStream(io.FileIO):
    """File that opens but cannot be read or written."""

    def readall(self) -> bytes:
        return io_error()  # type: ignore[no-any-return]

    def write(self, content: Any) -> int:
        return io_error()  # type: ignore[no-any-return]


@contextmanager
def failing_disk(monkeypatch: pytest.MonkeyPatch, how: str, at: int) -> Iterator[list[int]]:
    """Make one kind of access fail from its n-th call on; yield the calls that failed."""
    calls, failed = [0], []

    def fails() -> bool:
        calls[0] += 1
        if calls[0] >= at:
            failed.append(calls[0])
        return calls[0] >= at

    def counted(real: Any) -> Any:
        return lambda *arguments, **named: (io_error if fails() else real)(*arguments, **named)

    class FailingConnection(sqlite3.Connection):
        def execute(self, sql: str, *values: Any) -> Any:
            reading = sql.lstrip().upper().startswith(("SELECT", "PRAGMA"))
            if ((how == "sql read") == reading) and "ROLLBACK" not in sql and fails():
                raise sqlite3.OperationalError("disk I/O error")
            return super().execute(sql, *values)

    with monkeypatch.context() as patch:
        if how in ("fsync", "replace", "unlink"):
            patch.setattr(os, how, counted(getattr(os, how)))
        elif how == "write":
            real = os.fdopen

            def opened(descriptor: int, mode: str = "r", *rest: Any) -> Any:
                return FailingStream(descriptor, "w") if "w" in mode and fails() else real(descriptor, mode, *rest)

            patch.setattr(os, "fdopen", opened)
        elif how == "open":
            patch.setattr(os, "open", counted(os.open))
        else:
            connect = sqlite3.connect
            for module in (database, connection):
                patch.setattr(
                    module.sqlite3, "connect", lambda *a, **k: connect(*a, **(k | {"factory": FailingConnection}))
                )
        yield failed


# The crash matrix tries such faults at every point of an executed request.
COMMANDS = {
    "request": ("request", "--clients", "client-001", "--id", "later"),
    "backup": ("backup",),
}
HOW = ("open", "write", "fsync", "replace", "unlink", "sql read", "sql write")


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_disk_that_fails_is_one_line_and_loses_nothing(
    own_trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Command, command: str, how: str
) -> None:
    verb, *options = COMMANDS[command]

    def arguments(attempt: int) -> list[Any]:
        return [verb, own_trained, *([tmp_path / f"{attempt}.zip"] if command == "backup" else []), *options]

    rounds = query(own_trained, "SELECT COUNT(*) FROM participation")
    for at in (1, 2, 4, 9):
        with failing_disk(monkeypatch, how, at) as failed:
            answer = cli(*arguments(at))
        if not failed:
            break
        if answer.code == 0:  # it failed after the work was recorded, where nothing depends on it
            break
        assert answer.code in (2, 5), answer.err
        # One line states the error; before it there may be warnings about files that could not be removed.
        assert sum(line.startswith("sifu: ") for line in answer.err.splitlines()) == 1, answer.err
        assert "Traceback" not in answer.err
        assert "unexpected" not in answer.err, answer.err
        assert "Input/output error" in answer.err or "I/O" in answer.err, answer.err
        assert query(own_trained, "SELECT COUNT(*) FROM participation")[0] >= rounds[0]
    if answer.code != 0:
        again = cli(*arguments(10))
        assert again.code == 0, again.err
    result = verify_run(own_trained)
    assert result.problems == []
    assert not list(tmp_path.rglob(".tmp-*"))


def test_a_model_that_cannot_be_read_is_named_and_kept(
    own_trained: Path, monkeypatch: pytest.MonkeyPatch, cli: Command
) -> None:
    """A file whose read fails with EIO is not reported as missing, and nothing is deleted."""
    names = sorted(path.name for path in (own_trained / "models").iterdir())
    real = os.open

    def opened(path: Any, *arguments: Any, **named: Any) -> int:
        if str(path).endswith(".safetensors"):
            io_error()
        return real(path, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", opened)
        answer = cli("verify", own_trained)
        assert answer.code == 3
        assert "Input/output error" in answer.err
        assert cli("forget", own_trained, "--clients", "client-000", "--sigma", "1000").code == 5
    assert sorted(path.name for path in (own_trained / "models").iterdir()) == names
    assert verify_run(own_trained).problems == []
