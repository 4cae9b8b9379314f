"""Approval of requests: how many people must agree before one is carried out, as the run's spec says.

    requests.approval = "none"    no approval needed
                        "one"     one person who did not file the request
                        "two"     two different people, neither of whom filed it

An approval is a signed event of the ledger with the name of the approver and the digest of the terms that were
approved (`RequestTerms.digest`). It counts for these terms only: nothing that writes to a run carries a request out
before its terms have their approvals, and verification finds one that was. Who people are is known by their names:
on the command line these are what the caller says, in the console those of their tokens.

Until when requests are to be carried out, and which of them are late; a deadline of today is not missed today.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from sifu.core.ledger import read_json
from sifu.core.request_terms import TERMS, RequestTerms
from sifu.core.spec import Spec
from sifu.errors import InputError
from sifu.store.actors import same_person
from sifu.store.clock import BEHIND, TIME_FORMAT, time_of
from sifu.store.inbox import Letter, letters
from sifu.store.projection import RequestRow
from sifu.store.reader import RunReader, plain_names

APPROVED = "request approved"
"""The kind of event."""
NEEDED: Mapping[str, int] = {"none": 0, "one": 1, "two": 2}
RECEIVED = "request received"


@dataclass
class Approvals:
    """Who filed a request, the digest of its terms, and who approved these: different people in order."""

    filed_by: str = "unknown"
    terms: str = ""
    approved_by: list[str] = field(default_factory=list)

    def add(self, actor: str, terms: object) -> bool:
        """Count an approval of these terms; False if it does not count.

        Not counted: one by the person who filed the request, a second one by the same person, one of other terms.
        """
        counts = terms == self.terms and self.may_approve(actor)
        if counts:
            self.approved_by.append(actor)
        return counts

    def may_approve(self, actor: str) -> bool:
        """Whether this person's approval would count."""
        return same_person(actor) not in map(same_person, [self.filed_by, *self.approved_by])


def approvals_of(reader: RunReader) -> dict[str, Approvals]:
    """The approvals of every request."""
    rows = reader.query(
        "SELECT kind, payload FROM events WHERE kind IN (?, ?) ORDER BY seq",
        (RECEIVED, APPROVED),
    )
    # What will be carried out are the terms of the row: approvals of anything else do not count.
    digests = {row.request: row.terms.digest(row.request) for row in reader.requests()}
    approvals: dict[str, Approvals] = {}
    for kind, payload in rows:
        content = read_json(payload)
        actor = str(content.get("actor", "unknown"))
        if kind == RECEIVED:
            request = str(content["request"]["request"])
            approvals[request] = Approvals(actor, digests.get(request, ""))
        else:
            approvals.setdefault(str(content["request"]), Approvals()).add(actor, content.get("terms"))
    return approvals


def approvals_needed(reader: RunReader) -> int:
    """How many people must approve a request of this run."""
    return NEEDED[Spec.from_mapping(reader.spec).requests.approval]


def unapproved(reader: RunReader) -> dict[str, int]:
    """The requests that lack approvals, and how many each lacks."""
    needed = approvals_needed(reader)
    if needed == 0:
        return {}
    lacking = {request: needed - len(approvals.approved_by) for request, approvals in approvals_of(reader).items()}
    return {request: count for request, count in lacking.items() if count > 0}


def check_approved(reader: RunReader, request: str) -> None:
    """Refuse to carry out a request that lacks approvals."""
    lacking = unapproved(reader).get(request, 0)
    if lacking:
        by = approvals_of(reader)[request]
        given = f"approved by {', '.join(by.approved_by)}" if by.approved_by else "not approved yet"
        raise InputError(
            f"request {request} is {given} and needs {lacking} more (requests.approval of the run's spec), by people "
            f"other than {by.filed_by}, who filed it: sifu requests decide DIR {request} approved --actor NAME"
        )


def check_approvals(reader: RunReader) -> Iterator[str]:
    """Every request that was carried out had been approved before, under the same terms, by different people."""
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
                    f"request {content['request']}: it was carried out (event {event.seq}) with {counted} of the "
                    f"{needed} approvals that the spec demands"
                )


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
