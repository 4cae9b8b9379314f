"""Requests submitted through the console by people who may not see the run; they wait until somebody examines them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sifu.api.requests import POSTED, pending_requests
from sifu.choices import TermsGiven
from sifu.core.request_terms import Terms
from sifu.errors import InputError, NotCertifiableError, RunBusyError
from sifu.requests.deadlines import check_deadline
from sifu.requests.messages import days_left_of, record_refusal
from sifu.store.actors import actor_name, same_address
from sifu.store.given_approvals import approvals_needed, unapproved
from sifu.store.inbox import SUBMITTED, Message, discard, messages, post
from sifu.store.times import current_time

if TYPE_CHECKING:
    from sifu.api.run import Run

FIELDS = {"request", "clients", "deadline_days", "actor", "terms", "nonces"}


def submitted(folder: Path) -> list[Message]:
    """Return the submitted requests that wait to be examined."""
    return [message for message in messages(folder) if message.kind == SUBMITTED and content_of(message)]


def content_of(message: Message) -> dict[str, Any]:
    """Return the content of a submitted request, or {} if its fields are not exactly those that the console writes."""
    content = message.content or {}
    return content if content.keys() == FIELDS else {}


def submit(
    run: Run, actor: str, request: str, clients: Sequence[str], deadline_days: int, terms: TermsGiven, nonces: Any
) -> None:
    """Post a request to the inbox for a person who may not see the run; only its wording is checked here."""
    check_deadline(deadline_days)
    given = {key: value for key, value in terms.items() if key != "records"}
    Terms.from_mapping(run.usual_terms(clients).to_mapping() | given)
    content = {"clients": list(clients), "deadline_days": deadline_days, "terms": dict(terms)}
    content |= {"request": request, "actor": actor, "nonces": nonces}
    post(run.folder, SUBMITTED, f"s-{secrets.token_hex(8)}", content)


def withdraw(run: Run, actor: str, request: str, reason: str) -> bool:
    """Withdraw a request that its filer submitted and nobody has examined; return False if there is none."""
    for message in submitted(run.folder):
        if message.request == request and same_address(actor, content_of(message)["actor"]):
            if not refuse(run, message, f"withdrawn by {actor}: {reason}"):
                raise RunBusyError("the run is in use: withdraw the request again in a moment")
            discard(message)
            return True
    return False


def is_filer(run: Run, actor: str, request: str) -> bool:
    """Return whether a person filed this request of the ledger, or of the inbox if the ledger has none."""
    posted = [message for message in messages(run.folder) if message.kind == "request"]
    filers = {message.id: str((message.content or {}).get("actor", "")) for message in posted}
    filers |= {record.request: record.filed_by for record in run.request_records()}
    return same_address(actor, filers.get(request, ""))


def examine(run: Run, by: str | None = None) -> dict[str, str]:
    """File the submitted requests, or record why they are refused; `by` names the person who examines them.

    The result has the reason of each refusal by the request's id, and an empty reason for a request that was filed.
    """
    by, examined = actor_name(by), dict[str, str]()
    for message in submitted(run.folder):
        content, reason = content_of(message), ""
        try:
            check_share(run, content["clients"])
            _check_id_is_own(run, content["actor"], message.request)
            run.request(
                content["clients"],
                message.request,
                deadline_days=days_left_of(message, content["deadline_days"]),
                actor=content["actor"],
                nonces=content["nonces"],
                **content["terms"],
            )
        except (InputError, NotCertifiableError) as error:
            reason = str(error)
            named = any(_is_named(identity, reason) for identity in content["terms"].get("records", ()))
            recorded = "one of its records cannot be forgotten" if named else reason
            if not refuse(run, message, f"examined by {by}: {recorded}"):
                continue
        discard(message)
        examined[message.request] = reason
    return examined


def _is_named(identity: object, reason: str) -> bool:
    r"""Return whether a reason contains the identity of a record, as it is or with escapes, or its first 20 characters.

    >>> [_is_named("M\u00fcller", f"no record {name}") for name in ("M\u00fcller", r"'M\xfcller'", "'Meier'")]
    [True, True, False]
    """
    text = str(identity)
    return any(written[:20] in reason for written in (text, repr(text)[1:-1], ascii(text)[1:-1]))


def refuse(run: Run, message: Message, reason: str) -> bool:
    """Record that a submitted request is refused; return False if another process writes to the run."""
    try:
        with run.writer() as writer:
            record_refusal(writer, message, reason)
    except RunBusyError:
        return False
    return True


def check_share(run: Run, clients: Sequence[str]) -> None:
    """Refuse a request if, with it, waiting requests without approval name more than half of the clients."""
    with run.view() as view:
        lacking = unapproved(view.reader) if approvals_needed(view.reader) else None
        held = {
            name
            for row in view.requests
            if row.waits and (lacking is None or row.request in lacking)
            for name in row.clients
        }
        there = {view.clients[index].name for index in view.active} | held
        pending = pending_requests(view.reader, current_time())
        unexamined = {message.request for message in submitted(run.folder)}  # exclude no client yet
        posted = [row for row in pending if row.status == POSTED and row.request not in unexamined]
        named = {name for row in posted for name in row.clients}
        held = (held | named | set(view.names_now(list(clients)))) & there
    if 2 * len(held) > len(there):
        raise InputError(
            "requests without approval would then name more than half of the clients: have earlier requests approved "
            "first, or ask an operator to file this one"
        )


def _check_id_is_own(run: Run, actor: str, request: str) -> None:
    """Refuse an id that another person uses."""
    for filed in run.request_records():
        if filed.request == request and not same_address(actor, filed.filed_by):
            raise InputError(f"another person has filed a request {request}: it needs another id")
