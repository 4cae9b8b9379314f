"""Approval of requests: how many people must agree before one is carried out, as the run's spec says.

    requests.approval = "none"    no approval needed
                        "one"     one person who did not file the request
                        "two"     two different people, neither of whom filed it

An approval is a signed event of the ledger with the name of the approver and the digest of the terms that were
approved (`RequestTerms.digest`). It counts for these terms only: nothing that writes to a run carries a request out
before its terms have their approvals, and verification finds one that was. Who people are is known by their names:
on the command line these are what the caller says, in the console those of their tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sifu.core.ledger import read_json
from sifu.core.request_terms import TERMS, RequestTerms
from sifu.core.spec import Spec
from sifu.errors import InputError
from sifu.store.clock import same_person
from sifu.store.reader import RunReader

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
            request, terms = str(content["request"]["request"]), _terms_filed(content["request"])
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


def _terms_filed(content: Mapping[str, Any]) -> RequestTerms:
    return RequestTerms.from_mapping({name: content[name] for name in TERMS if name in content})
