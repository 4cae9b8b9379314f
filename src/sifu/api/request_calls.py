"""Calls about requests: plan, file, decide, execute, and read their records and certificates."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Unpack

from sifu.api.requests import Request, posted_requests, requests_of
from sifu.api.run_folder import RunFolder
from sifu.api.run_requests import (
    check_not_settled,
    check_signed,
    execute,
    new_terms,
    with_plain_names,
)
from sifu.checking.bundle import write_bundle
from sifu.choices import Decided, TermsGiven
from sifu.core.certificate_words import Certificate, CertificateForm
from sifu.core.record_commitments import record_commitment
from sifu.core.request_terms import Terms
from sifu.data.table import reading_once
from sifu.errors import InputError
from sifu.methods.registry import also_left_out, plan_request
from sifu.planning.plan import Plan
from sifu.requests.certification import no_certificate
from sifu.requests.deadlines import DEADLINE_DAYS
from sifu.requests.filing import check_new, commitments_of, receive, usual_terms
from sifu.requests.issue import settle
from sifu.requests.messages import id_of_signed, ingest, post_decision
from sifu.requests.outcome import Outcome, outcome_of
from sifu.requests.request_record import decide, row_of
from sifu.run.few_clients import consequences, staying_without
from sifu.run.recorded_data import identities_of_rows
from sifu.run.run_view import RunView
from sifu.run.training import ProgressCallback
from sifu.store.actors import actor_name
from sifu.store.inbox import post
from sifu.store.reader import names_now, plain_names
from sifu.store.times import current_time
from sifu.store.writer import RunWriter


class RequestCalls(RunFolder):
    """Base class of `sifu.Run`: a run folder with calls that plan, file, decide and execute requests."""

    def plan(self, clients: Sequence[str], **terms: Unpack[TermsGiven]) -> Plan:
        """Return the plan of a request for `clients` (node, noise, rounds, level) without changing anything.

        Without a `method`, the plan is the one that `auto` chooses, and its `ways` describe the alternatives.

        Args:
            clients: Names of the clients.
            **terms: Terms that differ from the run's spec.
        """
        with self.view() as view:
            wanted = new_terms(view, self._engines, clients, terms)
            plan = plan_request(view, wanted)
            if wanted.records and not view.regime.solves:
                with suppress(InputError):  # planning works without the data
                    self._engines.prepare_records(view.reader, wanted)
            return with_plain_names(view.reader, plan)

    def plan_of(self, request: str) -> Plan:
        """Return the current plan of a waiting `request`, with exactly the terms it has in the ledger."""
        with self.view() as view:
            row = row_of(view.reader, request)
            if not row.waits:
                raise InputError(f"request {request} is {row.status}: it no longer needs a plan")
            return with_plain_names(view.reader, plan_request(view, row.terms))

    def request(
        self,
        clients: Sequence[str],
        request: str | None = None,
        *,
        deadline_days: int = DEADLINE_DAYS,
        actor: str | None = None,
        nonces: Mapping[str, str] | None = None,
        **terms: Unpack[TermsGiven],
    ) -> str:
        """Record a request for `clients` in the ledger, or post it to the inbox while another process writes.

        Args:
            clients: Names of the clients.
            request: Id of the request, by default a new one. Repeating an id with the same terms changes nothing.
            deadline_days: Days until the deadline.
            actor: Name of the person who asks, by default the name of this account.
            nonces: Nonce by identity of each record (`sifu.core.record_commitments.new_nonces`). The public
                certificate then commits to these identities. Give each person the nonce; the run keeps none.
            **terms: Terms that differ from the run's spec.

        Returns:
            The id of the request.
        """
        with self._writer_if_free() as reader:
            view = RunView(reader)
            wanted = new_terms(view, self._engines, clients, terms)
            check_not_settled(view, request)
            if isinstance(reader, RunWriter):
                return receive(reader, view, wanted, request, deadline_days, actor, nonces)
            check_new(view, wanted, request)
            posted = request if request is not None else f"r-{secrets.token_hex(4)}"
            commitments = commitments_of(reader, wanted, posted, nonces)
        message = wanted.to_mapping() | {"deadline_days": deadline_days, "actor": actor_name(actor)}
        message |= {"commitments": commitments} if commitments else {}
        post(self.folder, "request", posted, message)
        return posted

    def usual_terms(self, clients: Sequence[str] = ("-",)) -> Terms:
        """Return the terms of a request for `clients` with the defaults of the run's spec."""
        return usual_terms(self.spec, clients)

    def committed(self, request: str, nonces: Mapping[str, str]) -> dict[str, str]:
        """Return the `nonces` that open a commitment of `request`, by identity of the record.

        A request that is not in the ledger yet has no commitments to compare with; all `nonces` are returned.
        """
        with self.reader() as reader:
            seq = reader.steps().get(("request received", request))
            if seq is None:
                return dict(nonces)
            payload, run = reader.payload(seq), reader.value("run")
            client = plain_names(reader, payload["request"]["clients"])[0]
            stated = payload.get("commitments", [])
        return {
            identity: nonce
            for identity, nonce in nonces.items()
            if record_commitment(run, request, client, identity, nonce) in stated
        }

    def settle(self, request: str, reason: str) -> str:
        """End a running request whose rounds cannot be finished, and certify the model that it has reached.

        A request runs from its rollback to its certificate. If clients on other machines can never finish its rounds,
        every attempt fails in the same way. Settling the request makes the run usable again.

        Args:
            request: Id of the request.
            reason: Reason why its rounds cannot be finished, for the ledger.

        Returns:
            The level of the request's certificate.
        """
        with self._checked_writer() as writer:
            return settle(writer, request, reason)

    def record_identities(self, request: str) -> tuple[str, ...]:
        """Return the identities of the records that a waiting `request` names, or () if the data have none."""
        with self.reader() as reader:
            row = row_of(reader, request)
            given = self._engines.clients() if self._engines.clients else ()
            with suppress(InputError):
                return tuple(
                    identities_of_rows(reader, row.clients[0], row.records, given) if row.records and row.waits else ()
                )
        return ()

    def also_left_out(self, request: str) -> str:
        """Describe the data that other approved requests exclude from a waiting `request`'s release, or "" if none."""
        with self.view() as view:
            row = row_of(view.reader, request)
            return also_left_out(view, row.terms) if row.waits else ""

    def request_signed(self, statement: dict[str, Any]) -> str:
        """Ingest the `statement` that a client signed with its node's key (`sifu clients sign`).

        Returns:
            The id of the request.

        Raises:
            InputError: If the statement is invalid; the ledger records the refusal.
        """
        request = id_of_signed(statement)
        with self._writer_if_free() as reader:
            post(self.folder, "signed", request, statement)
            if not isinstance(reader, RunWriter):
                check_signed(reader, statement, request)
                return request  # the running server ingests it
            refusals = [sentence for sentence in ingest(reader) if sentence.startswith(f"signed {request}: ")]
        if refusals:
            raise InputError(f"refused and recorded: {refusals[0].partition(': ')[2]}")
        return request

    def decide(
        self, request: str, decision: str, reason: str = "", actor: str | None = None, terms: str | None = None
    ) -> Decided:
        """Record a decision on a waiting request, or post it to the inbox while another process writes to the run.

        An approval records the digest of the request's terms and counts for these terms only.

        Args:
            request: Id of the request.
            decision: verified, approved, refused or withdrawn.
            reason: Reason for the decision, required for a refusal.
            actor: Name of the person who decides, by default the name of this account.
            terms: Digest of the terms that were inspected (`Request.terms_digest`). The decision is refused if
                the request has other terms.

        Returns:
            "recorded", "posted", or "unchanged" if the same decision was made before.
        """
        name = actor_name(actor)
        with self._writer_if_free() as reader:
            if isinstance(reader, RunWriter):
                return "recorded" if decide(reader, request, decision, reason, name, terms) else "unchanged"
            return "posted" if post_decision(reader, request, decision, reason, name, terms) else "unchanged"

    @reading_once()
    def forget(
        self,
        clients: Sequence[str] | None = None,
        request: str | None = None,
        *,
        progress: ProgressCallback | None = None,
        nonces: Mapping[str, str] | None = None,
        filed: Callable[[str], None] | None = None,
        **terms: Unpack[TermsGiven],
    ) -> list[Outcome]:
        """Execute the queued requests, or one of them, or a new one for `clients`.

        Without a `method`, each request is executed by the method that `auto` chooses among the methods that reach at
        least `level` (by default `conditional`). `level` is the only term that also applies to queued requests. A plan
        below this level is refused, and nothing is changed.

        Args:
            clients: Names of the clients of a new request.
            request: Id of the request.
            progress: Callback invoked after each round.
            nonces: As in `Run.request`.
            filed: Callback that receives the id of a new request when it is in the ledger, before it is executed.
            **terms: Terms that differ from the run's spec.

        Returns:
            The outcomes of the executed requests.
        """
        with self._checked_writer() as writer:
            return execute(writer, self._engines, clients, request, terms, progress, nonces, filed)

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes of the finished requests, in order."""
        with self.snapshot() as reader:
            return [outcome_of(reader, row) for row in reader.requests() if row.status == "done"]

    def request_record(self, request: str) -> Request:
        """Return one `request`, in the ledger or the inbox."""
        with self.snapshot() as reader:
            waiting = {found.request: found for found in posted_requests(reader, current_time())}
            if request in waiting:
                return waiting[request]
            return requests_of(reader, [row_of(reader, request)], current_time())[0]

    def warnings_of(self, request: Request) -> tuple[str, ...]:
        """Return warnings that few clients remain once an open `request` is executed."""
        if request.settled:
            return ()
        with self.view() as view:
            now = names_now(view.reader)
            leaving = [now.get(name, name) for name in request.clients]
            return tuple(consequences(view, staying_without(view, leaving, records=request.records is not None)))

    def request_records(self) -> list[Request]:
        """Return all requests in the ledger, in the order of reception."""
        with self.snapshot() as reader:
            return requests_of(reader, reader.requests(), current_time())

    def certificate(self, request: str, form: CertificateForm = "public") -> Certificate:
        """Return the recorded certificate of a `request`, in the `form` for the public or for an auditor."""
        with self.reader() as reader:
            text = reader.certificates().get((request, form))
            if text is None:
                raise no_certificate(request, form)
        return Certificate(form, **json.loads(text))

    def write_bundle(self, request: str, file: str | Path) -> Path:
        """Verify the run, and write a `request`'s public certificate and the signed chain of events into one `file`."""
        return write_bundle(self.folder, request, Path(file))
