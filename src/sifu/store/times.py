"""Times of events, in UTC."""

from __future__ import annotations

import datetime
import time

from sifu.errors import InputError, RunDamagedError

TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
BEHIND = datetime.timedelta(hours=1)
"""Tolerated difference between the clocks of several machines."""
LATEST_SECONDS = datetime.datetime(9000, 1, 1, tzinfo=datetime.UTC).timestamp()


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


def time_of(text: str) -> datetime.datetime:
    """Parse a time of the ledger."""
    try:
        return datetime.datetime.strptime(text, TIME_FORMAT).replace(tzinfo=datetime.UTC)
    except (TypeError, ValueError) as error:
        raise RunDamagedError(f"the run is damaged: it states the time {text!r:.60}") from error
