"""Requests in the console, numbered within their run or as rows of a list."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from sifu.api.requests import SETTLED, Request


@dataclass(frozen=True)
class NumberedRequest:
    """A request with its number within the run. URLs contain the number because an id may reveal a name."""

    number: int
    record: Request
    state: str
    """State of the request: a value of `Request.status`, or `failed`."""

    @property
    def finished(self) -> str:
        """Time at which the request was settled, by execution or refusal, or an empty string if it is open."""
        return self.record.steps[-1].time if self.state in SETTLED else ""


@dataclass(frozen=True)
class RequestLine:
    """A request as a row of the lists. Its number is None while it waits in an inbox."""

    run: str
    name: str
    number: int | None
    request: str
    state: str
    level: str | None
    deadline: str
    overdue: bool
    """True if the request was not settled by its deadline."""
    received: str
    finished: str
    clients: tuple[str, ...]
    method: str
    filed_by: str
    approvals: tuple[str, ...] = ()
    approvals_missing: int = 0
    records: int | None = None
    """Number of records to forget, or None if clients are forgotten entirely."""

    @staticmethod
    def of(row: Request, **ours: Any) -> RequestLine:
        """Return the list row for a request in the ledger or the inbox; one in the inbox has fewer known fields."""
        theirs = {field.name: getattr(row, field.name) for field in fields(RequestLine) if hasattr(row, field.name)}
        return RequestLine(**theirs | {"finished": ""} | ours)

    @property
    def settled(self) -> bool:
        """True if the request is in a final state."""
        return self.state in SETTLED

    def urgency(self) -> tuple[Any, ...]:
        """Return the sort key of the lists: open requests by deadline, then settled requests, latest first."""
        latest_first = tuple(-ord(letter) for letter in self.finished or self.received)
        return (self.settled, () if not self.settled else latest_first, self.deadline, self.name, self.request)
