"""Databases that do not belong to their folder or were changed by hand: refused before anything is written."""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path

import pytest

import sifu
from run_tools import Command, dump, files_of, state
from sifu.errors import InputError, RunDamagedError
from sifu.store.writer import RunWriter


def put_back(folder: Path, older: Path) -> None:
    for name in ("run.db", "run.db-wal", "run.db-shm"):
        (folder / name).unlink(missing_ok=True)
    shutil.copy(older, folder / "run.db")


def backup(folder: Path, target: Path) -> Path:
    source, copy = sqlite3.connect(folder / "run.db"), sqlite3.connect(target)
    source.backup(copy)
    source.close()
    copy.close()
    return target


def test_an_older_database_cannot_spend_a_budget_twice(own_trained: Path, heads: Path, tmp_path: Path) -> None:
    """Putting the old database back after a forget, to release twice at full budget, is refused."""
    older = backup(own_trained, tmp_path / "older.db")
    sifu.open_run(own_trained).forget(["client-001"], "first", sigma=1.0)
    put_back(own_trained, older)
    before = files_of(own_trained)
    with pytest.raises(RunDamagedError, match="an older state was put back"):
        sifu.open_run(own_trained).forget(["client-001"], "second", sigma=1.0)
    assert any("an older state was put back" in problem for problem in sifu.verify(own_trained).problems)
    heads.unlink()  # on another account the newer certificates tell
    assert any("is in no record of this run" in problem for problem in sifu.verify(own_trained).problems)
    assert files_of(own_trained).keys() >= before.keys()


def test_the_wrong_database_deletes_no_models(own_trained: Path, heads: Path, tmp_path: Path) -> None:
    older = backup(own_trained, tmp_path / "older.db")
    sifu.open_run(own_trained).forget(["client-001"], "first", sigma=1.0)
    newer = backup(own_trained, tmp_path / "newer.db")
    models = sorted(path.name for path in (own_trained / "models").iterdir())
    put_back(own_trained, older)
    with pytest.raises(RunDamagedError):
        RunWriter.open(own_trained)
    assert sorted(path.name for path in (own_trained / "models").iterdir()) == models
    put_back(own_trained, newer)
    assert sifu.open_run(own_trained).verify().problems == []


def test_a_certificate_of_another_run_is_named(own_run: Path) -> None:
    path = min((own_run / "certificates").glob("*.public.json"))
    shutil.copy(path, own_run / "certificates" / "stranger.public.json")
    assert any("stranger.public.json" in problem for problem in sifu.open_run(own_run).verify().problems)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE participation SET drift = drift * 1e-6",
        "UPDATE clients SET expansion = expansion * 0.5",
        "UPDATE nodes SET rounding = 0.0",
        "DELETE FROM participation WHERE client = 3",
    ],
)
def test_nothing_is_built_on_records_changed_by_hand(own_trained: Path, change: str) -> None:
    """Records changed by hand, such as smaller drifts that would make any noise suffice, are refused."""
    connection = sqlite3.connect(own_trained / "run.db")
    with connection:
        connection.execute(change)
    connection.close()
    before = state(own_trained)
    with pytest.raises((RunDamagedError, InputError)):
        sifu.open_run(own_trained).forget(["client-003"], sigma=1e-4)
    assert state(own_trained) == before


def test_a_folder_that_cannot_be_written_can_be_verified(own_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An auditor's read-only copy can be verified; root may write anywhere, so the system's answer is replaced."""
    connection = sqlite3.connect(own_run / "run.db")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    before = sorted(path.name for path in own_run.iterdir())
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and allowed(path, mode))
    assert sifu.open_run(own_run).verify().problems == []
    assert sorted(path.name for path in own_run.iterdir()) == before


def test_a_missing_key_is_noticed_before_the_work(own_trained: Path) -> None:
    (own_trained / "operator.key").unlink()
    before = dump(own_trained)
    with pytest.raises(RunDamagedError, match=r"operator\.key"):
        sifu.open_run(own_trained).forget(["client-003"], sigma=0.5)
    assert dump(own_trained) == before


@pytest.mark.parametrize("command", ["verify", "train"])
def test_a_run_whose_database_is_gone_is_never_trained_over(
    own_run: Path, tmp_path: Path, cli: Command, command: str
) -> None:
    """The remaining files may be the only copies of certificates and models, so no message advises removing them."""
    (own_run / "run.db").unlink()
    before = files_of(own_run)
    if command == "train":
        assert cli("init", tmp_path / "spec.toml").code == 0
        answer = cli("train", tmp_path / "spec.toml", "--run", own_run)
    else:
        answer = cli("verify", own_run)
    said = " ".join(answer.err.split())
    assert answer.code == 5
    assert "a run whose run.db is missing" in said
    assert "or remove it" not in said
    assert files_of(own_run) == before


@pytest.mark.parametrize("left", ["operator.key", "models", "statistics", "run.db-wal"])
def test_whatever_is_left_of_a_run_is_not_advised_to_be_removed(tmp_path: Path, cli: Command, left: str) -> None:
    """One file that only a run has is enough to protect a folder; the rest may have been lost with the database."""
    folder = tmp_path / "run"
    folder.mkdir()
    if left in ("models", "statistics"):
        (folder / left).mkdir()
        ending = "0.1.statistics" if left == "statistics" else "3.safetensors"
        (folder / left / ending).write_bytes(b"something")
    else:
        (folder / left).write_bytes(b"something")
    before = sorted(path.name for path in folder.rglob("*"))
    assert cli("init", tmp_path / "spec.toml").code == 0
    for arguments in (("train", tmp_path / "spec.toml", "--run", folder), ("status", folder), ("forget", folder)):
        answer = cli(*arguments)
        assert answer.code == 5
        assert "holds a run whose" in " ".join(answer.err.split())
        assert "or remove it" not in answer.err
        assert "Start one" not in answer.err
    assert sorted(path.name for path in folder.rglob("*")) == before
