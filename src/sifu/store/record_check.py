"""Checks, on every opening for writing, that the ledger is intact and that the small tables agree with it.

Clients and rounds are not checked here, because there can be a million of them. `sifu.checking.integrity` checks them.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from sifu.core.ledger import NONCE_BYTES, Event, broken_links, canonical_json, read_json
from sifu.errors import RunDamagedError
from sifu.store.checkpoints import check_checkpoints
from sifu.store.database import schema_problems
from sifu.store.events_check import check_events
from sifu.store.keys import check_keys
from sifu.store.projection import KEYS
from sifu.store.reader import RunReader, readable
from sifu.store.replayed_ledger import ReplayedLedger

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", re.ASCII)
Check = Callable[[RunReader], Iterable[str]]
"""Check of a run; yields one message per problem."""


def check_record(reader: RunReader) -> None:
    """Check the ledger and the tables of a run before anything is added to them.

    Raises:
        RunDamagedError: If the ledger or a table was changed.
    """
    # The last signature covers all events before it; verification checks the other signatures as well.
    last_signature = partial(check_checkpoints, only_last=True)
    refuse_problems(reader, (check_schema, check_ledger, last_signature, check_events, check_tables, check_keys))


def refuse_problems(reader: RunReader, checks: Iterable[Check]) -> None:
    """Raise `RunDamagedError` for the first problem that one of the checks finds."""
    for check in checks:
        with readable(reader.folder):
            problem = next(iter(check(reader)), None)
        if problem is not None:
            raise RunDamagedError(
                f"{reader.folder} is damaged or was changed by hand, nothing was done. {problem}. See sifu verify"
            )


def check_database(reader: RunReader) -> Iterator[str]:
    """Yield the problems that SQLite finds in the database's pages, and each difference from sifu's schema."""
    for (line,) in reader.query("PRAGMA integrity_check(5)"):
        if line != "ok":
            yield f"database: {line}"
    yield from check_schema(reader)


def check_schema(reader: RunReader) -> Iterator[str]:
    """Yield a problem for each difference from sifu's schema.

    A trigger could change written data, and an additional table could keep erased data.
    """
    for problem in schema_problems(reader.connection):
        yield f"database: {problem}"


def check_ledger(reader: RunReader) -> Iterator[str]:
    """Yield the problems of the ledger: its hash chain, the form of its events, their times, and its head."""
    events = reader.events()
    if not events or events[0].kind != "run created":
        yield "ledger: it does not begin with the creation of the run"
        return
    yield from broken_links(events)
    for event in events:
        # Accept only one encoding: other programs might resolve duplicate keys differently or refuse what sifu accepts.
        if len(event.nonce) != NONCE_BYTES or not _is_canonical(event):
            yield f"ledger: the content of event {event.seq} is not written as canonical JSON, or has no proper nonce"
        if not TIME.fullmatch(event.time):
            yield f"ledger: the time of event {event.seq} is {event.time[:40]!r}, not YYYY-MM-DDTHH:MM:SSZ"
            return
    for before, after in itertools.pairwise(events):
        if after.time < before.time:
            yield f"ledger: event {after.seq} is dated before event {before.seq}: {after.time}, {before.time}"
    last = events[-1]
    if reader.value("head") != last.head:
        yield f"ledger: it ends at event {last.seq}, but the run table's head is {reader.value('head')[:24]}..."


_seen_canonical: set[bytes] = set()
"""Digests of payloads known to be canonical, cached because a process opens a run many times."""
_MOST_SEEN = 200_000


def _is_canonical(event: Event) -> bool:
    digest = hashlib.sha256(event.payload).digest()  # hash the bytes themselves, not the recorded digest
    if digest in _seen_canonical:
        return True
    canonical = canonical_json(read_json(event.payload)) == event.payload
    if canonical and len(_seen_canonical) < _MOST_SEEN:
        _seen_canonical.add(digest)
    return canonical


def check_tables(reader: RunReader) -> Iterator[str]:
    """Yield a problem for each row of the small tables that differs from the ledger."""
    ledger = ReplayedLedger.of(reader)
    head = {("head",): {"value": ledger.events[-1].head}}
    replayed = ledger.tables.rows
    expected = replayed | {"run": replayed["run"] | head}
    for table, keys in KEYS.items():
        columns = [row[1] for row in reader.query(f"PRAGMA table_info({table})")]
        stored = {}
        for row in reader.query(f"SELECT * FROM {table}"):
            values = dict(zip(columns, row, strict=True))
            stored[tuple(values.pop(key) for key in keys)] = values
        for key in sorted(set(expected[table]) | set(stored), key=str):
            name = f"{table} {', '.join(map(str, key))}"
            if key not in stored:
                yield f"tables: the row of {name} is missing"
            elif key not in expected[table]:
                yield f"tables: the row of {name} is not in the ledger"
            else:
                wanted = dict.fromkeys(stored[key]) | expected[table][key]
                for column, value in stored[key].items():
                    if value != wanted.get(column):
                        yield f"tables: {name}: {_difference(column, value, wanted.get(column))}"


def _difference(column: str, stored: object, expected: object) -> str:
    """Describe how a column differs from the ledger; for the terms of a request, name the first key that differs."""
    if column == "terms":
        with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
            here, there = json.loads(str(stored)), json.loads(str(expected))
            column = min(key for key in here.keys() | there.keys() if here.get(key) != there.get(key))
            stored, expected = here.get(column), there.get(column)
    return f"{column} is {repr(stored)[:200]}, the ledger says {repr(expected)[:200]}"
