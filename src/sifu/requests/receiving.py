"""Taking a request into the ledger, or refusing it with a sentence."""

from __future__ import annotations

from sifu.core.request_terms import RequestTerms, check_request_id
from sifu.errors import InputError
from sifu.methods.registry import method_named
from sifu.record.run_view import RunView
from sifu.record.training import uninterrupted
from sifu.store.actor import actor_name
from sifu.store.writer import RunWriter

DEADLINE_DAYS = 30
"""A month from the request, unless it says otherwise."""


def receive(
    writer: RunWriter,
    view: RunView,
    asked: RequestTerms,
    request: str | None,
    deadline_days: int = DEADLINE_DAYS,
    actor: str | None = None,
) -> str:
    """Put a request into the ledger; the same id with the same terms again changes nothing."""
    known = {one.request: one for one in view.requests}
    check_new(view, asked, request)
    if request is not None and request in known:
        return request
    if not 0 <= deadline_days <= 36500:
        raise InputError(f"the deadline must be 0 to 36500 days away, found {deadline_days}")
    number = len(known) + 1
    while request is None:
        request = f"r{number}" if f"r{number}" not in known else None
        number += 1
    content = asked.to_mapping() | {"request": request, "deadline_days": deadline_days}
    with uninterrupted():
        writer.record("request received", {"request": content, "actor": actor_name(actor)})
    return request


def check_new(view: RunView, asked: RequestTerms, request: str | None) -> None:
    """Refuse a request that cannot be received; one that already was, with the same terms, may come again."""
    known = {one.request: one for one in view.requests}
    if request is not None:
        check_request_id(request)
        if request in known:
            if known[request].terms != asked:
                raise InputError(f"request {request} is already in the ledger with other terms: use another id")
            return
    method_named(asked.method).check_run(view)
    view.new_subjects(asked, view.next_order)
    for one in view.requests:
        both = set(one.clients) & set(asked.clients)
        if one.waits and both:
            raise InputError(
                f"client {', '.join(sorted(both))} already waits in request {one.request}; to ask with other terms, "
                "withdraw that one first (sifu requests decide)"
            )
    waiting = sum(len(one.clients) for one in view.requests if one.waits)
    if len(view.forgotten) + waiting + len(asked.clients) >= len(view.clients):
        raise InputError("the requests together would forget every client: nobody would be left to train with")
