"""Approvals recorded in the ledger: who filed a request, who approved its terms, and how many approvals are missing.

The run's spec says how many people must approve a request before it is executed:

    requests.approval = "none"    no approval needed
                        "one"     one person who did not file the request
                        "two"     two different people, neither of whom filed it

An approval is a signed event of the ledger with the name of the approver and the digest of the approved terms
(`Terms.digest`). The approval covers these terms only. People are identified by name: on the command line by the
name that the caller gives, in the console by the name of their token.

A request is approved when its approvals are complete. No other request is executed; verification reports a request that
was executed without its approvals. Only approved requests change what a run trains or releases: while an approved
request to forget clients waits, rounds and solves leave these clients out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sifu.core.ledger import Event, read_json
from sifu.core.request_terms import TERMS, Terms
from sifu.core.spec import Spec
from sifu.errors import InputError
from sifu.store.actors import same_person
from sifu.store.projection import ENDINGS, RequestRow
from sifu.store.reader import RunReader

APPROVED = "request approved"
"""Kind of the event that records an approval."""
NEEDED: Mapping[str, int] = {"none": 0, "one": 1, "two": 2}
RECEIVED = "request received"
ENDS_WAITING = ("rolled back", *ENDINGS)


@dataclass
class Approvals:
    """Approvals of a request: who filed it, the digest of its terms, and the people who approved them, in order."""

    filed_by: str = "unknown"
    terms: str = ""
    approved_by: list[str] = field(default_factory=list)

    def add(self, actor: str, terms: object) -> bool:
        """Add an approval of these terms and return whether it counts.

        An approval does not count if it comes from the person who filed the request or from somebody who has approved
        before, or if it concerns other terms.
        """
        counts = terms == self.terms and self.may_approve(actor)
        if counts:
            self.approved_by.append(actor)
        return counts

    def may_approve(self, actor: str) -> bool:
        """Return whether an approval by this person would count."""
        return same_person(actor) not in map(same_person, [self.filed_by, *self.approved_by])


def filed_terms(received: Mapping[str, Any]) -> Terms:
    """Return the terms in the content of an event `request received`."""
    filed = received["request"]
    return Terms.from_mapping({name: filed[name] for name in TERMS if name in filed})


def approvals_of(reader: RunReader) -> dict[str, Approvals]:
    """Return the approvals of every request."""
    rows = reader.query(
        "SELECT kind, payload FROM events WHERE kind IN (?, ?) ORDER BY seq",
        (RECEIVED, APPROVED),
    )
    # The terms in the row will be executed: approvals of any other terms do not count.
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
    """Return how many people must approve a request of this run."""
    return NEEDED[Spec.from_mapping(reader.spec).requests.approval]


def unapproved(reader: RunReader) -> dict[str, int]:
    """Return the number of missing approvals of each request that lacks some."""
    needed = approvals_needed(reader)
    if needed == 0:
        return {}
    lacking = {request: needed - len(approvals.approved_by) for request, approvals in approvals_of(reader).items()}
    return {request: count for request, count in lacking.items() if count > 0}


def approved_requests(reader: RunReader) -> list[RequestRow]:
    """Return the waiting requests that have all their approvals, in the order in which they were received."""
    waiting = [row for row in reader.requests() if row.waits]
    lacking = unapproved(reader) if waiting else {}
    return [row for row in waiting if row.request not in lacking]


def check_approved(reader: RunReader, request: str) -> None:
    """Check that a request has all approvals.

    Raises:
        InputError: If approvals are missing.
    """
    lacking = unapproved(reader).get(request, 0)
    if lacking:
        by = approvals_of(reader)[request]
        given = f"approved by {', '.join(by.approved_by)}" if by.approved_by else "not approved yet"
        raise InputError(
            f"request {request} is {given} and needs {lacking} more approval(s) (requests.approval in the run's spec), "
            f"by people other than {by.filed_by}, who filed it: run sifu decide DIR {request} approve "
            "--actor NAME"
        )


class LeavingClients:
    """Replay of a ledger that tracks the waiting requests and the clients that each of them leaves out."""

    def __init__(self, needed: int) -> None:
        self._needed = needed
        self._waiting: dict[str, Approvals] = {}
        self._terms: dict[str, Terms] = {}

    def take(self, event: Event) -> None:
        """Process one event."""
        kind, content = event.kind, event.content
        if kind == RECEIVED:
            request, terms = str(content["request"]["request"]), filed_terms(content)
            self._waiting[request] = Approvals(str(content.get("actor", "unknown")), terms.digest(request))
            self._terms[request] = terms
        elif kind == APPROVED and str(content["request"]) in self._waiting:
            self._waiting[str(content["request"])].add(str(content.get("actor", "unknown")), content.get("terms"))
        elif kind in ENDS_WAITING:
            self._waiting.pop(str(content["request"]), None)

    def by_request(self) -> dict[str, tuple[str, ...]]:
        """Return the names of the clients that each waiting request currently leaves out."""
        leaving = {}
        for request, approvals in self._waiting.items():
            terms = self._terms[request]
            if len(approvals.approved_by) >= self._needed and not terms.records:
                leaving[request] = terms.clients
        return leaving
