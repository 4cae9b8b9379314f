"""Approvals and deadlines of requests.

The run's spec says how many people must approve a request before it is executed:

    requests.approval = "none"    no approval needed
                        "one"     one person who did not file the request
                        "two"     two different people, neither of whom filed it

An approval is a signed event of the ledger with the name of the approver and the digest of the approved terms
(`RequestTerms.digest`). The approval covers these terms only. No request is executed before its terms have enough
approvals, and verification detects a request that was. People are identified by name: on the command line by the name
the caller gives, in the console by the name of their token.

A request has a deadline; it is overdue from the day after its deadline.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from sifu.core.request_terms import TERMS, RequestTerms
from sifu.errors import InputError
from sifu.store.clock import BEHIND, TIME_FORMAT, time_of
from sifu.store.given_approvals import (
    APPROVED,
    RECEIVED,
    Approvals,
    LeavingClients,
    approvals_needed,
)
from sifu.store.inbox import SUBMITTED, Message, messages
from sifu.store.projection import RequestRow
from sifu.store.reader import RunReader, plain_names


def check_approvals(reader: RunReader) -> Iterator[str]:
    """Yield a problem for each request executed without enough approvals, and for each approval that cannot count."""
    needed = approvals_needed(reader)
    approvals: dict[str, Approvals] = {}
    for event in reader.events():
        content = event.content
        if event.kind == RECEIVED:
            request, filed = str(content["request"]["request"]), content["request"]
            terms = RequestTerms.from_mapping({name: filed[name] for name in TERMS if name in filed})
            approvals[request] = Approvals(str(content.get("actor", "unknown")), terms.digest(request))
        elif event.kind == APPROVED:
            given = approvals.get(str(content["request"]))
            if given is not None and content.get("terms") != given.terms:
                yield f"request {content['request']}: event {event.seq} approves other terms than it was filed with"
            elif given is None or not given.add(str(content["actor"]), content.get("terms")):
                yield f"request {content['request']}: event {event.seq} approves it, but that approval cannot count"
        elif event.kind == "rolled back":
            counted = len(approvals[str(content["request"])].approved_by)
            if counted < needed:
                yield (
                    f"request {content['request']}: it was executed (event {event.seq}) with {counted} of the {needed} "
                    "approvals that the spec demands"
                )


def check_left_out(reader: RunReader) -> Iterator[str]:
    """Yield a problem for each event whose `left_out` is wrong, or whose rounds include a client that must be left out.

    `left_out` must name the clients of the approved requests that wait at that time.
    """
    leaving, everyone = LeavingClients(approvals_needed(reader)), reader.everyone()
    number = {profile.name: client for client, profile in enumerate(reader.clients())}
    for event in reader.events():
        leaving.take(event)
        content, rows = event.content, event.content.get("rows")
        waiting = sorted({number[name] for names in leaving.by_request().values() for name in names})
        stated = content.get("solve", content).get("left_out", waiting)
        if stated != waiting:
            yield f"event {event.seq} left out clients {stated}, approved requests that waited name {waiting}"
        if event.kind == "rounds" and rows is not None:
            there = set(everyone.between(int(rows["first"]), int(rows["last"])).clients.tolist())
            if not there.isdisjoint(waiting):
                client = min(there & set(waiting))
                yield f"event {event.seq}: client {client} took part in a round while its approved request waited"


DEADLINE_DAYS = 30
"""Default deadline of a request, in days from its reception."""
POSTED = "posted"
"""Status of a request that waits in the inbox of a run and is not in the ledger yet."""


@dataclass(frozen=True)
class PendingRequest:
    """A request that is not settled yet, in the ledger or still in the inbox.

    `days_left` counts whole calendar days (UTC): 0 means today, and only a negative number is overdue.
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
        """True if the day of the deadline is over."""
        return self.days_left < 0

    def to_mapping(self) -> dict[str, Any]:
        """Return the request as plain values, ready for JSON."""
        return asdict(self) | {"overdue": self.overdue}


def deadline_of(row: RequestRow) -> datetime.datetime:
    """Return the deadline of a request; the whole day of the deadline is in time."""
    return time_of(row.received) + datetime.timedelta(days=row.deadline_days)


def is_overdue(row: RequestRow, now: datetime.datetime) -> bool:
    """Return whether a request missed its deadline.

    A request is overdue if the day of its deadline ended before it was done; a refused or withdrawn one never is.
    """
    if row.status in ("refused", "withdrawn"):
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
            row.received,
            deadline_of(row).strftime(TIME_FORMAT),
            _left(row, now),
        )
        for row in rows
        if row.waits or row.status == "running"
    ]
    recorded = {row.request for row in rows}
    pending += [
        _posted(run, message, now)
        for message in messages(reader.folder)
        if message.kind == SUBMITTED or (message.kind in ("request", "signed") and message.id not in recorded)
    ]
    return sorted(pending, key=lambda request: (request.deadline, request.request))


def _posted(run: str, message: Message, now: datetime.datetime) -> PendingRequest:
    """Return an inbox message as a pending request, as far as it can be read; it is validated when it is ingested."""
    content = message.content or {}
    days, clients = content.get("deadline_days", DEADLINE_DAYS), content.get("clients", [])
    posted = datetime.datetime.fromtimestamp(message.posted, datetime.UTC)
    usable = isinstance(days, int) and 0 <= days <= 36500
    deadline = posted + datetime.timedelta(days=days if usable else DEADLINE_DAYS)
    names = tuple(str(name) for name in clients) if isinstance(clients, list) else ()
    return PendingRequest(
        run,
        message.request,
        POSTED,
        names,
        posted.strftime(TIME_FORMAT),
        deadline.strftime(TIME_FORMAT),
        _days_left(deadline, now),
    )


def _left(row: RequestRow, now: datetime.datetime) -> int:
    """Return the days left; -1 for a request dated in the future, because its true date is unknown."""
    return -1 if time_of(row.received) - now > BEHIND else _days_left(deadline_of(row), now)


def check_deadline(deadline_days: int) -> None:
    """Check that the number of days is a valid deadline."""
    if not 0 <= deadline_days <= 36500:
        raise InputError(f"the deadline must be 0 to 36500 days away, found {deadline_days}")


def _days_left(deadline: datetime.datetime, now: datetime.datetime) -> int:
    return (deadline.date() - now.astimezone(datetime.UTC).date()).days
