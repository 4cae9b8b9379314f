"""Commands that write check the ledger and the tables first, and do nothing on a changed run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import sifu
from forged_runs import add_event, execute
from run_tools import query
from sifu.errors import RunDamagedError
from sifu.requests.client_list import ask_for_change
from sifu.store.inbox import post
from sifu.store.writer import RunWriter

CHANGED: dict[str, Callable[[Path], None]] = {
    "a term of a request that waits": lambda f: execute(
        f, "UPDATE requests SET terms = json_set(terms, '$.epsilon', 50) WHERE request = 'waits'"
    ),
    "whose request it is": lambda f: execute(
        f, "UPDATE requests SET terms = json_set(terms, '$.clients[0]', 'client-006') WHERE status = 'done'"
    ),
    "a subject that is gone": lambda f: execute(f, "DELETE FROM subjects WHERE subject = 1"),
    "the operator's key": lambda f: execute(f, f"UPDATE run SET value = '{'ab' * 32}' WHERE key = 'public_key'"),
    "the content of an event": lambda f: execute(f, "UPDATE events SET payload = payload || ' ' WHERE seq = 3"),
    "the time of an event": lambda f: execute(f, "UPDATE events SET time = '2020-01-01T00:00:00Z' WHERE seq = 4"),
    "an event taken out": lambda f: execute(f, "DELETE FROM events WHERE seq = 5"),
    "an event of no kind": lambda f: add_event(f, "note", {"run": {"phase": "ready"}}),
    "a trigger": lambda f: execute(
        f, "CREATE TRIGGER later AFTER INSERT ON events BEGIN UPDATE requests SET status = 'withdrawn'; END"
    ),
}
"""Changes by a person who can write to the folder; each connection is closed and checkpointed."""

WRITERS: dict[str, Callable[[Path], object]] = {
    "request": lambda f: sifu.open_run(f).request(["client-007"], "new"),
    "decide": lambda f: sifu.open_run(f).decide("waits", "refused", "not them"),
    "rotate_key": lambda f: sifu.open_run(f).rotate_key(),
    "forget": lambda f: sifu.open_run(f).forget(["client-007"], sigma=0.1),
    "purge": lambda f: sifu.open_run(f).purge(),
    "backup": lambda f: sifu.open_run(f).backup(f.with_name("kept.backup")),
    "train": lambda f: sifu.open_run(f).train(),
    "clients": lambda f: ask_for_change(f, {"do": "block", "name": "client-007"}),
}


def content_of(folder: Path) -> dict[str, bytes]:
    """Return every byte of the folder and of its neighbours, without the lock and SQLite's two log files."""
    passing = ("lock", "run.db-wal", "run.db-shm")
    paths = [path for path in folder.parent.rglob("*") if path.is_file() and path.name not in passing]
    return {str(path.relative_to(folder.parent)): path.read_bytes() for path in paths}


def leave_things_to_clear_away(folder: Path) -> None:
    """Leave files that opening a run for writing deletes, ingests or restores; a refusal must not touch them."""
    (folder / "models" / "900.safetensors").write_bytes(b"of a write that was cut short")
    (folder / "certificates" / "strictly.public.json").unlink()
    (folder / "operator.key.new-00").write_bytes(b"of a rotation that was cut short")
    post(folder, "clients", "c-1", {"do": "block", "name": "client-008"})


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("change", CHANGED)
def test_a_run_that_was_changed_takes_nothing(own_run: Path, change: str, writer: str) -> None:
    leave_things_to_clear_away(own_run)
    CHANGED[change](own_run)
    before = content_of(own_run)
    with pytest.raises(RunDamagedError, match=r"(nothing was done|Nothing was changed).*(sifu verify|run\.db)"):
        WRITERS[writer](own_run)
    assert content_of(own_run) == before


@pytest.mark.parametrize("writer", ["request", "decide", "rotate_key", "forget", "purge", "backup"])
def test_the_same_run_unchanged_takes_them(own_run: Path, writer: str) -> None:
    """Control: the same writers succeed on an unchanged run."""
    leave_things_to_clear_away(own_run)
    before = len(query(own_run, "SELECT seq FROM events"))
    WRITERS[writer](own_run)
    assert len(query(own_run, "SELECT seq FROM events")) > before
    assert sifu.open_run(own_run).verify().problems == []


@pytest.mark.parametrize("writer", ["forget", "purge", "backup"])
@pytest.mark.parametrize(
    "change",
    [
        "UPDATE participation SET drift = drift * 0.5 WHERE node = 3",
        "UPDATE nodes SET mean_shift = 0.0 WHERE node = 3",
        "UPDATE clients SET samples = 1 WHERE client = 7",
    ],
)
def test_who_builds_on_rounds_checks_them_too(own_run: Path, writer: str, change: str) -> None:
    """Writers that build on rounds also check the rounds, and a refused one ingests no inbox message."""
    RunWriter.open(own_run).close()
    post(own_run, "clients", "c-1", {"do": "block", "name": "client-008"})
    execute(own_run, change)
    before = content_of(own_run)
    with pytest.raises(RunDamagedError, match="nothing was done"):
        WRITERS[writer](own_run)
    assert content_of(own_run) == before


def test_a_client_that_signed_is_not_told_that_its_request_waits(own_run: Path) -> None:
    """A refused run keeps no message of a client, so the client is not told that its request waits."""
    execute(own_run, "UPDATE requests SET terms = json_set(terms, '$.epsilon', 50) WHERE request = 'waits'")
    before = content_of(own_run)
    statement = {"body": {"do": "forget me", "run": "00", "client": "client-007", "request": "mine"}}
    with pytest.raises(RunDamagedError, match="nothing was done"):
        sifu.open_run(own_run).request_signed(statement)
    assert content_of(own_run) == before
