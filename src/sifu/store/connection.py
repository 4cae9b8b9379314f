"""A connection to a run's database, and what was worked out from it as long as nothing is written."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sifu.errors import RunDamagedError
from sifu.store.database import DATABASE, UNUSABLE, open_database, transaction, unusable

Version = tuple[int, int]
"""Changes whenever something is written: the first when another connection does, the second when this one."""


class RunConnection:
    """A run's database, open until the end of its `with` block or until `close`; damage becomes a sentence.

    What hardly ever changes in a run (`constants`) is read once and may be handed on to the next connection to the run.
    """

    def __init__(
        self, folder: Path, connection: sqlite3.Connection | None = None, constants: dict[Any, Any] | None = None
    ) -> None:
        self.folder = folder
        self.connection = connection or open_database(folder)
        self._constants = {} if constants is None else constants
        self._known_at: Version | None = None
        self._remembered: tuple[Version, dict[str, Any]] = ((-1, -1), {})
        self.trackers: dict[int, Any] = {}
        """Psi of all clients at some nodes, kept by the code that computed it (`sifu.run.everyones_psi`)."""

    def close(self) -> None:
        """Close the database."""
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def snapshot(self) -> AbstractContextManager[None]:
        """Within this block every read sees the same instant."""
        return transaction(self.connection, "DEFERRED")

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Rows of a SELECT; a damaged database becomes a sentence."""
        try:
            return self.connection.execute(sql, values).fetchall()
        except UNUSABLE as error:
            raise unusable(self.folder / DATABASE, error) from error

    def value(self, key: str, default: str | None = None) -> str:
        """A value of the `run` table."""
        rows = self.query("SELECT value FROM run WHERE key = ?", (key,))
        if rows:
            return str(rows[0][0])
        if default is None:
            raise RunDamagedError(f"{self.folder} is damaged: its run table has no {key!r}")
        return default

    def take_over(self, earlier: Self) -> None:
        """Use what another reader worked out; the caller knows that nothing was written since."""
        self._remembered = (self._version(), earlier._remembered[1])
        self.trackers = earlier.trackers

    def _version(self) -> Version:
        return int(self.query("PRAGMA data_version")[0][0]), self.connection.total_changes

    def remembered(self, key: str, make: Callable[[], Any]) -> Any:
        """What `make` gives, worked out once as long as nothing is written."""
        version = self._version()
        if self._remembered[0] != version:
            self._remembered = (version, {})
        if key not in self._remembered[1]:
            self._remembered[1][key] = make()
        return self._remembered[1][key]

    def constant(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` gives, worked out once as long as the run's clients, spec and facts do not change."""
        version = self._version()
        if self._known_at != version:
            known_as = tuple(self.value(key) for key in ("run", "clients_digest", "spec", "facts"))
            if self._constants.get("known as") != known_as:
                self._constants.clear()
                self.trackers.clear()  # each holds as many clients as there were
                self._constants["known as"] = known_as
            self._known_at = version
        if key not in self._constants:
            self._constants[key] = make()
        return self._constants[key]

    def from_earlier(self, key: str) -> Any:
        """What an earlier connection of this process to the run put by; None if there was none."""
        return self._constants.get(key)

    def for_later(self, key: str, value: Any) -> None:
        """Put something by for the next connection, which must compare it with what it reads before it is used."""
        self._constants[key] = value
