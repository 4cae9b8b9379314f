"""Migration of runs with an earlier schema: by numbered steps, all or none of them, and never by a reader."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest

import sifu
from run_tools import query
from sifu.errors import RunDamagedError
from sifu.store import database as migrations
from sifu.store.database import is_copy_in_memory, schema_problems
from sifu.store.writer import RunWriter

FIRST = Path(__file__).with_name("schema_9.sql")
"""The first supported schema; the file must not change."""


def version(folder: Path) -> int:
    return int(query(folder, "PRAGMA user_version")[0][0])


def next_step(monkeypatch: pytest.MonkeyPatch, step: Callable[[sqlite3.Connection], None]) -> int:
    """Add another migration; return the number of its schema."""
    number = migrations.schema_version() + 1
    monkeypatch.setitem(migrations.MIGRATIONS, number, step)
    return number


def write_nothing(folder: Path) -> None:
    RunWriter.open(folder).close()


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "run.db").read_bytes()).hexdigest()


def test_steps_are_numbered_without_a_gap() -> None:
    numbers = sorted(migrations.MIGRATIONS)
    assert numbers == list(range(migrations.FIRST_SCHEMA + 1, migrations.schema_version() + 1))


def test_the_first_schema_becomes_todays() -> None:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.executescript(FIRST.read_text(encoding="utf-8"))
    connection.execute(f"PRAGMA user_version={migrations.FIRST_SCHEMA}")
    migrations.migrate(connection)
    assert schema_problems(connection) == []
    assert connection.execute("PRAGMA user_version").fetchone() == (migrations.schema_version(),)
    connection.close()


def test_control_a_schema_that_changes_without_a_step_is_noticed() -> None:
    today = files("sifu.store").joinpath("schema.sql").read_text(encoding="utf-8")
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.executescript(today.replace("    noise_std        REAL    NOT NULL,\n", "", 1))
    assert schema_problems(connection) != []
    connection.close()


def test_reading_an_earlier_schema_changes_no_byte_and_writing_migrates_it(
    own_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_nothing(own_run)
    before, tables = digest(own_run), query(own_run, "SELECT * FROM requests")
    number = next_step(monkeypatch, lambda connection: None)
    assert sifu.verify_run(own_run).problems == []
    assert sifu.open_run(own_run).status().clients
    assert (version(own_run), digest(own_run)) == (number - 1, before)
    write_nothing(own_run)
    assert version(own_run) == number
    assert query(own_run, "SELECT * FROM requests") == tables
    assert sifu.verify_run(own_run).problems == []


def test_a_step_that_fails_leaves_the_run_as_it_was(own_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_on_disk(connection: sqlite3.Connection) -> None:
        if not is_copy_in_memory(connection):
            connection.execute("UPDATE requests SET terms = '{}'")
            raise sqlite3.IntegrityError("half way")

    rows = query(own_run, "SELECT * FROM requests")
    number = next_step(monkeypatch, fails_on_disk)
    with pytest.raises(sqlite3.IntegrityError, match="half way"):
        write_nothing(own_run)
    assert (version(own_run), query(own_run, "SELECT * FROM requests")) == (number - 1, rows)


def test_a_step_that_loses_what_the_ledger_says_is_not_carried_out(
    own_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(connection: sqlite3.Connection) -> None:
        connection.execute("DELETE FROM subjects")

    before = digest(own_run)
    number = next_step(monkeypatch, forgetful)
    with pytest.raises(RunDamagedError, match="nothing was done"):
        write_nothing(own_run)
    assert (version(own_run), digest(own_run)) == (number - 1, before)


@pytest.mark.parametrize(("offset", "words"), [(1, "upgrade sifu"), (-1, "open it with the version that made it")])
def test_other_schemas_are_refused_with_a_sentence(own_run: Path, offset: int, words: str) -> None:
    edge = migrations.schema_version() if offset > 0 else migrations.FIRST_SCHEMA
    connection = sqlite3.connect(own_run / "run.db")
    connection.execute(f"PRAGMA user_version={edge + offset}")
    connection.close()
    with pytest.raises(RunDamagedError, match=f"has schema {edge + offset}, .*{words}"):
        write_nothing(own_run)


def test_the_schema_file_names_the_schema_in_force() -> None:
    first_line = files("sifu.store").joinpath("schema.sql").read_text(encoding="utf-8").splitlines()[0]
    assert first_line.startswith(f"-- Schema {migrations.schema_version()} of a run.")
