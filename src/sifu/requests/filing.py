"""Terms of a new request, checks against the run and its plan, and reception as an event of the ledger."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sifu.choices import LEVELS, Level, TermsGiven
from sifu.core.operator_words import LAST_CLIENT
from sifu.core.record_commitments import commitments_to
from sifu.core.request_terms import AUTO, TERMS, Terms, check_request_id
from sifu.core.spec import Spec
from sifu.errors import IdInUseError, InputError, NotCertifiableError
from sifu.methods.registry import method_for
from sifu.planning.plan import Plan, least_level
from sifu.requests.deadlines import DEADLINE_DAYS, check_deadline
from sifu.run.run_view import RunView
from sifu.store.actors import actor_name
from sifu.store.projection import NewEvent
from sifu.store.reader import RunReader, plain_names
from sifu.store.writer import RunWriter
from sifu.theory.facts import IN_PROCESS


def make_terms(view: RunView, clients: Sequence[str], given: TermsGiven) -> Terms:
    """Return the terms of a request: the `given` terms, and the spec's defaults for all other terms.

    Earlier names of clients are replaced by their current names.
    """
    spec = view.spec
    chosen = {name: value for name, value in given.items() if value is not None}
    if "records" in chosen:
        chosen["records"] = _rows(chosen["records"])
    names = clients if isinstance(clients, str) else view.names_now(clients)
    return Terms.from_mapping(_usual(spec) | chosen | {"clients": names})


def usual_terms(spec: Spec, clients: Sequence[str]) -> Terms:
    """Return the terms of a request for these clients with the spec's defaults."""
    return Terms.from_mapping(_usual(spec) | {"clients": list(clients)})


def _usual(spec: Spec) -> dict[str, Any]:
    return {name: value for name, value in asdict(spec.privacy).items() if name in TERMS}


def _rows(records: Any) -> Any:
    """Return row numbers as a list; refuse an empty one, which would mean forgetting the whole client."""
    rows = records.tolist() if hasattr(records, "tolist") else records
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        return rows
    if not rows:
        raise InputError("no records are named: give the records to forget, or leave records out to forget the client")
    return list(rows)


def check_level(plan: Plan, level: Level | None) -> None:
    """Check that a plan reaches the required level, and the demanded guarantee against observers of all releases.

    Raises:
        NotCertifiableError: If the plan misses the level or the guarantee.
    """
    least = least_level(plan.terms, level)
    if LEVELS.index(plan.level) < LEVELS.index(least):
        wanted = {"failed"} if least == "conditional" else {"failed", "assumed"}
        reasons = " ".join(premise.statement for premise in plan.premises if premise.status in wanted)
        raise NotCertifiableError(
            f"the request can only be executed at level {plan.level!r}, below the required level {least!r} "
            f"(see --level): nothing was changed. {reasons}"
        )
    check_before_after(plan)


def check_before_after(plan: Plan) -> None:
    """Check that a plan reaches the guarantee against observers of all releases that its terms demand, if any."""
    demanded, reached = plan.terms.before_after_budget, plan.before_after
    if demanded is None or (reached is not None and reached.epsilon <= demanded[0]):
        return
    found = "no guarantee is proven" if reached is None else f"only {reached.words} is proven"
    raise NotCertifiableError(
        f"against an observer who kept earlier releases {found}, but ({demanded[0]:g}, {demanded[1]:g}) was demanded "
        "(see --before-after): nothing was changed"
    )


def receive(
    writer: RunWriter,
    view: RunView,
    terms: Terms,
    request: str | None,
    deadline_days: int = DEADLINE_DAYS,
    actor: str | None = None,
    nonces: Mapping[str, str] | None = None,
    commitments: Sequence[str] = (),
) -> str:
    """Record a request in the ledger, and return its id; repeating an id with the same terms changes nothing.

    Args:
        writer: Writer of the run.
        view: Current view of the run.
        terms: Terms of the request.
        request: Id of the request, by default the next free `r1`, `r2`, ...
        deadline_days: Days until the deadline.
        actor: Name of the person who files the request, by default the current user.
        nonces: Nonce of each record, by the record's identity; used to compute `commitments` if these are not given.
        commitments: Commitments to the records of the request.
    """
    received = {row.request for row in view.requests}
    check_new(view, terms, request)
    if request is not None and request in received:
        return request
    check_deadline(deadline_days)
    numbered = (f"r{number}" for number in itertools.count(len(received) + 1))
    request = request or next(name for name in numbered if name not in received)
    content = terms.to_mapping() | {"request": request, "deadline_days": deadline_days}
    payload: dict[str, Any] = {"request": content, "actor": actor_name(actor)}
    if commitments := commitments or commitments_of(view.reader, terms, request, nonces):
        payload["commitments"] = list(commitments)
    writer.record(NewEvent("request received", payload))
    return request


def commitments_of(reader: RunReader, terms: Terms, request: str, nonces: Mapping[str, str] | None) -> list[str]:
    """Return the commitments to the records of a request, or an empty list without nonces."""
    if not nonces:
        return []
    if not 1 <= len(nonces) <= len(terms.records):
        raise InputError(
            f"{len(nonces)} nonces were given for {len(terms.records)} records: give one for each identity"
        )
    return commitments_to(reader.value("run"), request, plain_names(reader, terms.clients)[0], nonces)


def check_new(view: RunView, terms: Terms, request: str | None) -> None:
    """Check that a request can be received; a received request may be repeated with the same terms."""
    received = {row.request: row for row in view.requests}
    if request is not None:
        check_request_id(request)
        if request in received:
            if received[request].terms != terms:
                raise IdInUseError(
                    f"request {request} is already in the ledger ({received[request].status}), with other terms or for "
                    f"rows that left: see sifu requests DIR {request}, and file a new request under another id"
                )
            return
    if terms.method != AUTO:
        method_for(view, terms.method)
    if terms.records and (view.facts.identity != IN_PROCESS or view.spec.data.name == "flower"):
        raise InputError(
            f"{terms.clients[0]} keeps its data on its own node, so the operator cannot name its rows: forget the "
            "client, and let it join again with its remaining records under another name and key (sifu clients add)"
        )
    view.new_subjects(terms, view.next_order)
    for row in view.requests:
        both = set(row.clients) & set(terms.clients)
        if row.waits and both:
            names = plain_names(view.reader, sorted(both))
            raise InputError(
                f"client {', '.join(names)} already waits in request {row.request}: execute that one first (sifu "
                "forget), or withdraw it (sifu decide) and file one request for everything"
            )
    # A client stays if only some of its records are forgotten.
    leaving = [row.clients for row in view.requests if row.waits and not row.records]
    leaving += [] if terms.records else [terms.clients]
    if len(view.forgotten) + sum(map(len, leaving)) >= len(view.clients):
        raise InputError(f"the requests together would forget every client. {LAST_CLIENT}")
