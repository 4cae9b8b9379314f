"""Runs that an earlier version wrote are read as they are, and brought up to date by the first writer."""

from __future__ import annotations

import sqlite3
import zipfile
from pathlib import Path

import pytest

import sifu
from independent_verifier import verify
from run_tools import copy_run, files_of
from sifu.api import verify_run
from sifu.errors import InputError, RunDamagedError
from sifu.store.writer import RunWriter

OLDER = Path(__file__).with_name("older") / "schema-2-run.zip"
"""Written by the last version with schema 2: four requests carried out (one joint, one strict), one that waits."""


@pytest.fixture
def older_run(tmp_path: Path) -> Path:
    with zipfile.ZipFile(OLDER) as archive:
        archive.extractall(tmp_path)
    return tmp_path / "run"


def version(folder: Path) -> int:
    connection = sqlite3.connect(folder / "run.db")
    try:
        return int(connection.execute("PRAGMA user_version").fetchone()[0])
    finally:
        connection.close()


def test_reading_an_older_run_changes_nothing(older_run: Path) -> None:
    before = (older_run / "run.db").read_bytes()
    run = sifu.open_run(older_run)
    assert run.verify().problems == []
    assert verify(older_run) == []
    waiting = run.status()["requests"][-1]
    assert waiting["status"] == "received"
    assert waiting["deadline"][:10] > waiting["received"][:10]
    assert run.plan(["client-008"], sigma=1.0).level == "proven"
    assert (older_run / "run.db").read_bytes() == before
    assert version(older_run) == 2


def test_the_first_writer_brings_it_up_to_date(older_run: Path) -> None:
    run = sifu.open_run(older_run)
    head = run.anchor()
    run.forget()
    run.forget(["client-009"], "after", sigma=0.5, retention="strict")
    run.purge()
    assert version(older_run) == 3
    assert verify_run(older_run, anchor=head).problems == []
    assert verify(older_run) == []
    kinds = [event.kind for event in run.reader().events()]
    assert kinds.count("migrated") == 1


def test_a_migration_cut_short_never_happened(older_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files_of(older_run)

    def broken(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(RunWriter, "_record", broken)
        with pytest.raises(InputError, match="no space left"):
            sifu.open_run(older_run).request(["client-009"], "later")
    assert version(older_run) == 2
    assert files_of(older_run) == before
    assert verify_run(older_run).problems == []
    sifu.open_run(older_run).request(["client-009"], "later")
    assert version(older_run) == 3
    assert verify_run(older_run).problems == []


def test_a_changed_older_run_is_noticed(older_run: Path) -> None:
    connection = sqlite3.connect(older_run / "run.db")
    connection.execute("UPDATE requests SET epsilon = 1.0 WHERE request = 'strictly'")
    connection.commit()
    connection.close()
    assert any("epsilon" in one for one in verify_run(older_run).problems)
    assert verify(older_run) != []


def test_a_new_run_cannot_pass_for_an_older_one(run_with_requests: Path, tmp_path: Path) -> None:
    folder = copy_run(run_with_requests, tmp_path / "run")
    connection = sqlite3.connect(folder / "run.db")
    connection.execute("PRAGMA user_version = 2")
    connection.close()
    with pytest.raises(RunDamagedError, match="tables are those of a later one"):
        verify_run(folder)
    assert verify(folder) != []
