"""The run's SQLite database: schema, transactions, erasure of deleted data, and connections."""

from __future__ import annotations

import errno
import os
import sqlite3
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

from sifu.errors import DiskError, InputError, NoSpaceError, RunDamagedError, SifuError
from sifu.version import FORMAT, OTHER_FORMAT

DATABASE = "run.db"
CLIENTS_FILE = "clients.json"
"""The operator's list of clients, written before the run exists; afterwards the ledger holds it."""
UNUSABLE = (sqlite3.DatabaseError, UnicodeDecodeError)
"""Exceptions raised by a damaged database. A decoding error occurs if SQLite quotes a name that is not valid UTF-8."""
FAILED_DISK = (
    "the disk failed under the run's database (disk I/O error): check the disk and run the command "
    "again; earlier records are intact"
)
APPLICATION_ID = 0x51F0  # marks the file as a sifu database, so that other programs' databases are refused


def create_database(folder: Path) -> sqlite3.Connection:
    """Create an empty database with the current schema."""
    path = folder / DATABASE
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    connection = sqlite3.connect(path, isolation_level=None)
    with transaction(connection, None):
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA secure_delete=ON")
        connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version={FORMAT}")
        connection.executescript(f"BEGIN IMMEDIATE;\n{_schema()}\nCOMMIT;")
    return connection


def _schema() -> str:
    return files("sifu.store").joinpath("schema.sql").read_text(encoding="utf-8")


def rest_of_a_run(folder: Path) -> bool:
    """Return whether a folder without a database used to be a run.

    Such a folder holds other files of a run and no marker of an unfinished creation. Creating a run writes the marker
    first, moves the database into place after all other files, and then deletes the marker.
    """
    if (folder / DATABASE).exists() or (folder / ".creating").exists():
        return False
    if any(os.path.lexists(folder / name) for name in ("operator.key", "scrub", f"{DATABASE}-wal")):
        return True
    names = ("certificates/*.json", "models/*.safetensors", "statistics/*.statistics")
    return any(any(folder.glob(name)) for name in names)


def open_database(folder: Path) -> sqlite3.Connection:
    """Open the database of an existing run and check its format.

    Raises:
        InputError: If the folder is not a run.
        RunDamagedError: If the database is missing from a run, damaged, or has another format.
    """
    path = folder / DATABASE
    if not path.is_file():
        if rest_of_a_run(folder):
            raise RunDamagedError(
                f"{folder} holds a run whose {DATABASE} is missing. Restore it from a backup (sifu restore); do not "
                "remove or train anything here until then"
            )
        if (folder / CLIENTS_FILE).is_file():
            raise InputError(
                f"{folder} has a list of clients but no run yet: flwr run creates it once all clients are connected"
            )
        raise InputError(
            f"{folder} is not a run folder: it has no {DATABASE}. Start one with: sifu train SPEC.toml --run {folder}"
        )
    try:
        connection = _connect(path)
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
    except UNUSABLE as error:
        raise unusable(path, error) from error
    if application != APPLICATION_ID:
        connection.close()
        raise InputError(f"{path} is not a sifu run (application id {application}, expected {APPLICATION_ID})")
    if version != FORMAT:
        connection.close()
        raise RunDamagedError(f"{folder} has the format {version}: {OTHER_FORMAT}")
    return connection


def unusable(path: Path, error: Exception) -> SifuError:
    """Return the error for an unusable database: `DiskError` if the disk fails, otherwise `RunDamagedError`.

    SQLite sometimes reports an unreadable page as malformed, so the file is read once more.
    """
    if is_disk_error(error) or not _is_readable(path):
        return DiskError(FAILED_DISK)
    return RunDamagedError(f"{path.parent} is damaged: {error}. Restore it from a backup.")


def is_disk_error(error: Exception) -> bool:
    """Return whether SQLite reports a failure of the disk."""
    return "I/O" in str(error) or getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_IOERR


def _is_readable(path: Path) -> bool:
    """Return whether the disk reads a file without an I/O error."""
    try:
        with path.open("rb") as stream:
            while stream.read(1 << 20):
                pass
    except OSError as error:
        return error.errno != errno.EIO
    return True


def schema_problems(connection: sqlite3.Connection) -> list[str]:
    """Return a description of each table, view, trigger and index that differs from sifu's schema."""
    with closing(sqlite3.connect(":memory:")) as empty:
        empty.executescript(_schema())
        present, wanted = _definitions(connection), _definitions(empty)
    return [
        f"{name[:60]!r} is not as sifu makes it, or should not be there"
        for kind, name in sorted(present.keys() | wanted.keys())
        if present.get((kind, name)) != wanted.get((kind, name))
    ]


def _definitions(connection: sqlite3.Connection) -> dict[tuple[str, str], list[str]]:
    """Return the definitions in the database, by type and name; indices that SQLite creates itself have no SQL text.

    Each entry is a list, because a forged file can define one name twice.
    """
    try:
        rows = connection.execute("SELECT name, type, tbl_name, sql FROM sqlite_master").fetchall()
    except UNUSABLE as error:
        raise RunDamagedError(f"the run's database cannot be used: {error}") from error
    definitions: dict[tuple[str, str], list[str]] = {}
    for name, kind, table, sql in rows:
        definitions.setdefault((str(kind), str(name)), []).append(" ".join(f"{table} {sql}".split()))
    return definitions


def _connect(path: Path) -> sqlite3.Connection:
    """Open a database for reading and writing, or read-only if the folder is not writable (an auditor's copy)."""
    log = path.with_name(path.name + "-wal")
    if os.access(path.parent, os.W_OK) or (log.exists() and log.stat().st_size > 0):
        connection = sqlite3.connect(path, isolation_level=None, timeout=30.0)
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA secure_delete=ON")  # overwrite the content of deleted rows
        return connection
    return sqlite3.connect(
        f"file:{urllib.parse.quote(str(path.resolve()))}?mode=ro&immutable=1", uri=True, isolation_level=None
    )


def scrub_database(connection: sqlite3.Connection) -> bool:
    """Rewrite the database, so that neither its pages nor its log hold deleted data.

    Returns:
        True if the erasure is complete, or False if it must be repeated, because another process was reading.
    """
    try:
        connection.execute("PRAGMA temp_store=MEMORY")  # VACUUM must not put its copy on another disk
        connection.execute("VACUUM")
        busy = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
    except sqlite3.OperationalError as error:
        if "full" in str(error):
            raise NoSpaceError(
                "no space left to rewrite the run's database: deleted content may still be in its pages; free some "
                "space and run sifu purge"
            ) from error
        if "locked" in str(error):
            return False
        raise RunDamagedError(f"the run's database cannot be used: {error}") from error
    return not busy


@contextmanager
def transaction(connection: sqlite3.Connection, mode: str | None = "IMMEDIATE") -> Iterator[None]:
    """Execute a block in a transaction, completely or not at all; raise errors of SQLite as errors of sifu.

    The `mode` is the kind of transaction, or None if the block itself begins and commits.
    """
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
                "no space left to write the run's database: free some space and run the command again; nothing was lost"
            ) from error
        if isinstance(error, sqlite3.Error) and is_disk_error(error):
            raise DiskError(FAILED_DISK) from error
        if isinstance(error, UNUSABLE) and not isinstance(error, sqlite3.IntegrityError):
            raise RunDamagedError(f"the run's database cannot be used: {error}") from error
        raise


class Memory:
    """Cache of values derived from a run, each stored with the state of the run that it was computed from."""

    def __init__(self) -> None:
        self._answers: dict[Any, tuple[Any, Any]] = {}

    def answer(self, question: Any, state: Any, work: Callable[[Any], Any]) -> Any:
        """Return the cached value for `question`, or compute it if the `state` of the run has changed.

        The function `work` receives the cached value of an earlier state, or None.
        """
        state_then, answer = self._answers.get(question, (None, None))
        if question not in self._answers or state_then != state:
            answer = work(answer)
            self._answers[question] = (state, answer)
        return answer

    def earlier(self, question: Any) -> Any:
        """Return the cached value for any state, or None; the caller must check that it is still valid."""
        return self._answers.get(question, (None, None))[1]


class RunConnection:
    """A run's database, open until the end of its `with` block or until `close`.

    Errors of SQLite become `RunDamagedError` or `DiskError`. Several connections can share the cache `shared`; each
    uses a cached value only if its own reads confirm the value.
    """

    def __init__(
        self, folder: Path, connection: sqlite3.Connection | None = None, shared: Memory | None = None
    ) -> None:
        self.folder = folder
        self.connection = connection or open_database(folder)
        self.memory, self.shared = Memory(), shared or Memory()
        self._others, self._unchanged_by_others = -1, object()

    def close(self) -> None:
        """Close the database."""
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def snapshot(self) -> AbstractContextManager[None]:
        """Return a context manager within which all reads see the same state of the database."""
        return transaction(self.connection, "DEFERRED")

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a SELECT; a damaged database raises `RunDamagedError`, a failing disk `DiskError`."""
        try:
            return self.connection.execute(sql, values).fetchall()
        except UNUSABLE as error:
            raise unusable(self.folder / DATABASE, error) from error

    def value(self, key: str, default: str | None = None) -> str:
        """Return a value of the `run` table.

        Raises:
            RunDamagedError: If the table has no such key and no default is given.
        """
        rows = self.query("SELECT value FROM run WHERE key = ?", (key,))
        if rows:
            return str(rows[0][0])
        if default is None:
            raise RunDamagedError(f"{self.folder} is damaged: its run table has no {key!r}")
        return default

    def take_over(self, earlier: Self) -> None:
        """Use the cache of another reader; the caller must ensure that nothing was written in between."""
        self.state()
        self.memory, self._unchanged_by_others = earlier.memory, earlier._unchanged_by_others

    def state(self) -> tuple[object, int]:
        """Return a value that changes with every write.

        The first part changes when another connection writes, and the second when this connection writes.
        """
        others = int(self.query("PRAGMA data_version")[0][0])
        if others != self._others:
            self._others, self._unchanged_by_others = others, object()
        return self._unchanged_by_others, self.connection.total_changes

    def remembered(self, question: Any, work: Callable[[], Any]) -> Any:
        """Return the result of `work`, cached until something is written."""
        answers: Memory = self.memory.answer("now", self.state(), lambda _: Memory())
        return answers.answer(question, None, lambda _: work())

    def _known_as(self) -> Any:
        """Return a value that changes with the run's clients, spec and facts."""
        keys = ("run", "clients_digest", "spec", "facts")
        return self.remembered("known as", lambda: tuple(self.value(key) for key in keys))

    def constant(self, question: Any, work: Callable[[], Any]) -> Any:
        """Return the result of `work`, cached until the run's clients, spec or facts change."""
        return self.shared.answer(question, self._known_as(), lambda _: work())

    @property
    def trackers(self) -> dict[int, Any]:
        """Cache of the Psi of all clients, by node, which `sifu.run.training` fills."""
        trackers: dict[int, Any] = self.memory.answer("trackers", self._known_as(), lambda _: {})
        return trackers
