"""How the database of a run of an earlier schema becomes one of today's.

A schema is never changed without a step here: number 11 leads from schema 10 to schema 11, and so on. All steps that a
run needs are one transaction. A step makes a table anew under its name, with the very text that `schema.sql` has by
then, because that text is compared. The ledger stays as it is, and the small tables must be what it says afterwards, so
nothing is lost unnoticed. `tests/store/test_migrations.py` leads the first schema to today's.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

FIRST_SCHEMA = 10
"""The oldest schema that is read. Runs of earlier ones are refused."""
MIGRATIONS: dict[int, Callable[[sqlite3.Connection], None]] = {}
"""Each step by the schema it leads to."""


def schema_version() -> int:
    """Today's schema."""
    return FIRST_SCHEMA + len(MIGRATIONS)


def migrate(connection: sqlite3.Connection) -> None:
    """Every step that is still to be done; to be called within a transaction."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    for number in range(version + 1, schema_version() + 1):
        MIGRATIONS[number](connection)
        connection.execute(f"PRAGMA user_version={number}")
