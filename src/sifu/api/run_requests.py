"""Terms, execution and records of requests, for the calls of `sifu.Run`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sifu.choices import LEVELS, TermsGiven
from sifu.core.operator_words import TABLE
from sifu.core.request_terms import Terms
from sifu.core.spec.sections import IMAGE_FEATURES
from sifu.errors import InputError, NotCertifiableError
from sifu.methods.registry import plan_request
from sifu.planning.plan import Plan
from sifu.requests.failures import noting_failure
from sifu.requests.filing import check_level, check_new, make_terms, receive
from sifu.requests.messages import ingest, terms_of_signed
from sifu.requests.outcome import Outcome, outcome_of
from sifu.requests.request_record import row_of
from sifu.requests.worker import Worker
from sifu.run.closed_form_round import RecordedSolve
from sifu.run.kept_statistics import KeptStatistics
from sifu.run.recorded_data import rows_of_identities
from sifu.run.run_engines import RunEngines
from sifu.run.run_view import RunView
from sifu.run.training import ProgressCallback
from sifu.store import keys
from sifu.store.given_approvals import approvals_needed, check_approved, unapproved
from sifu.store.projection import RequestRow
from sifu.store.reader import RunReader, plain_name, plain_names
from sifu.store.release_files import released_model, released_node
from sifu.store.writer import RunWriter


def execute(
    writer: RunWriter,
    engines: RunEngines,
    clients: Sequence[str] | None,
    request: str | None,
    terms: TermsGiven,
    progress: ProgressCallback | None,
    nonces: Mapping[str, str] | None = None,
    filed: Callable[[str], None] | None = None,
) -> list[Outcome]:
    """Execute all queued requests, one of them, or a new one (see `Run.forget`)."""
    level = terms.get("level")
    if level is not None and level not in LEVELS:
        raise InputError(f"level must be one of {', '.join(LEVELS)}, found {level!r}")
    ingest(writer)
    view = RunView(writer)
    rows = {row.request: row for row in view.requests}
    wanted = None if clients is None else new_terms(view, engines, clients, terms)
    lacking = unapproved(writer)
    if wanted is None and request is not None:
        row_of(writer, request)
    check_not_settled(view, request)
    if request is not None and request in rows and rows[request].waits:
        check_approved(writer, request)
    if wanted is not None:
        # After an interruption, the same command resumes the request it had begun.
        begun = [row.request for row in view.requests if row.is_open and row.terms == wanted]
        request = begun[0] if request is None and begun else request
        check_new(view, wanted, request)
        if request not in rows and approvals_needed(writer):
            raise InputError(
                "requests of this run need approval before they are executed (requests.approval in its spec): file "
                "the request with sifu request and have it approved with sifu decide"
            )
    elif request is None and not any(row.is_open and row.request not in lacking for row in view.requests):
        return []
    keys.load_key(writer.folder, writer.value("public_key"))  # fail before the work if the key is missing
    leaving = () if wanted is None or wanted.records else wanted.clients
    earlier = released_model(writer) if released_node(writer) == writer.tip else None
    needs_data = wanted is not None and bool(wanted.records)
    with noting_failure(writer, _first_due(view, request, lacking)):
        engine = engines.for_requests(writer, leaving, needs_data=needs_data)
    worker = Worker(writer, engine, progress, engines=engines)
    if wanted is not None:
        view = RunView(writer)
        plan = None
        if request not in rows and not any(row.status == "running" for row in view.requests):
            plan = plan_request(view, wanted, level)
            check_level(plan, level)
            if wanted.records:
                engines.prepare_records(writer, wanted)
        request = receive(writer, view, wanted, request, nonces=nonces)
        if filed is not None and request not in rows:
            filed(request)
        if plan is not None:
            worker.hand_on(request, plan, wanted, level)
    resumed = worker.finish_running()
    ready = [row.request for row in writer.requests() if row.waits and row.request not in lacking]
    first = worker.execute_records(besides=request) if request is not None else []
    chosen = [request] if request is not None else ready
    while worker.execute_next(level, chosen):
        pass
    executed = [*first, *(name for name in chosen if name not in worker.refused)]
    refusals = [f"request {name}: {error}" for name, error in worker.refused.items()]
    if refusals and not executed:
        raise NotCertifiableError(refusals[0])
    done = [*(name for name in resumed if name not in executed), *executed]
    # Computing a network's features for held-out rows would take far longer than the request itself.
    measured = not isinstance(engine, KeptStatistics) or view.spec.features.kind not in IMAGE_FEATURES
    if refusals:
        if measured:
            engines.measure_held_out(writer)
        raise NotCertifiableError(f"{refusals[0]} Executed: {', '.join(done)}")
    before = engines.measure_held_out(writer, earlier) if measured else None
    worker.rebuild_groups()
    rows = {row.request: row for row in writer.requests()}
    outcomes = [outcome_of(writer, rows[name]) for name in done]
    return [*outcomes[:-1], *(replace(outcome, held_out_before=before) for outcome in outcomes[-1:])]


@dataclass(frozen=True)
class Updated:
    """The released model after `Run.update`.

    Attributes:
        rounds: Number of solves, or 0 if the model was up to date.
        clients: Number of clients in the model.
        returned: Clients that are in the model again.
        left_out: Clients that pending requests leave out.
        executed: Requests for records that were executed first.
        rebuilt: Number of groups that were trained again.
    """

    rounds: int
    clients: int
    returned: tuple[str, ...]
    left_out: tuple[str, ...]
    executed: tuple[str, ...]
    rebuilt: int


def bring_up_to_date(writer: RunWriter, engines: RunEngines, progress: ProgressCallback | None) -> Updated:
    """Solve until the released model contains all clients that it should, and rebuild groups (see `Run.update`)."""
    ingest(writer)
    worker = Worker(writer, engines.current(), progress, engines=engines)
    executed = worker.execute_records()
    view = RunView(writer)
    back = RecordedSolve(worker.engine, writer, view).missing() if view.regime.solves else ()
    rounds, rebuilt = worker.bring_up_to_date(), worker.rebuild_groups()
    engines.measure_held_out(writer)
    view = RunView(writer)
    return Updated(
        rounds,
        int(view.active.size),
        tuple(plain_name(writer, client) for client in sorted(back)) if rounds else (),
        tuple(plain_name(writer, client) for client in sorted(view.left_out)),
        tuple(executed),
        rebuilt,
    )


def new_terms(view: RunView, engines: RunEngines, clients: Sequence[str], given: TermsGiven) -> Terms:
    """Return the terms of a request; identities of records are replaced by row numbers in the client's data."""
    records = given.get("records")
    if isinstance(records, str):
        raise InputError(f"records must be a list of identities or row numbers, found {records!r}")
    if records is not None and view.spec.data.name == TABLE:
        records = [str(record) for record in records]  # without data.id, the row number in the file identifies a row
    if records is not None and any(isinstance(record, str) for record in records):
        if isinstance(clients, str) or len(clients) != 1:
            raise InputError("records need exactly one client: name only the client they belong to")
        own = engines.clients() if engines.clients else ()
        identities = [record for record in records if isinstance(record, str)]
        rows = [record for record in records if not isinstance(record, str)]
        rows = sorted({*rows, *rows_of_identities(view.reader, clients[0], identities, own)})
        given = {**given, "records": rows}
    return make_terms(view, clients, given)


def check_signed(reader: RunReader, statement: dict[str, Any], request: str) -> None:
    """Check a signed request as the running server will check its inbox message."""
    try:
        check_new(RunView(reader), terms_of_signed(reader, statement), request)
    except InputError as error:
        raise InputError(f"{error}. The running server will refuse it too, and record the refusal") from error


def with_plain_names(reader: RunReader, plan: Plan) -> Plan:
    """Return a plan for display: clients have the names that they first joined under."""
    return replace(plan, terms=replace(plan.terms, clients=plain_names(reader, plan.terms.clients)))


def check_not_settled(view: RunView, request: str | None) -> None:
    """Check that a request was not refused or withdrawn, because such a request is never executed."""
    for row in view.requests:
        if row.request == request and row.was_ended:
            raise InputError(f"request {request} was {row.status}: file it again under another id")


def _first_due(view: RunView, request: str | None, lacking: Collection[str]) -> RequestRow | None:
    """Return the request that is executed first, or None if there is none or it is not in the ledger yet."""
    running = [row for row in view.requests if row.status == "running"]
    waiting = [row for row in view.requests if row.waits and row.request not in lacking]
    chosen = waiting if request is None else [row for row in waiting if row.request == request]
    return next(iter([*running, *chosen]), None)
