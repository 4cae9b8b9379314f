"""The requests of a run: plan one, ask, decide, carry out, and account for what was done."""

from __future__ import annotations

import datetime
import json
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Unpack

from sifu.api.run_folder import RunFolder
from sifu.api.status import RequestStatus, request_statuses_of
from sifu.choices import LEVELS, Decided, TermsGiven
from sifu.core.request_terms import RequestTerms
from sifu.core.spec import RIDGE
from sifu.errors import InputError, NotCertifiableError, RunBusyError
from sifu.methods.request_plan import plan_request
from sifu.planning.budgets import most_expensive
from sifu.planning.plan import Plan
from sifu.requests.approvals import DEADLINE_DAYS, POSTED, approvals_needed, check_approved, unapproved
from sifu.requests.letters import (
    check_level,
    check_new,
    id_of_signed,
    make_terms,
    post_decision,
    receive,
    take_in,
    terms_of_signed,
)
from sifu.requests.outcome import Outcome, outcome_of
from sifu.requests.request_record import PublicRequest, RequestStep, decide, history_of, public_record
from sifu.requests.worker import Worker
from sifu.run.clients_and_engine import TABLE
from sifu.run.recorded_data import rows_of_identities
from sifu.run.run_view import RunView
from sifu.run.training import ProgressCallback
from sifu.store import keys
from sifu.store.clock import actor_name
from sifu.store.inbox import post
from sifu.store.projection import RequestRow
from sifu.store.reader import RunReader
from sifu.store.remainders import plain_names
from sifu.verify.integrity import check_integrity

CertificateForm = Literal["public", "auditor"]


@dataclass(frozen=True)
class RequestRecord:
    """A request with every step of its life."""

    status: RequestStatus
    steps: tuple[RequestStep, ...]

    def to_mapping(self) -> dict[str, Any]:
        """As plain values, ready for JSON."""
        return asdict(self.status) | {"state": self.status.state, "steps": [asdict(step) for step in self.steps]}


@dataclass(frozen=True)
class Certificate:
    """A signed certificate: its statements in `body`, the operator's key, and the signature over the body."""

    form: CertificateForm
    body: dict[str, Any]
    public_key: str
    signature: str

    def to_mapping(self) -> dict[str, Any]:
        """The content of the certificate's file."""
        return {"body": self.body, "public_key": self.public_key, "signature": self.signature}


class RunRequests(RunFolder):
    """What can be asked of a run, and what became of it."""

    def plan(self, clients: Sequence[str], **terms: Unpack[TermsGiven]) -> Plan:
        """What a request for `clients` would do: node, noise, rounds, level. Changes nothing.

        `terms` that are not given come from the run's spec. Without a `method` the plan is the one that `auto` takes,
        and its `ways` describe the alternatives: level, rounds with an interval, traffic, time, what an attacker gains,
        what is kept, and what it costs those forgotten earlier.
        """
        with self.view() as view:
            wanted = make_terms(view, clients, self._with_row_numbers(view, clients, terms))
            plan = plan_request(view, wanted, controls=True)
            if wanted.records and view.spec.model.kind != RIDGE:
                with suppress(InputError):  # a plan can do without the data; a request needs them
                    self.prepare_records(view.reader, wanted)
            return _with_plain_names(view.reader, plan)

    def plan_of(self, request: str) -> Plan:
        """What a waiting request would do now, planned from exactly the terms it has in the ledger."""
        with self.view() as view:
            rows = {row.request: row for row in view.requests}
            if request not in rows:
                raise _no_such_request(request, rows)
            if not rows[request].waits:
                raise InputError(f"request {request} is {rows[request].status}: there is nothing left to plan")
            return _with_plain_names(view.reader, plan_request(view, rows[request].terms, controls=True))

    def most_expensive(self) -> str:
        """The name of the active client that is most expensive to forget now."""
        with self.snapshot() as reader:
            return most_expensive(RunView(reader))

    def request(
        self,
        clients: Sequence[str],
        request: str | None = None,
        *,
        deadline_days: int = DEADLINE_DAYS,
        actor: str | None = None,
        **terms: Unpack[TermsGiven],
    ) -> str:
        """Put a request for `clients` into the ledger; returns its id.

        The same id in `request` with the same terms again changes nothing. `deadline_days` from now it is overdue.
        `actor` is who asks, by default the name of this account. `terms` that are not given come from the run's spec.
        """
        try:
            writer = self.writer()
        except RunBusyError:
            with self.snapshot() as reader:
                view = RunView(reader)
                wanted = self._new_terms(view, clients, request, terms)
                check_new(view, wanted, request)
            return self._post(wanted, request, deadline_days, actor)
        with writer:
            take_in(writer)
            view = RunView(writer)
            wanted = self._new_terms(view, clients, request, terms)
            return receive(writer, view, wanted, request, deadline_days, actor)

    def _post(self, terms: RequestTerms, request: str | None, deadline_days: int, actor: str | None) -> str:
        """Leave a request in the inbox of a run that another process writes to; it is taken in between rounds."""
        name = request if request is not None else f"r-{secrets.token_hex(4)}"
        letter = terms.to_mapping() | {"deadline_days": deadline_days, "actor": actor_name(actor)}
        post(self.folder, "request", name, letter)
        return name

    def request_signed(self, statement: dict[str, Any]) -> str:
        """Take in the `statement` that a client signed with its node's key (`sifu clients sign`); returns its id.

        What does not count is refused and recorded.
        """
        request = id_of_signed(statement)
        try:
            writer = self.writer()
        except RunBusyError:
            post(self.folder, "signed", request, statement)
            self._check_signed(statement, request)
            return request  # the server takes it in
        with writer:
            post(self.folder, "signed", request, statement)
            refusals = [sentence for sentence in take_in(writer) if sentence.startswith(f"signed {request}: ")]
        if refusals:
            raise InputError(f"refused and recorded: {refusals[0].partition(': ')[2]}")
        return request

    def _check_signed(self, statement: dict[str, Any], request: str) -> None:
        """Say now what the server that writes to the run will find when it opens the letter."""
        try:
            with self.snapshot() as reader:
                check_new(RunView(reader), terms_of_signed(reader, statement), request)
        except InputError as error:
            raise InputError(f"{error}. The running server will refuse it too, and record the refusal") from error

    def decide(
        self, request: str, decision: str, reason: str = "", actor: str | None = None, terms: str | None = None
    ) -> Decided:
        """Record that a waiting `request` was verified, approved, refused or withdrawn, by `actor` and with a `reason`.

        An approval records the digest of the request's terms and counts for these alone. With `terms`, the digest that
        was looked at (`RequestStatus.terms_digest`), the decision is refused if the request has other terms.
        While another process writes to the run, the decision is posted to its inbox and read between rounds.
        """
        name = actor_name(actor)
        try:
            writer = self.writer()
        except RunBusyError:
            with self.snapshot() as reader:
                return "posted" if post_decision(reader, request, decision, reason, name, terms) else "unchanged"
        with writer:
            take_in(writer)
            return "recorded" if decide(writer, request, decision, reason, name, terms) else "unchanged"

    def forget(
        self,
        clients: Sequence[str] | None = None,
        request: str | None = None,
        *,
        compare_scratch: bool = False,
        progress: ProgressCallback | None = None,
        **terms: Unpack[TermsGiven],
    ) -> list[Outcome]:
        """Carry out the queued requests, or one of them, or a new one for `clients`.

        A request of `release = "now"` is done with the model it starts from; rounds to its target follow in this call.

        Without a `method` each is carried out by the way that takes the fewest predicted rounds among those of at least
        `level` (by default `conditional`), the one of the terms that queued requests take, too: a plan below it is
        refused and nothing is changed. `compare_scratch` also trains Scratch for each request, to
        compare the number of rounds. `progress` is called after every round.
        """
        level = terms.get("level")
        if level is not None and level not in LEVELS:
            raise InputError(f"the least level must be one of {', '.join(LEVELS)}, found {level!r}")
        with self.writer() as writer:
            check_integrity(writer)
            take_in(writer)
            view = RunView(writer)
            rows = {row.request: row for row in view.requests}
            wanted = None
            if clients is not None:
                wanted = make_terms(view, clients, self._with_row_numbers(view, clients, terms))
            lacking = unapproved(writer)
            if wanted is None and request is not None and request not in rows:
                raise _no_such_request(request, rows)
            _check_not_settled(view, request)
            if request is not None and request in rows and rows[request].waits:
                check_approved(writer, request)
            if wanted is not None:
                # After an interruption, the same command resumes the request it had begun.
                begun = [row.request for row in view.requests if _is_open(row) and row.terms == wanted]
                request = begun[0] if request is None and begun else request
                check_new(view, wanted, request)
                if request not in rows and approvals_needed(writer):
                    raise InputError(
                        "requests of this run are approved before they are carried out (requests.approval of its "
                        "spec): file it with sifu request, and have it approved with sifu requests decide"
                    )
            elif request is None and not any(
                (_is_open(row) and row.request not in lacking) or row.terms.release == "now" for row in view.requests
            ):
                return []
            keys.load_key(self.folder, writer.value("public_key"))  # a missing key is noticed before the work is done
            worker = Worker(
                writer,
                self.engine(leaving=() if wanted is None or wanted.records else wanted.clients),
                progress,
                engine_again=self.engine_again,
                prepare_records=self.prepare_records,
                digest_of=self._sample_digest_of,
                engine_at=self._engine_at,
            )
            resumed = worker.finish_running()
            if wanted is not None:
                view = RunView(writer)
                if request not in rows:
                    check_level(plan_request(view, wanted, level), level)
                    if wanted.records:
                        self.prepare_records(writer, wanted)
                request = receive(writer, view, wanted, request)
            ready = [row.request for row in writer.requests() if row.waits and row.request not in lacking]
            chosen = [request] if request is not None else ready
            while worker.carry_out_next(level, chosen):
                pass
            carried_out = [name for name in chosen if name not in worker.refused]
            refusals = [f"request {name}: {error}" for name, error in worker.refused.items()]
            if refusals and not carried_out:
                raise NotCertifiableError(refusals[0])
            done = [*(name for name in resumed if name not in carried_out), *carried_out]
            if compare_scratch:
                for name in done:
                    worker.compare_scratch(name)
            if refusals:
                self.measure_held_out(writer)
                raise NotCertifiableError(f"{refusals[0]} Carried out: {', '.join(done)}")
            worker.heal()
            self.measure_held_out(writer)
            if view.spec.groups.rebuild == "now":
                worker.rebuild_groups()
            rows = {row.request: row for row in writer.requests()}
            return [outcome_of(writer, rows[name]) for name in done]

    def _new_terms(self, view: RunView, clients: Sequence[str], request: str | None, given: TermsGiven) -> RequestTerms:
        """The terms of a request that is being made now."""
        terms = make_terms(view, clients, self._with_row_numbers(view, clients, given))
        _check_not_settled(view, request)
        return terms

    def _with_row_numbers(self, view: RunView, clients: Sequence[str], terms: TermsGiven) -> TermsGiven:
        """The terms with row numbers where records are named by identities, as the client's data have them."""
        records = terms.get("records")
        if isinstance(records, str):
            raise InputError(f"records must be a list of identities or row numbers, found {records!r}")
        if records is not None and view.spec.data.name == TABLE:
            records = [str(record) for record in records]  # without data.id a row's number in the file identifies it
        if records is None or not any(isinstance(record, str) for record in records):
            return terms
        if isinstance(clients, str) or len(clients) != 1:
            raise InputError("records are rows of one client's data: name that client alone")
        given = self._own_clients() if self._own_clients else ()
        identities = [record for record in records if isinstance(record, str)]
        rows = [record for record in records if not isinstance(record, str)]
        return {**terms, "records": sorted({*rows, *rows_of_identities(view.reader, clients[0], identities, given)})}

    def outcomes(self) -> list[Outcome]:
        """The outcomes of the requests that are done, in order."""
        with self.snapshot() as reader:
            return [outcome_of(reader, row) for row in reader.requests() if row.status == "done"]

    def request_status(self, request: str) -> str:
        """Of a `request`: `received`, `running` or `done`; `posted` while it waits in the inbox of a run in use."""
        with self.reader() as reader:
            return next((row.status for row in reader.requests() if row.request == request), POSTED)

    def request_record(self, request: str) -> RequestRecord:
        """One request with every step of its life."""
        with self.snapshot() as reader:
            rows = {row.request: row for row in reader.requests()}
            if request not in rows:
                raise _no_such_request(request, rows)
            return _records_of(reader, [rows[request]])[0]

    def request_records(self) -> list[RequestRecord]:
        """Every request with every step of its life, in the order they were received."""
        with self.snapshot() as reader:
            return _records_of(reader, reader.requests())

    def public_record(self) -> list[PublicRequest]:
        """The requests without personal data."""
        with self.reader() as reader:
            return public_record(reader, datetime.datetime.now(datetime.UTC))

    def certificate(self, request: str, form: CertificateForm = "public") -> Certificate:
        """The signed certificate of a `request`, as recorded, in the `form` for the public or for an auditor."""
        with self.reader() as reader:
            text = reader.certificates().get((request, form))
        if text is None:
            raise InputError(f"request {request!r} has no {form} certificate: is it done? See sifu requests list")
        return Certificate(form, **json.loads(text))

    def attestation(self, request: str) -> dict[str, Any]:
        """A `request`'s public certificate as an in-toto statement in a DSSE envelope, signed by the operator."""
        from sifu.api.key_rotation import attest

        with self.reader() as reader:
            return attest(reader, request)


def _records_of(reader: RunReader, rows: Sequence[RequestRow]) -> list[RequestRecord]:
    statuses = request_statuses_of(reader, rows, datetime.datetime.now(datetime.UTC))
    return [RequestRecord(status, tuple(history_of(reader, status.request))) for status in statuses]


def _with_plain_names(reader: RunReader, plan: Plan) -> Plan:
    """A plan for people: clients go by the names that they first joined under."""
    return replace(plan, terms=replace(plan.terms, clients=plain_names(reader, plan.terms.clients)))


def _no_such_request(request: str, rows: dict[str, RequestRow]) -> InputError:
    return InputError(f"there is no request {request!r} in this run; it has {', '.join(rows) or 'none'}")


def _check_not_settled(view: RunView, request: str | None) -> None:
    """A request that was refused or withdrawn is never carried out: saying that it is in the ledger would mislead."""
    for row in view.requests:
        if row.request == request and row.status in ("refused", "withdrawn"):
            raise InputError(f"request {request} was {row.status}: ask again with another id")


def _is_open(row: RequestRow) -> bool:
    """Whether there is something left to be done for a request."""
    return row.waits or row.status == "running"
