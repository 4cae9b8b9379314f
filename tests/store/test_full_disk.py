"""Full disks: a clear message, the last good state, and the same command continues later."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sifu
from run_tools import Command, dump, small_spec, state
from sifu.errors import SifuError
from sifu.run import training
from sifu.store import database, files, writer
from sifu.store import database as connection
from sifu.store.projection import NewRows, insert_rows


class FullDisk:
    """Replacement of os.fsync that reports a full disk from its n-th call on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails_from: int, code: int = errno.ENOSPC) -> None:
        self.calls, self.fails_from, self.code = 0, fails_from, code
        self._fsync = os.fsync
        monkeypatch.setattr(files.os, "fsync", self)

    def __call__(self, descriptor: int) -> None:
        self.calls += 1
        if self.calls >= self.fails_from:
            raise OSError(self.code, os.strerror(self.code))
        self._fsync(descriptor)


SPEC = small_spec(keep={"models": 4})


def no_temporary_files(folder: Path) -> bool:
    return not list(folder.rglob(".tmp-*"))


@pytest.mark.parametrize("fails_from", [1, 2, 3, 4, 5, 8, 12, 20])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_while_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails_from: int, code: int
) -> None:
    monkeypatch.setattr(training, "COMMIT_SECONDS", 0.0)
    folder = tmp_path / "run"
    with monkeypatch.context() as full:
        disk = FullDisk(full, fails_from, code)
        with pytest.raises(SifuError, match="no space left") as caught:
            sifu.train(SPEC, run=folder)
        assert caught.value.exit_code == 2
        assert disk.calls >= fails_from
    assert no_temporary_files(folder)
    run = sifu.train(SPEC, run=folder)
    assert run.verify().problems == []
    assert len(run.reader().path()) == 9


@pytest.mark.parametrize("fails_from", [1, 2, 3, 5, 9])
def test_a_disk_that_fills_up_while_forgetting(
    monkeypatch: pytest.MonkeyPatch, own_trained: Path, cli: Command, fails_from: int
) -> None:
    monkeypatch.setattr(training, "COMMIT_SECONDS", 0.0)
    with monkeypatch.context() as full:
        FullDisk(full, fails_from)
        answer = cli("forget", own_trained, "--clients", "client-003", "--sigma", "0.1", "--request", "mine")
        assert answer.code == 2, answer.err
        assert "no space left" in answer.err
        assert "Traceback" not in answer.err
    assert no_temporary_files(own_trained)
    answer = cli("forget", own_trained, "--clients", "client-003", "--sigma", "0.1", "--request", "mine")
    assert answer.code == 0, answer.err
    assert sifu.open_run(own_trained).verify().problems == []


def limit_pages(monkeypatch: pytest.MonkeyPatch, extra: int) -> None:
    """Limit the growth of databases to `extra` pages."""
    opened: Callable[[Path], sqlite3.Connection] = database.open_database

    def limited(folder: Path) -> sqlite3.Connection:
        database = opened(folder)
        pages = database.execute("PRAGMA page_count").fetchone()[0]
        database.execute(f"PRAGMA max_page_count = {pages + extra}")
        return database

    monkeypatch.setattr(connection, "open_database", limited)
    monkeypatch.setattr(writer, "open_database", limited)


@pytest.mark.parametrize("extra", [0, 2, 4])
def test_a_database_that_cannot_grow(
    monkeypatch: pytest.MonkeyPatch, own_trained: Path, cli: Command, extra: int
) -> None:
    with monkeypatch.context() as full:
        limit_pages(full, extra)
        codes = []
        for k in range(8):
            answer = cli("forget", own_trained, "--clients", f"client-{k:03d}", "--sigma", "0.1")
            codes.append(answer.code)
            if answer.code:
                break
        assert codes[-1] == 2, codes
        assert "no space left" in answer.err
        assert "Traceback" not in answer.err
    answer = cli("forget", own_trained)
    assert answer.code == 0, answer.err
    assert sifu.open_run(own_trained).verify().problems == []


def test_what_a_failed_write_left_behind_is_no_tampering(
    monkeypatch: pytest.MonkeyPatch, own_trained: Path, cli: Command
) -> None:
    """Model files are written before the transaction that names them; an unnamed one is not taken for a restored erased
    model.
    """

    def full(connection: sqlite3.Connection, rows: NewRows) -> None:
        insert_rows(connection, rows)
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as broken:
        broken.setattr(writer, "insert_rows", full)
        answer = cli("forget", own_trained, "--clients", "client-003", "--sigma", "0.1")
    assert answer.code == 2
    assert "nothing was lost" in answer.err
    assert sifu.open_run(own_trained).verify().problems == []


def test_an_export_to_a_full_disk_leaves_the_old_file(
    monkeypatch: pytest.MonkeyPatch, own_run: Path, tmp_path: Path, cli: Command
) -> None:
    target = tmp_path / "model.safetensors"
    target.write_bytes(b"the old one")
    before = state(own_run)
    with monkeypatch.context() as full:
        FullDisk(full, 1)
        answer = cli("export", own_run, "--model", target)
    assert answer.code == 2
    assert target.read_bytes() == b"the old one"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert state(own_run) == before


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.EACCES])
def test_other_failures_of_the_disk_end_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, own_trained: Path, cli: Command, code: int
) -> None:
    before = state(own_trained)
    with monkeypatch.context() as broken:
        FullDisk(broken, 1, code)
        answer: Any = cli("forget", own_trained, "--clients", "client-003", "--sigma", "0.1")
    assert answer.code != 0
    assert "Traceback" not in answer.err
    assert answer.err.startswith("sifu: ")
    # The request itself may be in the ledger already; the history is unchanged.
    for table in ("nodes", "models", "subjects", "charges", "certificates"):
        assert dump(own_trained)[table] == before[0][table]
    assert cli("forget", own_trained).code == 0
