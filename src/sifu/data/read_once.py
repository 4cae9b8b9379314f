"""Cache of parsed tables for a command that needs the same table several times.

The cache is dropped at the end of the block `reading_once`, because clients' rows must not stay in a service's memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from sifu.data.dataset import Dataset
from sifu.data.table import read_table, table_files
from sifu.data.table_coding import TableCoding

_parsed: ContextVar[list[tuple[Any, Dataset]] | None] = ContextVar("parsed", default=None)


@contextmanager
def reading_once() -> Iterator[None]:
    """Parse each table only once within the block, unless its bytes or its coding change."""
    if _parsed.get() is not None:
        yield
        return
    token = _parsed.set([])
    try:
        yield
    finally:
        _parsed.reset(token)


def read_again(path: Path, coding: TableCoding, **options: Any) -> Dataset:
    """Return a table as `read_table` does; within `reading_once`, reuse a table that was parsed before."""
    parsed = _parsed.get()
    if parsed is None:
        return read_table(path, coding, **options)
    key = path, _digests(path), _digests(options.get("test_file")), coding, options
    for known, dataset in parsed:
        if known == key:
            return dataset
    dataset = read_table(path, coding, **options)
    parsed.append((key, dataset))
    return dataset


def _digests(path: Path | None) -> list[tuple[str, bytes]]:
    """Return the name and digest of each file of a table; an empty list if the path is None or does not exist."""
    if path is None or not path.exists():
        return []
    files = table_files(path) if path.is_dir() else [path]
    digests = []
    for file in files:
        with file.open("rb") as stream:
            digests.append((file.name, hashlib.file_digest(stream, "sha256").digest()))
    return digests
