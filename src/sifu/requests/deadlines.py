"""Deadlines of requests, and the requests that are not settled yet.

A request is overdue from the day after its deadline.
"""

from __future__ import annotations

import datetime
from dataclasses import asdict, dataclass
from typing import Any

from sifu.errors import InputError
from sifu.store.inbox import SUBMITTED, Message, messages
from sifu.store.projection import RequestRow
from sifu.store.reader import RunReader, plain_names
from sifu.store.times import BEHIND, TIME_FORMAT, time_of

DEADLINE_DAYS = 30
"""Default deadline of a request, in days from its reception."""
POSTED = "posted"
"""Status of a request that waits in the inbox of a run and is not in the ledger yet."""


@dataclass(frozen=True)
class PendingRequest:
    """A request that is not settled yet, in the ledger or still in the inbox.

    `records` counts the records to forget of one client. It is None if clients are forgotten entirely. `days_left`
    counts whole calendar days (UTC): 0 means today, and only a negative number is overdue.
    """

    run: str
    request: str
    status: str
    clients: tuple[str, ...]
    records: int | None
    received: str
    deadline: str
    days_left: int

    @property
    def overdue(self) -> bool:
        """True if the day of the deadline is over."""
        return self.days_left < 0

    def to_mapping(self) -> dict[str, Any]:
        """Return the request as plain values, ready for JSON."""
        return asdict(self) | {"overdue": self.overdue}


def deadline_of(row: RequestRow) -> datetime.datetime:
    """Return the deadline of a request; the request is in time until that day ends (UTC)."""
    return time_of(row.received) + datetime.timedelta(days=row.deadline_days)


def is_overdue(row: RequestRow, now: datetime.datetime) -> bool:
    """Return whether a request missed its deadline.

    A request is overdue if the day of its deadline ended before it was done. A refused or withdrawn request is never
    overdue.
    """
    if row.was_ended:
        return False
    return _left(row, time_of(row.finished) if row.finished else now) < 0


def pending_requests(reader: RunReader, now: datetime.datetime) -> list[PendingRequest]:
    """Return the requests that are not settled, earliest deadline first."""
    run = str(reader.folder)
    rows = reader.requests()
    pending = [
        PendingRequest(
            run,
            row.request,
            row.status,
            plain_names(reader, row.clients),
            len(row.records) or None,
            row.received,
            deadline_of(row).strftime(TIME_FORMAT),
            _left(row, now),
        )
        for row in rows
        if row.is_open
    ]
    recorded = {row.request for row in rows}
    pending += [
        _posted(run, message, now)
        for message in messages(reader.folder)
        if message.kind == SUBMITTED or (message.kind in ("request", "signed") and message.id not in recorded)
    ]
    return sorted(pending, key=lambda request: (request.deadline, request.request))


def _posted(run: str, message: Message, now: datetime.datetime) -> PendingRequest:
    """Return an inbox message as a pending request, with defaults for invalid fields; ingestion validates them."""
    content = message.content or {}
    days, clients = content.get("deadline_days", DEADLINE_DAYS), content.get("clients", [])
    posted = datetime.datetime.fromtimestamp(message.posted, datetime.UTC)
    usable = isinstance(days, int) and 0 <= days <= 36500
    deadline = posted + datetime.timedelta(days=days if usable else DEADLINE_DAYS)
    names = tuple(str(name) for name in clients) if isinstance(clients, list) else ()
    terms = content.get("terms", content)
    records = terms.get("records") if isinstance(terms, dict) else None
    return PendingRequest(
        run,
        message.request,
        POSTED,
        names,
        (len(records) or None) if isinstance(records, list) else None,
        posted.strftime(TIME_FORMAT),
        deadline.strftime(TIME_FORMAT),
        _days_left(deadline, now),
    )


def _left(row: RequestRow, now: datetime.datetime) -> int:
    """Return the days until the deadline, or -1 for a request dated in the future, because its true date is unknown."""
    return -1 if time_of(row.received) - now > BEHIND else _days_left(deadline_of(row), now)


def check_deadline(deadline_days: int) -> None:
    """Check that the number of days is a valid deadline."""
    if not 0 <= deadline_days <= 36500:
        raise InputError(f"the deadline must be 0 to 36500 days away, found {deadline_days}")


def _days_left(deadline: datetime.datetime, now: datetime.datetime) -> int:
    return (deadline.date() - now.astimezone(datetime.UTC).date()).days
