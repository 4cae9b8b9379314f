"""Time of events: this machine's clock, checked against the ledger."""

from __future__ import annotations

import datetime
import itertools
import time
from collections.abc import Iterator, Sequence

from sifu.core.ledger import Event
from sifu.errors import InputError, RunDamagedError
from sifu.store.reader import RunReader

CLOCK_SET = "clock set"
"""Kind of the event by which the operator confirms the clock; its time may differ by any amount from earlier events."""
TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
BEHIND = datetime.timedelta(hours=1)
"""Tolerated difference between the clocks of several machines."""
LATEST_SECONDS = datetime.datetime(9000, 1, 1, tzinfo=datetime.UTC).timestamp()
AHEAD = datetime.timedelta(days=366)
"""Longest time between two events for which the operator need not confirm the clock."""
WAY_OUT = "If the clock is right now, record that with sifu sign DIR --clock; otherwise set it first"


def current_time() -> datetime.datetime:
    """Return the time by this machine's clock.

    Raises:
        InputError: If the time is before 1970, or so far ahead that deadlines after it cannot be written.
    """
    seconds = time.time()
    if not 0 <= seconds < LATEST_SECONDS:
        raise InputError(f"the clock of this machine is at {seconds:.0f} seconds after 1970: set it")
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)


def utc_now() -> str:
    """Return the time by this machine's clock, in UTC and as a string (`TIME_FORMAT`)."""
    return current_time().strftime(TIME_FORMAT)


def clock_problem(last: str, now: str) -> str | None:
    """Return a description of the problem if the time `last` of the last event or the clock seems wrong, else None."""
    gap = time_of(now) - time_of(last)
    if gap < -BEHIND:
        return f"clock: the last event is dated {last}, and the clock says {now}: one of them is wrong"
    if gap > AHEAD:
        return f"clock: the clock says {now}, {gap.days} days after the last event ({last}): did it jump?"
    return None


def time_after(last: str, now: str) -> str:
    """Return the time of a new event, given the time `last` of the event before it and the clock's time `now`.

    Raises:
        RunDamagedError: If `last` or `now` seems wrong (see `clock_problem`).
    """
    problem = clock_problem(last, now)
    if problem:
        raise RunDamagedError(f"{problem} Nothing was done. {WAY_OUT}")
    return max(last, now)


def check_order_of_times(events: Sequence[Event]) -> Iterator[str]:
    """Yield a problem for each event before or over a year after its predecessor, unless it confirms the clock."""
    for before, after in itertools.pairwise(events):
        if after.kind == CLOCK_SET:
            if after.content.get("before") != before.time:
                yield f"clock: event {after.seq} confirms the clock but does not name the time of event {before.seq}"
        elif after.time < before.time:
            yield f"ledger: event {after.seq} is dated before event {before.seq}: {after.time[:20]}, {before.time[:20]}"
        elif time_of(after.time) - time_of(before.time) > AHEAD:
            yield (
                f"clock: event {after.seq} is dated {after.time}, over a year after event {before.seq} "
                f"({before.time}), and the operator did not confirm the clock"
            )


def check_not_ahead(reader: RunReader) -> Iterator[str]:
    """Yield a problem if the last event is dated more than an hour after the current time."""
    last, now = reader.events()[-1], utc_now()
    if time_of(last.time) - time_of(now) > BEHIND:
        yield f"clock: event {last.seq} is dated {last.time}, and the clock here says {now}: one of them is wrong"


def time_of(text: str) -> datetime.datetime:
    """Parse a time of the ledger."""
    return datetime.datetime.strptime(text, TIME_FORMAT).replace(tzinfo=datetime.UTC)
