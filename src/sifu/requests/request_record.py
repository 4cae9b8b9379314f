"""Decisions on requests, and their certificates in words.

    received -> (verified) -> planned -> running -> done          each an event of the ledger with time and actor
    received, verified, planned -> refused or withdrawn           the client may take part again

The optional step `verified` says that the requester's identity was checked.
Approvals (`store/given_approvals.py`) do not change the status; if the spec demands them, a request waits for them.
"""

from __future__ import annotations

from typing import Any, get_args

from sifu.choices import Decision
from sifu.core.certificate_words import exact_words, needs_budget, terms_asked_for, what_was_done, whom_words, words_of
from sifu.core.method_info import CLOSED_FORM
from sifu.core.observers import observers_in
from sifu.core.operator_words import forgotten_words
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
    """Check that the decision is one of `Decision` and that its reason is not too long."""
    if decision not in get_args(Decision):
        raise InputError(f"a decision must be one of {', '.join(get_args(Decision))}; found {decision!r}")
    if len(reason) > LONGEST_REASON:
        raise InputError(f"the reason has {len(reason)} characters: keep it below {LONGEST_REASON}")


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


def plain_answer(body: dict[str, Any]) -> list[str]:
    """Return the answer to a client in plain language, from the public certificate."""
    words, lines = words_of(body), _promise(body)
    if body["level"] == "conditional":
        lines.append("The assumptions, which are not proven:")
        lines += [f"- {sentence}" for sentence in words.premises_that_are("assumed")]
    lines += [f"Erased: {words.erased}", f"Kept: {words.remains}", "Not covered:"]
    lines += [f"- {sentence}" for sentence in words.not_covered]
    if "terms" in body:
        lines.append(f"Terms asked for: {terms_asked_for(body)}.")
    return lines


def in_short(body: dict[str, Any]) -> list[str]:
    """Return the guarantee of a public certificate, and a summary of its other statements."""
    words = words_of(body)
    assumed = len(words.premises_that_are("assumed")) if body["level"] == "conditional" else 0
    told = f"{assumed} assumption{'' if assumed == 1 else 's'} without a proof, " if assumed else ""
    return [
        f"Level {body['level']}, method {body['method']}.",
        *_promise(body),
        f"With --all: {told}what was erased, what is kept, and {len(words.not_covered)} things that are not covered.",
    ]


def _promise(body: dict[str, Any]) -> list[str]:
    """Return sentences on the execution of the request and its guarantee."""
    many, level, records = len(body["clients"]) > 1, body["level"], body["records"]
    whom = forgotten_words(body["clients"], records)
    lines = [
        f"The request {body['request']} to forget {whom}, received on {body['received'][:10]}, was executed on "
        f"{body['carried_out'][:10]}.",
        what_was_done(body),
    ]
    if records is not None and body["method"] != CLOSED_FORM:
        lines.append(
            "All that the participant had contributed before was forgotten, too; it takes part again with the records "
            "it has left."
        )
    if level == "exact":
        lines.append(f"{exact_words(whom_words(len(body['clients']), None), body['method'], records)}.")
    if level == "none":
        whose = "these participants'" if many else "this participant's"
        lines.append(
            f"Nothing is guaranteed ({body['method']}): it is unknown how much of {whose} data is still in the model."
        )
    return [*lines, *observers_in(body).sentences]


def auditor_lines(body: dict[str, Any]) -> list[str]:
    """Return the statements of the auditor's certificate that the public one lacks, as lines."""
    budget = f", epsilon {body['epsilon']:g}, delta {body['delta']:g}" if needs_budget(body) else ""
    lines = [f"For auditors, confidential: level {body['level']}, method {body['method']}{budget}."]
    psi, limit = body.get("psi"), body.get("psi_star")
    if isinstance(psi, int | float) and isinstance(limit, int | float) and limit > 0:
        lines.append(
            "Psi bounds the clients' influence on the model that training resumed from, if the assumptions below hold: "
            f"{psi:.4g}. Noise of standard deviation {float(body['sigma']):.4g} hides up to Psi* = {limit:.4g}."
        )
    if body.get("rounds") is not None and body["method"] != CLOSED_FORM:  # a solve has no rounds of retraining
        lines.append(f"Rounds of retraining: {body['rounds']}.")
    lines += [f"- {premise.status}: {premise.statement}" for premise in words_of(body).premises]
    lines.append(f"Signed over event {body['ledger']['seq']} of the ledger; issued {body['issued']}.")
    return lines
