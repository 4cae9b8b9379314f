"""Taking a request into the ledger: its terms with the spec's defaults, or a refusal with a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sifu.choices import LEVELS, Level, TermsGiven
from sifu.core.request_terms import TERMS, RequestTerms, check_request_id
from sifu.core.spec import Spec
from sifu.errors import InputError, NotCertifiableError
from sifu.methods.request_plan import check_method
from sifu.planning.plan import Plan
from sifu.planning.ways import least_level
from sifu.requests.deadlines import DEADLINE_DAYS, check_deadline
from sifu.run.run_view import RunView
from sifu.run.training import uninterrupted
from sifu.store.clock import actor_name
from sifu.store.remainders import plain_names
from sifu.store.writer import RunWriter
from sifu.theory.facts import IN_PROCESS


def make_terms(view: RunView, clients: Sequence[str], given: TermsGiven) -> RequestTerms:
    """The terms of a request: what is given, the spec's defaults for the rest; clients by the names they have now."""
    spec = view.spec
    chosen = {name: value for name, value in given.items() if value is not None}
    if "records" in chosen:
        chosen["records"] = _rows(chosen["records"])
    names = clients if isinstance(clients, str) else view.names_now(clients)
    terms = RequestTerms.from_mapping(_usual(spec) | chosen | {"clients": names})
    check_retention(spec, terms)
    return terms


def usual_terms(spec: Spec, clients: Sequence[str]) -> RequestTerms:
    """The terms of a request for these clients that gives none itself."""
    return RequestTerms.from_mapping(_usual(spec) | {"clients": list(clients)})


def _usual(spec: Spec) -> dict[str, Any]:
    return {name: value for name, value in asdict(spec.privacy).items() if name in TERMS}


def _rows(records: Any) -> Any:
    """Row numbers as a list; naming none is a mistake, since without records a client is forgotten whole."""
    rows = records.tolist() if hasattr(records, "tolist") else records
    if isinstance(rows, Sequence) and not isinstance(rows, str) and not rows:
        raise InputError("no record is named: give the rows to forget, or leave records out to forget the client")
    return list(rows) if isinstance(rows, Sequence) and not isinstance(rows, str) else rows


def check_level(plan: Plan, level: Level | None) -> None:
    """Refuse a plan below the least level accepted."""
    least = least_level(plan.terms, level)
    if LEVELS.index(plan.level) < LEVELS.index(least):
        wanted = {"failed"} if least == "conditional" else {"failed", "assumed"}
        reasons = " ".join(premise.statement for premise in plan.premises if premise.status in wanted)
        raise NotCertifiableError(
            f"the request can only be carried out at level {plan.level!r}, and {least!r} is the least accepted "
            f"(see --level): nothing was changed. {reasons}"
        )


def check_retention(spec: Spec, terms: RequestTerms) -> None:
    """Strict retention would have to erase Gram matrices, which earlier joint certificates are recomputed from."""
    if terms.retention == "strict" and spec.keep.gram_clients > 0:
        raise InputError(
            f"retention strict is not possible in a run that keeps Gram matrices (keep.gram_clients = "
            f"{spec.keep.gram_clients}): they hold the client's part. Use retention paper, or keep.gram_clients = 0"
        )


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
        raise InputError("the requests together would forget every client: none would be left to train with")
