"""Requests as everybody sees them, in the ledger of a run or still in its inbox."""

from __future__ import annotations

import datetime
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sifu.core.operator_words import approvals_words, forgotten_words, names_words, way_to_execute
from sifu.core.request_terms import BUDGET_TERMS, ROUND_TERMS, Terms, terms_words
from sifu.core.spec import Spec
from sifu.requests.deadlines import DEADLINE_DAYS, days_left, days_until, deadline_of, is_overdue
from sifu.requests.failures import failure_of
from sifu.requests.outcome import Cost, cost_of
from sifu.requests.request_record import STEPS, request_of
from sifu.store.given_approvals import Approvals, approvals_of, unapproved
from sifu.store.inbox import SUBMITTED, Message, messages
from sifu.store.projection import ENDED, RequestRow
from sifu.store.reader import RunReader, plain_names
from sifu.store.times import TIME_FORMAT

POSTED = "posted"
"""Status of a request that waits in the inbox of a run and is not in the ledger yet."""
SETTLED = ("done", *ENDED)
"""Final statuses."""
STATUSES = ("received", "waiting for approval", "approved", "running", *SETTLED)
"""Statuses of requests in the ledger."""


@dataclass(frozen=True)
class RequestStep:
    """A step in the life cycle of a request; the reason is empty if none was given."""

    status: str
    time: str
    actor: str
    reason: str


@dataclass(frozen=True)
class Request:
    """A request. What is not known of one in the inbox has the default given here.

    Attributes:
        run: Folder of its run.
        request: Id.
        status: One of `STATUSES`, or `posted`.
        clients: Names of the clients.
        records: Number of records to forget of one client, or None if clients are forgotten entirely.
        received: Time at which it was received.
        deadline: Time by which it must be done; it is in time until that day ends (UTC).
        days_left: Whole calendar days until the deadline: 0 means today. None once it is settled.
        overdue: True if the day of the deadline ended before it was done; never for a refused or withdrawn request.
        filed_by: Name of the person who filed it.
        number: Number in the ledger, from 1.
        method: Method that was asked for, or, once it is executed, the method used.
        sigma: Noise that was asked for or added; None for a head in closed form.
        level: Level of its certificate.
        finished: Time at which it was done.
        cost: Cost, once it is done.
        approvals: Names of the people who approved it.
        approvals_missing: Number of people who must still approve it before it is executed.
        terms: Terms.
        terms_digest: Digest that an approval refers to (`Terms.digest`).
        next: Command or program that takes it further while it is open.
        failure: Last error that interrupted it while it is open, with instructions to continue.
        steps: Steps of its life cycle.
    """

    run: str
    request: str
    status: str
    clients: tuple[str, ...]
    records: int | None
    received: str
    deadline: str
    days_left: int | None
    overdue: bool
    filed_by: str
    number: int | None = None
    method: str = ""
    sigma: float | str | None = None
    level: str | None = None
    finished: str | None = None
    cost: Cost | None = None
    approvals: tuple[str, ...] = ()
    approvals_missing: int = 0
    terms: Terms | None = None
    terms_digest: str = ""
    next: str = ""
    failure: str = ""
    steps: tuple[RequestStep, ...] = ()

    @property
    def settled(self) -> bool:
        """True if it was done, refused or withdrawn."""
        return self.status in SETTLED

    @property
    def waits(self) -> bool:
        """True while it waits in the ledger for its execution."""
        return not self.settled and self.status not in ("running", POSTED)

    def to_mapping(self) -> dict[str, Any]:
        """Return the request as plain values, ready for JSON. `records` is only a count; rows are never named."""
        terms = None if self.terms is None else asdict(self.terms) | {"records": self.records}
        return asdict(self) | {"terms": terms}

    def to_public_mapping(self) -> dict[str, Any]:
        """Return the request without personal data: no names, no actors, and no id, because an id may reveal a name.

        Counts and dates remain, so someone who knows when a request was made may recognise it.
        """
        same = {name: getattr(self, name) for name in ("number", "status", "records", "overdue", "method", "level")}
        days = {name: (getattr(self, name) or "")[:10] or None for name in ("received", "deadline", "finished")}
        budget = {} if self.terms is None else {"epsilon": self.terms.epsilon, "delta": self.terms.delta}
        return same | {"clients": len(self.clients)} | days | budget

    def brief(self) -> Iterator[str]:
        """Yield what is asked for, its state, and the next command."""
        whom = forgotten_words([names_words(self.clients)], self.records)
        late = " overdue" if self.overdue else "" if self.days_left is None else f" (days left: {self.days_left})"
        level = f", {self.level}" if self.level else ""
        yield f"{self.request}: {whom}; {self.status}{level}; until {self.deadline[:10]}{late}"
        if self.failure:
            yield f"  failed: {self.failure}"
        elif self.status == POSTED:
            yield "  waits in the inbox of the running server, which will ingest it soon"
        elif self.next:
            needs = f"needs {approvals_words(self.approvals_missing)}, not by {self.filed_by}, who filed it; "
            yield f"  {needs * bool(self.approvals_missing)}next: {self.next}"

    def lines(self, identities: Sequence[str] = (), besides: str = "") -> Iterator[str]:
        """Yield the request as an approver must see it, with the `identities` of its records.

        It names `besides` what other approved requests leave out of the same release (`Run.also_left_out`).
        """
        yield from self.brief()
        if self.terms is not None:
            unused = () if self.sigma is not None else (*BUDGET_TERMS, *ROUND_TERMS)
            yield f"  terms {self.terms_digest}: {terms_words(self.terms.to_mapping(), without=unused)}"
        if identities:
            yield f"  identities: {', '.join(identities)}"
        if besides:
            yield f"  {besides}"
        for step in self.steps:
            yield f"  {step.time} {step.status} by {step.actor}" + (f": {step.reason}" if step.reason else "")


def requests_of(reader: RunReader, rows: Iterable[RequestRow], now: datetime.datetime) -> list[Request]:
    """Return requests of the ledger."""
    approvals, lacking, steps = approvals_of(reader), unapproved(reader), _steps(reader)
    numbers = {row.request: number for number, row in enumerate(reader.requests(), start=1)}
    spec = Spec.from_mapping(reader.spec)
    requests = []
    for row in rows:
        given, clients = approvals.get(row.request, Approvals()), plain_names(reader, row.clients)
        missing = lacking.get(row.request, 0) if row.waits else 0
        waits = "waiting for approval" if missing else "approved" if given.approved_by else "received"
        sigma = None if spec.regime.solves else row.terms.sigma if row.noise_std is None else row.noise_std
        request = Request(
            run=str(reader.folder),
            request=row.request,
            status=waits if row.waits else row.status,
            clients=clients,
            records=len(row.records) or None,
            received=row.received,
            deadline=deadline_of(row).strftime(TIME_FORMAT),
            days_left=days_left(row, now) if row.is_open else None,
            overdue=is_overdue(row, now),
            filed_by=given.filed_by,
            number=numbers[row.request],
            method=row.method,
            sigma=sigma,
            level=row.level,
            finished=row.finished,
            cost=cost_of(reader, row) if row.status == "done" else None,
            approvals=tuple(given.approved_by),
            approvals_missing=missing,
            terms=replace(row.terms, clients=clients),
            terms_digest=row.terms.digest(row.request),
            next=_next(row, missing, spec, shlex.quote(str(reader.folder))),
            failure=failure_of(reader, row),
            steps=tuple(steps[row.request]),
        )
        requests.append(request)
    return requests


def _next(row: RequestRow, missing: int, spec: Spec, folder: str) -> str:
    if missing:
        return f"sifu decide {folder} {row.request} approve --actor NAME"
    return way_to_execute(spec, folder) if row.is_open else ""


def _steps(reader: RunReader) -> dict[str, list[RequestStep]]:
    """Return all steps in the life cycle of each request."""
    steps: dict[str, list[RequestStep]] = defaultdict(list)
    for time, kind, content in reader.latest_events(tuple(STEPS), -1):
        actor, reason = content.get("actor", "unknown"), content.get("reason", "")
        steps[request_of(kind, content)].append(RequestStep(STEPS[kind], time, actor, reason))
    return steps


def pending_requests(reader: RunReader, now: datetime.datetime) -> list[Request]:
    """Return the requests that are not settled, in the ledger or still in the inbox, earliest deadline first."""
    recorded = requests_of(reader, [row for row in reader.requests() if row.is_open], now)
    return sorted([*recorded, *posted_requests(reader, now)], key=lambda request: (request.deadline, request.request))


def posted_requests(reader: RunReader, now: datetime.datetime) -> list[Request]:
    """Return the requests that wait in the inbox and are not in the ledger."""
    recorded = {row.request for row in reader.requests()}
    return [
        _posted(str(reader.folder), message, now)
        for message in messages(reader.folder)
        if message.kind == SUBMITTED or (message.kind in ("request", "signed") and message.id not in recorded)
    ]


def _posted(run: str, message: Message, now: datetime.datetime) -> Request:
    """Return an inbox message as a request, with defaults for invalid fields; ingestion validates them."""
    content = message.content or {}
    days, clients = content.get("deadline_days", DEADLINE_DAYS), content.get("clients", [])
    posted = datetime.datetime.fromtimestamp(message.posted, datetime.UTC)
    usable = isinstance(days, int) and 0 <= days <= 36500
    deadline = posted + datetime.timedelta(days=days if usable else DEADLINE_DAYS)
    terms = content.get("terms", content)
    records = terms.get("records") if isinstance(terms, dict) else None
    left = days_until(deadline, now)
    return Request(
        run,
        message.request,
        POSTED,
        tuple(str(name) for name in clients) if isinstance(clients, list) else (),
        (len(records) or None) if isinstance(records, list) else None,
        posted.strftime(TIME_FORMAT),
        deadline.strftime(TIME_FORMAT),
        left,
        left < 0,
        str(content.get("actor", "")),
    )
