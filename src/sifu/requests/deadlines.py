"""Until when requests are to be carried out, and which of them are late; a deadline of today is not missed today."""

from __future__ import annotations

import datetime
from dataclasses import asdict, dataclass
from typing import Any

from sifu.errors import InputError
from sifu.store.clock import BEHIND, TIME_FORMAT, time_of
from sifu.store.inbox import Letter, letters
from sifu.store.projection import RequestRow
from sifu.store.reader import RunReader
from sifu.store.remainders import plain_names

DEADLINE_DAYS = 30
"""A month from the request, unless it says otherwise."""
POSTED = "posted"
"""The status of a request that waits in the inbox of a run; the ledger does not have it yet."""


@dataclass(frozen=True)
class PendingRequest:
    """A request that is not done yet: in the ledger, or still in the inbox.

    `days_left` counts whole days of the calendar (UTC): 0 is today, and only a negative number is overdue.
    """

    run: str
    request: str
    status: str
    clients: tuple[str, ...]
    received: str
    deadline: str
    days_left: int

    @property
    def overdue(self) -> bool:
        """Whether the day of its deadline is over."""
        return self.days_left < 0

    def to_mapping(self) -> dict[str, Any]:
        """As plain values, ready for JSON."""
        return asdict(self) | {"overdue": self.overdue}


def deadline_of(row: RequestRow) -> datetime.datetime:
    """Until when a request is to be carried out; it has the whole of that day."""
    return time_of(row.received) + datetime.timedelta(days=row.deadline_days)


def is_overdue(row: RequestRow, now: datetime.datetime) -> bool:
    """Whether the day of its deadline is over and a request is not settled, or was carried out after that day."""
    if row.status in ("refused", "withdrawn"):
        return False
    return _left(row, time_of(row.finished) if row.finished else now) < 0


def pending_requests(reader: RunReader, now: datetime.datetime) -> list[PendingRequest]:
    """The requests that are waited for, those with the earliest deadline first."""
    run = str(reader.folder)
    rows = reader.requests()
    pending = [
        PendingRequest(
            run,
            row.request,
            row.status,
            plain_names(reader, row.clients),
            row.received,
            deadline_of(row).strftime(TIME_FORMAT),
            _left(row, now),
        )
        for row in rows
        if row.waits or row.status == "running"
    ]
    recorded = {row.request for row in rows}
    pending += [
        _posted(run, letter, now)
        for letter in letters(reader.folder)
        if letter.kind in ("request", "signed") and letter.id not in recorded
    ]
    return sorted(pending, key=lambda request: (request.deadline, request.request))


def _posted(run: str, letter: Letter, now: datetime.datetime) -> PendingRequest:
    """A letter as far as it can be read; what is wrong with it is found when it is opened."""
    content = letter.content or {}
    days, clients = content.get("deadline_days", DEADLINE_DAYS), content.get("clients", [])
    posted = datetime.datetime.fromtimestamp(letter.posted, datetime.UTC)
    usable = isinstance(days, int) and 0 <= days <= 36500
    deadline = posted + datetime.timedelta(days=days if usable else DEADLINE_DAYS)
    names = tuple(str(name) for name in clients) if isinstance(clients, list) else ()
    return PendingRequest(
        run,
        letter.id,
        POSTED,
        names,
        posted.strftime(TIME_FORMAT),
        deadline.strftime(TIME_FORMAT),
        _days_left(deadline, now),
    )


def _left(row: RequestRow, now: datetime.datetime) -> int:
    """Days left by the clock; a request that is dated ahead of it counts as overdue, since its true date is unknown."""
    return -1 if time_of(row.received) - now > BEHIND else _days_left(deadline_of(row), now)


def check_deadline(deadline_days: int) -> None:
    """Refuse a number of days that is no deadline."""
    if not 0 <= deadline_days <= 36500:
        raise InputError(f"the deadline must be 0 to 36500 days away, found {deadline_days}")


def _days_left(deadline: datetime.datetime, now: datetime.datetime) -> int:
    return (deadline.date() - now.astimezone(datetime.UTC).date()).days
