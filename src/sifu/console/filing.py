"""What requesters may file: for whom, under which terms, and what an error tells them of others."""

from __future__ import annotations

import datetime
import re
from collections.abc import Collection, Sequence

from sifu.choices import TermsGiven
from sifu.console.run_at_desk import RunAtDesk
from sifu.console.tokens import TERMS_OF_REQUESTERS, NotAllowedError, Token
from sifu.core.spec import Spec
from sifu.errors import InputError
from sifu.requests.approvals import POSTED, approvals_needed, pending_requests, unapproved
from sifu.store.clock import same_person


def check_terms(who: Token, spec: Spec, terms: TermsGiven) -> None:
    """Requesters ask for clients or records, and for more protection than is usual here, never for less."""
    others = sorted(set(terms) - set(TERMS_OF_REQUESTERS))
    if others:
        raise NotAllowedError(
            f"your roles ({', '.join(who.roles)}) allow {', '.join(TERMS_OF_REQUESTERS)}; an operator sets "
            f"{', '.join(others)}"
        )
    for name, usual in (("epsilon", spec.privacy.epsilon), ("delta", spec.privacy.delta)):
        value = terms.get(name)
        if isinstance(value, float) and value > usual:
            raise NotAllowedError(f"{name} {value:g} protects less than the {usual:g} of this run: ask an operator")
    if terms.get("level") == "none":
        raise NotAllowedError("level none guarantees nothing: ask an operator")


def check_share(run: RunAtDesk, clients: Sequence[str]) -> None:
    """Clients that wait take no part in rounds: before an approval, requesters keep at most half of them out."""
    with run.run.view() as view:
        lacking = unapproved(view.reader) if approvals_needed(view.reader) else None
        held = {
            name
            for row in view.requests
            if row.waits and (lacking is None or row.request in lacking)
            for name in row.clients
        }
        there = {view.clients[index].name for index in view.active} | held
        pending = pending_requests(view.reader, datetime.datetime.now(datetime.UTC))
        posted = {name for row in pending if row.status == POSTED for name in row.clients}
        held = (held | posted | set(view.names_now(list(clients)))) & there
    if 2 * len(held) > len(there):
        raise InputError(
            "this request would leave less than half of the clients in training before anyone has agreed to it: "
            "have earlier requests approved first, or ask an operator to file it"
        )


def check_id_is_own(who: Token, run: RunAtDesk, request: str) -> None:
    """A requester must not learn that an id is taken by another requester, nor change that request."""
    for record in run.run.request_records():
        if record.status.request == request and not is_own(who, record.status.filed_by):
            raise InputError(f"request {request} cannot be filed: use another id")


def tells_of_others(who: Token, run: RunAtDesk, sentence: str, given: Collection[str]) -> bool:
    """Whether a sentence names a client or a request that this person did not name and did not file."""
    with run.run.reader() as reader:
        names = {profile.name for profile in reader.clients()}
    statuses = [record.status for record in run.run.request_records()]
    names |= {status.request for status in statuses if not is_own(who, status.filed_by)}
    return any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", sentence) for name in names - set(given))


def is_own(who: Token, filed_by: str) -> bool:
    """Whether this person filed it."""
    return same_person(who.name) == same_person(filed_by)
