"""Taking a request into the ledger, or refusing it with a sentence."""

from __future__ import annotations

from sifu.core.request_terms import RequestTerms, check_request_id
from sifu.errors import InputError
from sifu.methods.request_plan import check_method
from sifu.record.run_view import RunView
from sifu.record.training import uninterrupted
from sifu.requests.deadlines import DEADLINE_DAYS, check_deadline
from sifu.store.actor import actor_name
from sifu.store.remainders import plain_names
from sifu.store.writer import RunWriter
from sifu.theory.facts import IN_PROCESS


def receive(
    writer: RunWriter,
    view: RunView,
    terms: RequestTerms,
    request: str | None,
    deadline_days: int = DEADLINE_DAYS,
    actor: str | None = None,
) -> str:
    """Put a request into the ledger; the same id with the same terms again changes nothing."""
    received = {row.request: row for row in view.requests}
    check_new(view, terms, request)
    if request is not None and request in received:
        return request
    check_deadline(deadline_days)
    number = len(received) + 1
    while request is None:
        request = f"r{number}" if f"r{number}" not in received else None
        number += 1
    content = terms.to_mapping() | {"request": request, "deadline_days": deadline_days}
    with uninterrupted():
        writer.record("request received", {"request": content, "actor": actor_name(actor)})
    return request


def check_new(view: RunView, terms: RequestTerms, request: str | None) -> None:
    """Refuse a request that cannot be received; one that already was, with the same terms, may come again."""
    received = {row.request: row for row in view.requests}
    if request is not None:
        check_request_id(request)
        if request in received:
            if received[request].terms != terms:
                raise InputError(f"request {request} is already in the ledger with other terms: use another id")
            return
    check_method(view, terms)
    if terms.records and (view.facts.identity != IN_PROCESS or view.spec.data.name == "flower"):
        raise InputError(
            f"{terms.clients[0]} keeps its data on its own node, where the operator knows no rows: forget the client, "
            "and let it join again with what it has left under another name and key (sifu clients add)"
        )
    view.new_subjects(terms, view.next_order)
    for row in view.requests:
        both = set(row.clients) & set(terms.clients)
        if row.waits and both:
            names = plain_names(view.reader, sorted(both))
            raise InputError(
                f"client {', '.join(names)} already waits in request {row.request}; to ask with other terms, "
                "withdraw that one first (sifu requests decide)"
            )
    # A client that forgets records stays.
    leaving = [row.clients for row in view.requests if row.waits and not row.records]
    leaving += [] if terms.records else [terms.clients]
    if len(view.forgotten) + sum(map(len, leaving)) >= len(view.clients):
        raise InputError("the requests together would forget every client: nobody would be left to train with")
