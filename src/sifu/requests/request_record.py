"""Decisions on requests, and their certificates in words.

    received -> (verified) -> planned -> running -> done          each an event of the ledger with time and actor
    received, verified, planned -> refused or withdrawn           the client may take part again

The optional step `verified` says that the requester's identity was checked.
Approvals (`store/given_approvals.py`) do not change the status; if the spec demands them, a request waits for them.
"""

from __future__ import annotations

from typing import Any, get_args

from sifu.choices import Decision
from sifu.errors import InputError
from sifu.store.actors import actor_name, same_person
from sifu.store.given_approvals import APPROVED, approvals_of
from sifu.store.projection import ENDED, STATUS_AFTER, WAITING, NewEvent, RequestRow
from sifu.store.reader import RunReader
from sifu.store.writer import RunWriter

LONGEST_REASON = 1000
MAY_FOLLOW = {
    "received": (None,),
    "verified": ("received",),
    "planned": ("received", "verified"),
    "running": WAITING,
    "done": ("running",),
    "refused": WAITING,
    "withdrawn": WAITING,
}
"""Statuses from which each status can be reached."""
STEPS = STATUS_AFTER | {APPROVED: "approved"}
"""Event kinds in the life cycle of a request, including approvals, each with the name of its step."""


def row_of(reader: RunReader, request: str) -> RequestRow:
    """Return the row of a request.

    Raises:
        InputError: If the request is not in the ledger.
    """
    rows = {row.request: row for row in reader.requests()}
    if request not in rows:
        raise InputError(f"there is no request {request!r} in this run; it has {', '.join(rows) or 'none'}")
    return rows[request]


def decide(
    writer: RunWriter,
    request: str,
    decision: str,
    reason: str = "",
    actor: str | None = None,
    terms: str | None = None,
) -> bool:
    """Record a decision on a request that is not finished.

    Args:
        writer: Writer of the run.
        request: Id of the request.
        decision: One of `Decision`.
        reason: Reason for the decision, required for a refusal.
        actor: Name of the person who decides, by default the current user.
        terms: Digest of the terms that the decision is about, or None to skip the comparison.

    Returns:
        False if the decision was recorded before.

    Raises:
        InputError: If the decision cannot be recorded.
    """
    name = actor_name(actor)
    if not check_decision(writer, request, decision, reason, name, terms):
        return False
    content = {"request": request, "actor": name, "reason": reason}
    if decision == "approved":
        content["terms"] = approvals_of(writer)[request].terms
    writer.record(NewEvent(f"request {decision}", content))
    return True


def check_decision(reader: RunReader, request: str, decision: str, reason: str, actor: str, terms: str | None) -> bool:
    """Check that a decision can be recorded; return False if it was recorded before (see `decide`)."""
    check_words(decision, reason)
    row = row_of(reader, request)
    check_digest(request, row.terms.digest(request), terms)
    status = row.status
    if decision == "approved":
        return _check_approval(reader, request, status, actor)
    if status == decision:
        return False
    if status not in MAY_FOLLOW[decision]:
        raise InputError(f"request {request} is {status}: it can no longer be {decision}")
    if decision == "refused" and not reason.strip():
        raise InputError("a refusal needs a reason: give one with --reason")
    return True


def check_digest(request: str, current: str, given: str | None) -> None:
    """Check that a decision is about the current terms of the request."""
    if given is not None and given != current:
        raise InputError(
            f"request {request} does not have the terms of the decision: the digest of its terms is {current[:12]}..., "
            f"the decision names {given[:12] or 'none'}. Look at the request again (sifu requests)"
        )


def check_words(decision: str, reason: str) -> None:
    """Check that the decision is one of `Decision` and that its reason is one line that is not too long."""
    if decision not in get_args(Decision):
        raise InputError(f"a decision must be one of {', '.join(get_args(Decision))}; found {decision!r}")
    if len(reason) > LONGEST_REASON:
        raise InputError(f"the reason has {len(reason)} characters: keep it below {LONGEST_REASON}")
    if not reason.isprintable():
        raise InputError("the reason has a line break or another control character: write one line of text")


def _check_approval(reader: RunReader, request: str, status: str, actor: str) -> bool:
    """Check that the request waits and another person filed it; return False if `actor` has approved it already."""
    approvals = approvals_of(reader)[request]
    if status not in ENDED and same_person(actor) in map(same_person, approvals.approved_by):
        return False
    if status not in WAITING:
        raise InputError(f"request {request} is {status}: it can no longer be approved")
    if not approvals.may_approve(actor):
        raise InputError(f"{approvals.filed_by} filed request {request}, so another person must approve it")
    return True


def request_of(kind: str, content: dict[str, Any]) -> str:
    """Return the id of the request that an event of its life cycle is about."""
    request = content["request"]["request"] if kind == "request received" else content["request"]
    return str(request)
