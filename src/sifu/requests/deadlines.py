"""Deadlines of requests.

A request is overdue from the day after its deadline.
"""

from __future__ import annotations

import datetime

from sifu.errors import InputError
from sifu.store.projection import RequestRow
from sifu.store.times import BEHIND, time_of

DEADLINE_DAYS = 30
"""Default deadline of a request, in days from its reception."""


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
    return days_left(row, time_of(row.finished) if row.finished else now) < 0


def days_left(row: RequestRow, now: datetime.datetime) -> int:
    """Return the days until the deadline, or -1 for a request dated in the future, because its true date is unknown."""
    return -1 if time_of(row.received) - now > BEHIND else days_until(deadline_of(row), now)


def days_until(deadline: datetime.datetime, now: datetime.datetime) -> int:
    """Return the whole calendar days (UTC) until a deadline."""
    return (deadline.date() - now.astimezone(datetime.UTC).date()).days


def check_deadline(deadline_days: int) -> None:
    """Check that the number of days is a valid deadline."""
    if not 0 <= deadline_days <= 36500:
        raise InputError(f"the deadline must be 0 to 36500 days away, found {deadline_days}")
