"""A run from Python: train, plan, request, forget, verify, export and maintain it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from sifu.api.evaluation import Evaluated, evaluate
from sifu.api.run_requests import (
    Certificate,
    CertificateForm,
    Released,
    RequestRecord,
    bring_up_to_date,
    check_not_settled,
    check_signed,
    execute,
    measure_held_out,
    new_terms,
    records_of,
    row_of,
    with_plain_names,
    worker_of,
)
from sifu.api.safekeeping import attest, back_up, rotate_key, vouch
from sifu.api.status import RunStatus, status_of
from sifu.choices import Decided, MeasuredOn, TermsGiven
from sifu.core.engine import Engine
from sifu.core.record_commitments import record_commitment
from sifu.core.request_terms import RequestTerms
from sifu.core.spec import Spec
from sifu.data.read_once import reading_once
from sifu.errors import InputError, RunBusyError, VerificationError
from sifu.export.exported_models import export_model, released_module
from sifu.methods.registry import plan_request
from sifu.planning.forecast import most_expensive
from sifu.planning.plan import Plan
from sifu.requests.approvals import DEADLINE_DAYS, POSTED
from sifu.requests.certification import settle
from sifu.requests.erasure import Purge, purge
from sifu.requests.messages import check_new, commitments_of, id_of_signed, ingest, post_decision, receive
from sifu.requests.outcome import Outcome, outcome_of
from sifu.requests.request_record import PublicRequest, decide, public_record
from sifu.run.closed_form_round import let_join
from sifu.run.coupled_replay import EngineWithout
from sifu.run.recorded_data import OWNER, clients_of_file, identities_of_rows, not_there_yet
from sifu.run.run_engines import MakeEngine, RunEngines
from sifu.run.run_view import RunView
from sifu.run.training import ProgressCallback
from sifu.store import keys
from sifu.store.actors import actor_name
from sifu.store.clock import current_time
from sifu.store.database import DATABASE, Memory
from sifu.store.erased_figures import no_certificate
from sifu.store.inbox import post
from sifu.store.kept_outside import check_known_key, remember_key
from sifu.store.keys import keys_of
from sifu.store.reader import RunReader, plain_names, readable
from sifu.store.timestamps import AUTHORITY, check_authority, fetch_timestamps, timestamp_authority
from sifu.store.writer import RunWriter
from sifu.verify.integrity import blaming_damage, check_integrity
from sifu.verify.verification import Verification, verify_run

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class NamedKey:
    """A public key of the operator, and the event that introduced it."""

    key: str
    since: int


@dataclass(frozen=True)
class OperatorKeys:
    """The operator's public keys in order of introduction, and whether the private key is encrypted at rest."""

    public_keys: tuple[NamedKey, ...]
    encrypted: bool

    def to_mapping(self) -> dict[str, Any]:
        """Return the keys as plain values, ready for JSON."""
        return asdict(self)


class Run:
    """A run folder and, if training is needed, its engine.

    Args:
        folder: The run folder.
        make_engine: Builder of the engine; by default it is built from the spec.
        data_folder: Folder of a named data set.
        remember: True to remember the operator's key of the run on this account.
    """

    def __init__(
        self,
        folder: str | Path,
        make_engine: MakeEngine | None = None,
        data_folder: str | Path | None = None,
        *,
        remember: bool = True,
    ) -> None:
        self.folder = Path(folder)
        with RunReader(self.folder) as reader:  # raises at once if it is not a run
            check_known_key(reader)
            if remember:
                remember_key(reader)
        self._engines = RunEngines(self.reader, make_engine, data_folder)
        self._memory = Memory()
        self._views: dict[Any, RunView] = {}

    def reader(self) -> RunReader:
        """Return a new reader, for a with block."""
        return RunReader(self.folder, shared=self._memory)

    def writer(self, *, vouching: bool = False) -> RunWriter:
        """Return the run for writing, for a with block; no other process can write meanwhile.

        Args:
            vouching: True to open a run whose last events were written without the operator's key, in order to sign
                them.
        """
        return RunWriter.open(self.folder, self._memory, vouching=vouching)

    @contextmanager
    def snapshot(self) -> Iterator[RunReader]:
        """Yield a reader that sees one instant of the run; unreadable content is reported as damage."""
        with self.reader() as reader, reader.snapshot(), blaming_damage(reader):
            yield reader

    @contextmanager
    def view(self) -> Iterator[RunView]:
        """Yield the run at this instant; derived values are reused as long as nothing is written.

        A view has one user at a time, because its reader belongs to one thread. Concurrent users get views of their
        own.
        """
        stamps = [_stamp(self.folder / name) for name in (DATABASE, f"{DATABASE}-wal")]
        with self.snapshot() as reader:
            state = (reader.value("head"), *stamps)
            view = self._views.pop(state, None)
            if view is None:
                view = RunView(reader)
            else:
                reader.take_over(view.reader)
                view.reader = reader
            yield view
        self._views = {state: view}  # after an error, the view is not reused

    @property
    def spec(self) -> Spec:
        """Merged spec of the run."""
        with self.reader() as reader, readable(self.folder):
            return Spec.from_mapping(reader.spec)

    @contextmanager
    def _checked_writer(self, before: str = "", *, vouching: bool = False) -> Iterator[RunWriter]:
        """Yield the run for writing after checking its record; with `before`, only if training is finished."""
        with self.writer(vouching=vouching) as writer:
            check_integrity(writer)
            if before and writer.phase != "ready":
                raise InputError(f"the run is still {writer.phase}: finish it first, then {before}")
            yield writer

    @contextmanager
    def _writer_if_free(self) -> Iterator[RunReader]:
        """Yield the run for writing after ingesting its inbox; a reader while another process writes to it."""
        try:
            writer = self.writer()
        except RunBusyError:
            with self.snapshot() as reader:
                yield reader
            return
        with writer:
            ingest(writer)
            yield writer

    def engine(self, *, newcomers: bool = False, leaving: Collection[str] = ()) -> Engine:
        """Return the engine of this run, which is built when it is first needed.

        Args:
            newcomers: True if new clients may follow the clients that the run knows.
            leaving: Clients that leave, whose data are not needed.

        Raises:
            InputError: If the data of a remaining client are missing or changed.
        """
        return self._engines.current(newcomers=newcomers, leaving=leaving)

    def engine_again(self) -> Engine:
        """Return the engine with the client that rejoins: the prepared one, or a new one from data read again."""
        return self._engines.again()

    def engine_without(self, clients: Collection[int]) -> EngineWithout | None:
        """Return a new engine on the CPU that never had the data of `clients`; None if the run has a given engine."""
        return self._engines.without(clients)

    def complete_engine(self) -> Engine:
        """Return the engine with everyone's data, including clients that left.

        The data of a client that left may be missing if its loss is too steep for the current rate.
        """
        return self._engines.complete()

    def prepare_records(self, reader: RunReader, terms: RequestTerms) -> None:
        """Build the engine without the records of `terms`, before anything is rolled back.

        After a rollback it would be too late: the client could not rejoin, and the request could not end.

        Args:
            reader: The run.
            terms: Terms of a request for records.

        Raises:
            InputError: If the run could not continue with the client's remaining records.
            NotCertifiableError: If rounding would no longer be bounded.
        """
        self._engines.prepare_records(reader, terms)

    def measure_held_out(self, writer: RunWriter) -> None:
        """Record, with `writer`, the figures of the current model on the held-out rows of the remaining clients.

        Rows that cannot be used are ignored, because the training or the request is already complete.
        """
        measure_held_out(writer, self._engines)

    def train(self, progress: ProgressCallback | None = None) -> Run:
        """Continue the first training until its stop rule holds; do nothing if it already does.

        Args:
            progress: Called after every round.

        Returns:
            The run itself.
        """
        engine = self.engine()
        with self.writer() as writer:
            if writer.phase == "training":
                check_integrity(writer)
                worker = worker_of(writer, self._engines, engine, progress)
                worker.inbox.ingest()
                worker.train()
                worker.execute_records()
                self.measure_held_out(writer)
        return self

    def rebuild(self, progress: ProgressCallback | None = None) -> int:
        """Rebuild the groups whose models requests erased.

        Args:
            progress: Called after every round.

        Returns:
            The number of groups.
        """
        engine = self.engine()
        with self._checked_writer("rebuild its groups") as writer:
            worker = worker_of(writer, self._engines, engine, progress)
            count = worker.rebuild_groups()
            worker.execute_records()
        return count

    def evaluate(self, on: MeasuredOn | None = None) -> Evaluated:
        """Evaluate the current model and record its figures, which `status` then shows.

        Training does this itself. Requests for heads on features of a network do not: computing the features would take
        far longer than the request.

        Args:
            on: "held-out" for held-out rows, "training" for the active clients' training data; by default held-out rows
                if there are any.

        Raises:
            InputError: If there are no such rows, or they cannot be used.
        """
        with self._checked_writer("evaluate its model") as writer:
            return evaluate(writer, self._engines, on)

    def release(self, progress: ProgressCallback | None = None) -> Released:
        """Bring the released model up to date with the clients that should be in it.

        These are all clients except the forgotten ones and those that a waiting, approved request names. Approved
        requests for
        records are executed first. A closed-form head is solved again if it has too few or too many clients. In other
        runs,
        clients whose request was refused or withdrawn get as many rounds as were run without them. Requests to forget
        clients
        are not executed; `forget` does that.

        Args:
            progress: Called after every round.
        """
        with self._checked_writer("release its model") as writer:
            return bring_up_to_date(writer, self._engines, progress)

    @reading_once()
    def join(
        self, progress: ProgressCallback | None = None, *, file: str | Path | None = None, name: str | None = None
    ) -> list[str]:
        """Let clients join; a closed-form head is solved again with them.

        Open the run with all clients, `sifu.open_run(folder, clients=[*known, *new]).join()`, or give a `file`. Each
        newcomer
        sends its statistics once. After an interruption, the same call continues.

        Args:
            progress: Called with the progress of the solve.
            file: File of the format that the run was trained from: a CSV or Parquet table with the same columns in any
                order, or an .npz file with x and y. The run stores its path.
            name: Name of the client, unless a column or array of the file names it.

        Returns:
            The names of the new clients.
        """
        spec = self.spec
        spec.regime.check_joining()
        source = {} if file is None else {"file": str(Path(file).resolve())} | ({OWNER: name} if name else {})
        if file is not None:
            with self.reader() as reader:
                newcomers = not_there_yet(reader, clients_of_file(spec, Path(file), name), source["file"])
            self._engines.expect(newcomers)
        engine = self.engine(newcomers=True)
        with self._checked_writer("let clients join") as writer:
            try:
                names = let_join(writer, engine, self._engines.digest_of, source, progress)
            except InputError:
                self._engines.expect(())
                raise
            self._engines.newcomers = ()
            worker_of(writer, self._engines, engine, progress).execute_records()
            self.measure_held_out(writer)
        return names

    def plan(self, clients: Sequence[str], **terms: Unpack[TermsGiven]) -> Plan:
        """Return what a request for `clients` would do: node, noise, rounds, level. Changes nothing.

        Without a `method`, the plan is the one that `auto` chooses, and its `ways` describe the alternatives: level,
        rounds
        with an interval, traffic, time, the gain of an attacker, what is kept, and the cost to clients forgotten
        earlier.

        Args:
            clients: Names of the clients.
            **terms: Terms that differ from the run's spec.
        """
        with self.view() as view:
            wanted = new_terms(view, self._engines, clients, terms)
            plan = plan_request(view, wanted)
            if wanted.records and not view.regime.solves:
                with suppress(InputError):  # a plan does not need the data; a request does
                    self._engines.prepare_records(view.reader, wanted)
            return with_plain_names(view.reader, plan)

    def plan_of(self, request: str) -> Plan:
        """Return what a waiting `request` would do now, with exactly the terms it has in the ledger."""
        with self.view() as view:
            row = row_of(view.reader, request)
            if not row.waits:
                raise InputError(f"request {request} is {row.status}: it needs no plan any more")
            return with_plain_names(view.reader, plan_request(view, row.terms))

    def most_expensive(self) -> str:
        """Return the name of the active client that is most expensive to forget now."""
        with self.snapshot() as reader:
            return most_expensive(RunView(reader))

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
            request: Id of the request; by default a new one. The same id with the same terms again changes nothing.
            deadline_days: Days until the deadline.
            actor: Name of the person who asks; by default that of this account.
            nonces: Nonce by identity of each record (`sifu.new_nonces`). The public certificate then commits to these
                identities. Give each person the nonce; the run keeps none.
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

    def committed(self, request: str, nonces: Mapping[str, str]) -> dict[str, str]:
        """Return the `nonces`, by identity, that open a commitment of the `request`, or of its inbox message."""
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
        """End a running request with the model that it has reached, because its rounds cannot be finished.

        A request runs from its rollback to its certificate. If clients on other machines can never finish its rounds,
        every attempt fails in the same way; settling it certifies the current model and makes the run usable again.

        Args:
            request: Id of the request.
            reason: Why its rounds cannot be finished; it is recorded.

        Returns:
            The level of the request.
        """
        with self._checked_writer() as writer:
            return settle(writer, request, reason)

    def record_identities(self, request: str) -> tuple[str, ...]:
        """Return the identities of the records that a waiting `request` names; none if the data have none here."""
        with self.reader() as reader:
            row = row_of(reader, request)
            given = self._engines.clients() if self._engines.clients else ()
            with suppress(InputError):
                return tuple(
                    identities_of_rows(reader, row.clients[0], row.records, given) if row.records and row.waits else ()
                )
        return ()

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
                return request  # the server ingests it
            refusals = [sentence for sentence in ingest(reader) if sentence.startswith(f"signed {request}: ")]
        if refusals:
            raise InputError(f"refused and recorded: {refusals[0].partition(': ')[2]}")
        return request

    def decide(
        self, request: str, decision: str, reason: str = "", actor: str | None = None, terms: str | None = None
    ) -> Decided:
        """Record a decision on a waiting request; while another process writes to the run, post it to the inbox.

        An approval records the digest of the request's terms and counts for these terms only.

        Args:
            request: Id of the request.
            decision: verified, approved, refused or withdrawn.
            reason: Reason, which a refusal needs.
            actor: Name of the person who decides; by default that of this account.
            terms: Digest of the terms that were inspected (`RequestStatus.terms_digest`). The decision is refused if
                the request has other terms.
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
        compare_scratch: bool = False,
        progress: ProgressCallback | None = None,
        nonces: Mapping[str, str] | None = None,
        **terms: Unpack[TermsGiven],
    ) -> list[Outcome]:
        """Execute the queued requests, or one of them, or a new one for `clients`.

        Without a `method`, each request is executed by the method with the fewest predicted rounds among those that
        reach at
        least `level` (by default `conditional`). `level` is the only one of the terms that also applies to queued
        requests. A
        plan below it is refused and nothing is changed. A request with `release = "now"` is done with its starting
        model; the
        rounds to its target follow in this call.

        Args:
            clients: Names of the clients of a new request.
            request: Id of the request.
            compare_scratch: True to train Scratch for each request as well, to compare the number of rounds.
            progress: Called after every round.
            nonces: As for `request`.
            **terms: Terms that differ from the run's spec.

        Returns:
            The outcomes of the executed requests.
        """
        with self._checked_writer() as writer:
            return execute(writer, self._engines, clients, request, terms, compare_scratch, progress, nonces)

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes of the finished requests, in order."""
        with self.snapshot() as reader:
            return [outcome_of(reader, row) for row in reader.requests() if row.status == "done"]

    def request_status(self, request: str) -> str:
        """Return the status of a `request`, such as received, running or done; posted while it waits in the inbox."""
        with self.reader() as reader:
            return next((row.status for row in reader.requests() if row.request == request), POSTED)

    def request_record(self, request: str) -> RequestRecord:
        """Return one `request` with all steps of its life."""
        with self.snapshot() as reader:
            return records_of(reader, [row_of(reader, request)])[0]

    def request_records(self) -> list[RequestRecord]:
        """Return all requests with all steps of their lives, in the order of reception."""
        with self.snapshot() as reader:
            return records_of(reader, reader.requests())

    def public_record(self) -> list[PublicRequest]:
        """Return the requests without personal data."""
        with self.reader() as reader:
            return public_record(reader, current_time())

    def certificate(self, request: str, form: CertificateForm = "public") -> Certificate:
        """Return the recorded certificate of a `request`, in the `form` for the public or for an auditor."""
        with self.reader() as reader:
            text = reader.certificates().get((request, form))
            if text is None:
                raise no_certificate(reader, request, form)
        return Certificate(form, **json.loads(text))

    def attestation(self, request: str) -> dict[str, Any]:
        """Return a `request`'s public certificate as an in-toto statement in a signed DSSE envelope."""
        with self.reader() as reader:
            return attest(reader, request)

    def status(self) -> RunStatus:
        """Return clients, rounds, Psi, kept models and requests."""
        with self.view() as view:
            return status_of(view)

    def verify(
        self,
        public_key: str | None = None,
        anchor: str | None = None,
        witnesses: Sequence[str | Path] = (),
        authority: str | Path | None = None,
    ) -> Verification:
        """Recompute every claim of the run from its recorded scalars, offline.

        Args:
            public_key: The operator's public key (hex) that the ledger must be signed with, if it is known.
            anchor: Head of an earlier state, which must be in the chain.
            witnesses: Files with checkpoints that witnesses kept, which must be in the chain.
            authority: PEM file with the certificates of the authority that must have signed the timestamps.
        """
        return verify_run(self.folder, public_key, anchor, witnesses, authority)

    def timestamp(self, authority: str | None = None) -> list[str]:
        """Fetch missing RFC 3161 timestamps.

        Args:
            authority: Address of the authority; by default the one in SIFU_TIMESTAMP.

        Returns:
            The names of the new timestamps.
        """
        address = check_authority(authority) if authority else timestamp_authority()
        if address is None:
            raise InputError(
                f"no timestamp authority is set: run sifu --timestamp URL timestamp DIR, or set {AUTHORITY}"
            )
        with self._checked_writer() as writer:
            came, missing, reason = fetch_timestamps(writer, address)
        if missing:
            raise InputError(f"{address} gave no timestamp ({reason}): nothing was lost; try again later")
        return came

    def export(self, path: str | Path) -> Path:
        """Write the current released model as safetensors, and its description to a second file with .json added.

        If groups tune the network, their networks are written to a third file, with .networks added.

        Args:
            path: File to write; one that ends in .onnx becomes an ONNX file, which holds the same description.
        """
        with self.reader() as reader:
            return export_model(reader, Path(path), self._engines)

    def model(self) -> nn.Module:
        """Return the current released model as a torch module: `model(x)` returns the scores of raw samples.

        A named kind becomes a `LoadedModel`. A module of your own is made by the factory passed to `open_run(...,
        model=...)`,
        and computes as for the recorded accuracy: batch normalisation uses the statistics of the current batch.
        """
        with self.reader() as reader:
            return released_module(reader, self._engines.model)

    def anchor(self) -> str:
        """Return `SEQ:HASH` of the last event, to be published or kept elsewhere."""
        with self.reader() as reader:
            return reader.value("head")

    def keys(self) -> OperatorKeys:
        """Return the operator's public keys with their events, and whether the private key is encrypted."""
        with self.reader() as reader:
            named = tuple(NamedKey(key, seq) for seq, key in keys_of(reader))
        return OperatorKeys(named, keys.is_encrypted(self.folder))

    def rotate_key(self, brought: str | Path | None = None) -> str:
        """Replace the operator's key by a new one, or by the one `brought` in a PEM file; return the new public key."""
        with self.writer() as writer:
            return rotate_key(writer, None if brought is None else Path(brought))

    def sign(self, *, clock: bool = False) -> tuple[int, int] | None:
        """Sign events that were written without the operator's key, and rewrite the file `head` if it is missing.

        Args:
            clock: True to state that the clock is right now although it contradicts the last event.

        Returns:
            The first and the last of these events; None if all were signed.
        """
        with self._checked_writer(vouching=True) as writer:
            return vouch(writer, clock=clock)

    def backup(self, file: str | Path) -> str:
        """Write the whole run into one `file`; return the anchor of that state, to be kept elsewhere."""
        with self._checked_writer() as writer:
            return back_up(writer, Path(file))

    def purge(self, *, figures: bool = False) -> Purge:
        """Permanently erase what still holds an uncovered part of any forgotten client; return what remains and why.

        Args:
            figures: True to erase also what certificates by noise rest on: drifts, Psi, sigma and the auditor's
                certificates. The run is verified first, which is the last time these certificates can be verified. This
                cannot be undone.
        """
        verified = None
        if figures:
            with self._checked_writer():
                pass  # opening a writer finishes an interrupted erasure, which would not verify half-done
            with self.reader() as reader:
                verified = reader.value("head")
            if problems := self.verify().problems:
                raise VerificationError(
                    f"{self.folder} does not verify, so nothing was erased. {len(problems)} problem(s), the first: "
                    f"{problems[0]}"
                )
        with self._checked_writer() as writer:
            return purge(writer, verified)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return inode, size and modification time of a file; None if it does not exist."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
