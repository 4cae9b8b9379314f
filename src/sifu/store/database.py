"""Opening the database of a run: write-ahead log, full sync, and a clear answer when it is not one."""

from __future__ import annotations

import os
import re
import sqlite3
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

from sifu.errors import InputError, NoSpaceError, RunDamagedError

DATABASE = "run.db"
CLIENTS_FILE = "clients.json"
"""The operator's list of clients, written before there is a run; the ledger holds it from then on."""
UNUSABLE = (sqlite3.DatabaseError, UnicodeDecodeError)
"""What comes of a damaged database; the second where SQLite's message quotes names that are no text any more."""
SCHEMA_VERSION = 3
OLDER_SCHEMA = 2
"""Still read as it is, and brought up to date by the first process that writes to the run."""
OLDER_DEADLINE_DAYS = 30
"""The deadline of a request that was received before requests had one."""
APPLICATION_ID = 0x51F0  # marks the file as ours, so that another program's database is refused


def create_database(folder: Path) -> sqlite3.Connection:
    """A new, empty database with the current schema."""
    path = folder / DATABASE
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    connection = sqlite3.connect(path, isolation_level=None)
    schema = files("sifu.store").joinpath("schema.sql").read_text(encoding="utf-8")
    with transaction(connection, None):
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA secure_delete=ON")
        connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        connection.executescript(f"BEGIN IMMEDIATE;\n{schema}\nCOMMIT;")
    return connection


def open_database(folder: Path) -> sqlite3.Connection:
    """The database of an existing run, checked to be one and of a schema this version knows."""
    path = folder / DATABASE
    if not path.is_file():
        if (folder / CLIENTS_FILE).is_file():
            raise InputError(
                f"{folder} has a list of clients and no run yet: flwr run makes it when they are all there"
            )
        raise InputError(
            f"{folder} is not a run folder: it has no {DATABASE}. Start one with: sifu train SPEC.toml --run {folder}"
        )
    try:
        connection = _connect(path)
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
    except UNUSABLE as error:
        raise RunDamagedError(f"{path} is damaged: {error}. Restore the folder from a backup.") from error
    if application != APPLICATION_ID:
        connection.close()
        raise InputError(f"{path} is not a sifu run (application id {application}, expected {APPLICATION_ID})")
    if version == OLDER_SCHEMA:
        _look_like_the_current_schema(connection, folder)
    elif version != SCHEMA_VERSION:
        connection.close()
        raise RunDamagedError(
            f"{folder} has schema {version}, this version of sifu reads schema {SCHEMA_VERSION}: "
            + ("upgrade sifu" if version > SCHEMA_VERSION else "open it with the version that made it, or train again")
        )
    return connection


def _look_like_the_current_schema(connection: sqlite3.Connection, folder: Path) -> None:
    """Temporary views over a run of schema 2, so that it is read like one of schema 3; the file is not touched."""
    try:
        if connection.execute("SELECT 1 FROM main.sqlite_master WHERE name = 'rejections'").fetchone():
            raise RunDamagedError(
                f"{folder} says it has schema {OLDER_SCHEMA}, but its tables are those of a later one"
            )
        connection.execute("PRAGMA temp_store=MEMORY")
        connection.execute(
            "CREATE TEMP TABLE rejections (branch INTEGER, round INTEGER, number INTEGER, client TEXT, reason TEXT, "
            "left_out INTEGER)"
        )
        connection.execute(
            f"CREATE TEMP VIEW requests AS SELECT *, {OLDER_DEADLINE_DAYS} AS deadline_days FROM main.requests"
        )
    except UNUSABLE as error:
        connection.close()
        raise RunDamagedError(f"{folder} is damaged: {error}. Restore the folder from a backup.") from error
    except RunDamagedError:
        connection.close()
        raise


def schema_problems(connection: sqlite3.Connection) -> list[str]:
    """Tables, views, triggers and indices that are not as we make them; of an older run its two other tables."""
    found, wanted = _definitions(connection), _expected_definitions()
    if is_older_schema(connection):
        wanted.pop(("table", "rejections"))
        # Without a deadline; what it holds is compared with the ledger.
        found["table", "requests"] = wanted["table", "requests"]
    return [
        f"{name[:60]!r} is not as sifu makes it, or should not be there"
        for kind, name in sorted(found.keys() | wanted.keys())
        if found.get((kind, name)) != wanted.get((kind, name))
    ]


def _expected_definitions() -> dict[tuple[str, str], list[str]]:
    made = sqlite3.connect(":memory:")
    try:
        made.executescript(files("sifu.store").joinpath("schema.sql").read_text(encoding="utf-8"))
        return _definitions(made)
    finally:
        made.close()


def _definitions(connection: sqlite3.Connection) -> dict[tuple[str, str], list[str]]:
    """What SQLite remembers of each thing in the file, by type and name; its own indices have no text.

    All of it: a trigger may have the name of a table, and one name may be written into the file twice.
    """
    try:
        rows = connection.execute("SELECT name, type, tbl_name, sql FROM main.sqlite_master").fetchall()
    except UNUSABLE as error:
        raise RunDamagedError(f"the run's database cannot be used: {error}") from error
    found: dict[tuple[str, str], list[str]] = {}
    for name, kind, table, sql in rows:
        found.setdefault((str(kind), str(name)), []).append(" ".join(f"{table} {sql}".split()))
    return found


def is_older_schema(connection: sqlite3.Connection) -> bool:
    """Whether the run must be brought up to date before it is written to."""
    return bool(connection.execute("PRAGMA main.user_version").fetchone()[0] == OLDER_SCHEMA)


def migrate(connection: sqlite3.Connection) -> None:
    """Within a transaction: the tables of schema 2 become those of schema 3."""
    schema = files("sifu.store").joinpath("schema.sql").read_text(encoding="utf-8")
    made = {match[1]: match[0] for match in re.finditer(r"CREATE TABLE (\w+) \(.*?;", schema, re.DOTALL)}
    old = [row[1] for row in connection.execute("PRAGMA main.table_info(requests)")]
    columns, days = ", ".join(old), OLDER_DEADLINE_DAYS
    connection.execute("DROP VIEW temp.requests")
    connection.execute("DROP TABLE temp.rejections")
    connection.execute("ALTER TABLE requests RENAME TO requests_of_schema_2")
    connection.execute(made["requests"])
    connection.execute(made["rejections"])
    connection.execute(
        f"INSERT INTO requests ({columns}, deadline_days) SELECT {columns}, {days} FROM requests_of_schema_2"
    )
    connection.execute("DROP TABLE requests_of_schema_2")
    connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")


def _connect(path: Path) -> sqlite3.Connection:
    """For reading and writing, or for reading only where the folder cannot be written to (an auditor's copy)."""
    log = path.with_name(path.name + "-wal")
    if os.access(path.parent, os.W_OK) or (log.exists() and log.stat().st_size > 0):
        connection = sqlite3.connect(path, isolation_level=None, timeout=30.0)
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA secure_delete=ON")  # what a row held is overwritten when the row goes
        return connection
    return sqlite3.connect(
        f"file:{urllib.parse.quote(str(path.resolve()))}?mode=ro&immutable=1", uri=True, isolation_level=None
    )


def scrub_database(connection: sqlite3.Connection) -> bool:
    """Write the database anew, so that no page and no log holds what was deleted; whether all of it could be done.

    A reader at work keeps the log from being emptied; then it is to be tried again.
    """
    try:
        connection.execute("PRAGMA temp_store=MEMORY")  # the copy that VACUUM makes must not lie on another disk
        connection.execute("VACUUM")
        busy = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
    except sqlite3.OperationalError as error:
        if "full" in str(error):
            raise NoSpaceError(
                "no space left to write the run's database anew: what was deleted may still be in its pages; free some "
                "and run sifu purge"
            ) from error
        if "locked" in str(error):
            return False
        raise RunDamagedError(f"the run's database cannot be used: {error}") from error
    return not busy


@contextmanager
def transaction(connection: sqlite3.Connection, mode: str | None = "IMMEDIATE") -> Iterator[None]:
    """All of the block or nothing of it; with mode None the block begins and commits by itself."""
    try:
        if mode:
            connection.execute(f"BEGIN {mode}")
        yield
        if mode:
            connection.execute("COMMIT")
    except BaseException as error:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        if isinstance(error, sqlite3.OperationalError) and "full" in str(error):
            raise NoSpaceError(
                "no space left to write the run's database: free some and run the command again; nothing was lost"
            ) from error
        if isinstance(error, UNUSABLE) and not isinstance(error, sqlite3.IntegrityError):
            raise RunDamagedError(f"the run's database cannot be used: {error}") from error
        raise
