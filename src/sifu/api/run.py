"""A run from Python: train, plan, request, forget, verify, export, and look after it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from sifu.api.run_requests import (
    Certificate,
    CertificateForm,
    Released,
    RequestRecord,
    bring_up_to_date,
    carry_out,
    check_not_settled,
    check_signed,
    new_terms,
    records_of,
    row_of,
    with_plain_names,
    worker_of,
)
from sifu.api.safekeeping import attest, back_up, rotate_key, vouch
from sifu.api.status import RunStatus, status_of
from sifu.choices import Decided, TermsGiven
from sifu.core.engine import Engine
from sifu.core.record_commitments import record_commitment
from sifu.core.request_terms import RequestTerms
from sifu.core.spec import Spec
from sifu.errors import InputError, RunBusyError, VerificationError
from sifu.export.exported_models import export_model, released_module
from sifu.methods.registry import plan_request
from sifu.planning.forecast import most_expensive
from sifu.planning.plan import Plan
from sifu.requests.approvals import DEADLINE_DAYS, POSTED
from sifu.requests.erasure import Purge, purge
from sifu.requests.letters import check_new, commitments_of, id_of_signed, post_decision, receive, take_in
from sifu.requests.outcome import Outcome, outcome_of
from sifu.requests.request_record import PublicRequest, decide, public_record
from sifu.run.closed_form_round import let_join
from sifu.run.coupled_replay import EngineWithout
from sifu.run.recorded_data import clients_of_file, identities_of_rows, not_there_yet
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
from sifu.store.reader import RunReader, plain_names
from sifu.store.timestamps import AUTHORITY, check_authority, fetch_timestamps, timestamp_authority
from sifu.store.writer import RunWriter
from sifu.verify.integrity import blaming_damage, check_integrity
from sifu.verify.verification import Verification, verify_run

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class NamedKey:
    """A public key of the operator, and the event that named it."""

    key: str
    since: int


@dataclass(frozen=True)
class OperatorKeys:
    """The operator's public keys in the order they were named, and whether the private one is encrypted at rest."""

    public_keys: tuple[NamedKey, ...]
    encrypted: bool

    def to_mapping(self) -> dict[str, Any]:
        """As plain values, ready for JSON."""
        return asdict(self)


class Run:
    """A run folder and, where training is needed, the engine that goes with it."""

    def __init__(
        self,
        folder: str | Path,
        make_engine: MakeEngine | None = None,
        data_folder: str | Path | None = None,
        *,
        remember: bool = True,
    ) -> None:
        self.folder = Path(folder)
        with RunReader(self.folder) as reader:  # refuses at once what is not a run
            check_known_key(reader)
            if remember:
                remember_key(reader)
        self._engines = RunEngines(self.reader, make_engine, data_folder)
        self._memory = Memory()
        self._views: dict[Any, RunView] = {}

    def reader(self) -> RunReader:
        """A fresh reader, for a with block."""
        return RunReader(self.folder, shared=self._memory)

    def writer(self, *, vouching: bool = False) -> RunWriter:
        """The run for writing, for a with block: no other process can write meanwhile.

        `vouching` opens one whose last events were written without the operator's key, to sign them.
        """
        return RunWriter.open(self.folder, self._memory, vouching=vouching)

    @contextmanager
    def snapshot(self) -> Iterator[RunReader]:
        """A reader that sees one instant of the run; what cannot be read is blamed on damage."""
        with self.reader() as reader, reader.snapshot(), blaming_damage(reader):
            yield reader

    @contextmanager
    def view(self) -> Iterator[RunView]:
        """The run at this instant; what was worked out is used again as long as nothing was written.

        A view has one user at a time, for its reader belongs to one thread: who comes meanwhile gets a new one.
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
        self._views = {state: view}  # after an error it is not used again

    @property
    def spec(self) -> Spec:
        """The merged spec of the run."""
        with self.reader() as reader:
            return Spec.from_mapping(reader.spec)

    @contextmanager
    def _checked_writer(self, before: str = "", *, vouching: bool = False) -> Iterator[RunWriter]:
        """The run for writing, its record checked; refused `before` something that a finished training comes before."""
        with self.writer(vouching=vouching) as writer:
            check_integrity(writer)
            if before and writer.phase != "ready":
                raise InputError(f"the run is still {writer.phase}: finish it first, then {before}")
            yield writer

    @contextmanager
    def _writer_if_free(self) -> Iterator[RunReader]:
        """The run for writing, its letters taken in; a reader while another process writes to it."""
        try:
            writer = self.writer()
        except RunBusyError:
            with self.snapshot() as reader:
                yield reader
            return
        with writer:
            take_in(writer)
            yield writer

    def engine(self, *, newcomers: bool = False, leaving: Collection[str] = ()) -> Engine:
        """The engine of this run, built when it is first needed; `newcomers` may follow the clients it knows.

        Refused where it lacks the data of a client that stays, which those `leaving` do not.
        """
        return self._engines.current(newcomers=newcomers, leaving=leaving)

    def engine_again(self) -> Engine:
        """The engine with the client that is to join again: the prepared one, or the data are read once more."""
        return self._engines.again()

    def engine_without(self, clients: Collection[int]) -> EngineWithout | None:
        """A new engine on the CPU that was never given the data of `clients`; None where one was handed over."""
        return self._engines.without(clients)

    def complete_engine(self) -> Engine:
        """The engine with the data of everyone, also of those who left, unless the rate is no longer one for them."""
        return self._engines.complete()

    def prepare_records(self, reader: RunReader, terms: RequestTerms) -> None:
        """Build the engine with what a client has left without the records of `terms`; refuse one that could not go on.

        `reader` tells who the client is. Done before anything is rolled back: afterwards the client cannot join
        again, nor the request end.
        """
        self._engines.prepare_records(reader, terms)

    def measure_held_out(self, writer: RunWriter) -> None:
        """Note by `writer` how well the current model does on the held-out rows of those who stay, where there are any.

        Rows that cannot be used are no reason to fail: what was trained or forgotten stands.
        """
        self._engines.measure_held_out(writer)

    def train(self, progress: ProgressCallback | None = None) -> Run:
        """Continue the first training until its stop rule holds; nothing to do if it already does.

        `progress` is called after every round, here and in `rebuild` and `join`.
        """
        engine = self.engine()
        with self.writer() as writer:
            if writer.phase == "training":
                check_integrity(writer)
                worker = worker_of(writer, self._engines, engine, progress)
                worker.inbox.take_in()
                worker.train()
                worker.execute_records()
                self.measure_held_out(writer)
        return self

    def rebuild(self, progress: ProgressCallback | None = None) -> int:
        """Build groups again whose models requests erased; returns how many there were. For `progress` see `train`."""
        engine = self.engine()
        with self._checked_writer("rebuild its groups") as writer:
            worker = worker_of(writer, self._engines, engine, progress)
            count = worker.rebuild_groups()
            worker.execute_records()
        return count

    def release(self, progress: ProgressCallback | None = None) -> Released:
        """Bring the released model up to date with who should be in it: every client but those who are left out.

        Left out are the forgotten, and clients that an approved request names which still waits. Approved requests for
        records are executed first. A head in closed form is solved again if it has too few or too many clients.
        Elsewhere clients whose request was refused or withdrawn get as many rounds as were run without them. Requests
        to forget clients are not executed: that is `forget`. For `progress` see `train`.
        """
        with self._checked_writer("release its model") as writer:
            return bring_up_to_date(writer, self._engines, progress)

    def join(
        self, progress: ProgressCallback | None = None, *, file: str | Path | None = None, name: str | None = None
    ) -> list[str]:
        """Let clients join; a head in closed form is solved again with them.

        Open the run with everyone: `sifu.open_run(folder, clients=[*known, *new]).join()`, or give a `file` of the
        kind that the run was trained from: a CSV or Parquet table with the same columns in any order, or an .npz file
        with x and y. Give the client's `name` unless a column or array of the file names it. The run stores the path.
        Each newcomer sends its statistics once. Returns their names; after an interruption the same call continues.
        For `progress` see `train`.
        """
        spec = self.spec
        spec.regime.check_joining()
        source = {} if file is None else {"file": str(Path(file).resolve())}
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
        """What a request for `clients` would do: node, noise, rounds, level. Changes nothing.

        `terms` that are not given come from the run's spec. Without a `method` the plan is the one that `auto` takes,
        and its `ways` describe the alternatives: level, rounds with an interval, traffic, time, what an attacker gains,
        what is kept, and what it costs those forgotten earlier.
        """
        with self.view() as view:
            wanted = new_terms(view, self._engines, clients, terms)
            plan = plan_request(view, wanted)
            if wanted.records and not view.regime.solves:
                with suppress(InputError):  # a plan can do without the data; a request needs them
                    self._engines.prepare_records(view.reader, wanted)
            return with_plain_names(view.reader, plan)

    def plan_of(self, request: str) -> Plan:
        """What a waiting request would do now, planned from exactly the terms it has in the ledger."""
        with self.view() as view:
            row = row_of(view.reader, request)
            if not row.waits:
                raise InputError(f"request {request} is {row.status}: there is nothing left to plan")
            return with_plain_names(view.reader, plan_request(view, row.terms))

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
        nonces: Mapping[str, str] | None = None,
        **terms: Unpack[TermsGiven],
    ) -> str:
        """Put a request for `clients` into the ledger; returns its id.

        With `nonces` (`sifu.new_nonces`) by the identity of each record, the public certificate commits to these
        identities: hand each person its nonce, the run keeps none. The same id in `request` with the same terms again
        changes nothing. `deadline_days` from now it is overdue. `actor` is who asks, by default the name of
        this account. `terms` that are not given come from the run's spec.
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
        letter = wanted.to_mapping() | {"deadline_days": deadline_days, "actor": actor_name(actor)}
        letter |= {"commitments": commitments} if commitments else {}
        post(self.folder, "request", posted, letter)
        return posted

    def committed(self, request: str, nonces: Mapping[str, str]) -> dict[str, str]:
        """Return those `nonces`, by identity, that open a commitment of the `request`, or of its inbox message."""
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

    def record_identities(self, request: str) -> tuple[str, ...]:
        """Return the identities of the records that a waiting `request` names; none where the data have none here."""
        with self.reader() as reader:
            row = row_of(reader, request)
            given = self._engines.clients() if self._engines.clients else ()
            with suppress(InputError):
                return tuple(
                    identities_of_rows(reader, row.clients[0], row.records, given) if row.records and row.waits else ()
                )
        return ()

    def request_signed(self, statement: dict[str, Any]) -> str:
        """Take in the `statement` that a client signed with its node's key (`sifu clients sign`); returns its id.

        What does not count is refused and recorded.
        """
        request = id_of_signed(statement)
        with self._writer_if_free() as reader:
            post(self.folder, "signed", request, statement)
            if not isinstance(reader, RunWriter):
                check_signed(reader, statement, request)
                return request  # the server takes it in
            refusals = [sentence for sentence in take_in(reader) if sentence.startswith(f"signed {request}: ")]
        if refusals:
            raise InputError(f"refused and recorded: {refusals[0].partition(': ')[2]}")
        return request

    def decide(
        self, request: str, decision: str, reason: str = "", actor: str | None = None, terms: str | None = None
    ) -> Decided:
        """Record that a waiting `request` was verified, approved, refused or withdrawn, by `actor` and with a `reason`.

        An approval records the digest of the request's terms and counts for these alone. With `terms`, the digest that
        was looked at (`RequestStatus.terms_digest`), the decision is refused if the request has other terms.
        While another process writes to the run, the decision is posted to its inbox and read between rounds.
        """
        name = actor_name(actor)
        with self._writer_if_free() as reader:
            if isinstance(reader, RunWriter):
                return "recorded" if decide(reader, request, decision, reason, name, terms) else "unchanged"
            return "posted" if post_decision(reader, request, decision, reason, name, terms) else "unchanged"

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
        """Carry out the queued requests, or one of them, or a new one for `clients`.

        A request of `release = "now"` is done with the model it starts from; rounds to its target follow in this call.

        Without a `method` each is carried out by the way that takes the fewest predicted rounds among those of at least
        `level` (by default `conditional`), the one of the terms that queued requests take, too: a plan below it is
        refused and nothing is changed. `compare_scratch` also trains Scratch for each request, to
        compare the number of rounds. `progress` is called after every round. For `nonces` see `request`.
        """
        with self._checked_writer() as writer:
            return carry_out(writer, self._engines, clients, request, terms, compare_scratch, progress, nonces)

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
            return records_of(reader, [row_of(reader, request)])[0]

    def request_records(self) -> list[RequestRecord]:
        """Every request with every step of its life, in the order they were received."""
        with self.snapshot() as reader:
            return records_of(reader, reader.requests())

    def public_record(self) -> list[PublicRequest]:
        """The requests without personal data."""
        with self.reader() as reader:
            return public_record(reader, current_time())

    def certificate(self, request: str, form: CertificateForm = "public") -> Certificate:
        """The signed certificate of a `request`, as recorded, in the `form` for the public or for an auditor."""
        with self.reader() as reader:
            text = reader.certificates().get((request, form))
            if text is None:
                raise no_certificate(reader, request, form)
        return Certificate(form, **json.loads(text))

    def attestation(self, request: str) -> dict[str, Any]:
        """A `request`'s public certificate as an in-toto statement in a DSSE envelope, signed by the operator."""
        with self.reader() as reader:
            return attest(reader, request)

    def status(self) -> RunStatus:
        """Clients, rounds, Psi, kept models and requests."""
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

        The ledger must be signed with `public_key` where one is given. An `anchor`, and the checkpoints in files that
        `witnesses` kept, must be in the chain; timestamps must be signed by the `authority` whose certificates a PEM
        file holds.
        """
        return verify_run(self.folder, public_key, anchor, witnesses, authority)

    def timestamp(self, authority: str | None = None) -> list[str]:
        """Fetch the RFC 3161 timestamps that are missing; returns what they are of.

        From the `authority` at this address, or from the one that SIFU_TIMESTAMP names.
        """
        address = check_authority(authority) if authority else timestamp_authority()
        if address is None:
            raise InputError(f"name a timestamp authority: sifu --timestamp URL timestamp DIR, or set {AUTHORITY}")
        with self._checked_writer() as writer:
            came, missing, reason = fetch_timestamps(writer, address)
        if missing:
            raise InputError(f"{address} gave no timestamp ({reason}): nothing was lost, try again later")
        return came

    def export(self, path: str | Path) -> Path:
        """Write the current released model as safetensors, and its description to a second file with .json added.

        A path that ends in .onnx becomes an ONNX file, which holds the same description. Where groups tune the network,
        what they tuned is in a third file, with .networks added.
        """
        with self.reader() as reader:
            return export_model(reader, Path(path), self._engines)

    def model(self) -> nn.Module:
        """The current released model as a torch module: `model(x)` are the scores of raw samples.

        A named kind is a `LoadedModel`. A module of your own is made by the factory that `open_run(..., model=...)` was
        given, and computes as the recorded accuracy was: batch normalisation takes the statistics of the current batch.
        """
        with self.reader() as reader:
            return released_module(reader, self._engines.model)

    def anchor(self) -> str:
        """`SEQ:HASH` of the last event, to be published or kept elsewhere."""
        with self.reader() as reader:
            return reader.value("head")

    def keys(self) -> OperatorKeys:
        """The operator's public keys with the event each was named by, and whether the private one is encrypted."""
        with self.reader() as reader:
            named = tuple(NamedKey(key, seq) for seq, key in keys_of(reader))
        return OperatorKeys(named, keys.is_encrypted(self.folder))

    def rotate_key(self, brought: str | Path | None = None) -> str:
        """Replace the operator's key by a new one or the one `brought` in a PEM file; returns the new public key."""
        with self.writer() as writer:
            return rotate_key(writer, None if brought is None else Path(brought))

    def sign(self, *, clock: bool = False) -> tuple[int, int] | None:
        """Vouch for events that were written without the operator's key, and for a run whose file `head` is gone.

        With `clock`, say that the clock is right now although it contradicts the last event.
        """
        with self._checked_writer(vouching=True) as writer:
            return vouch(writer, clock=clock)

    def backup(self, file: str | Path) -> str:
        """Write the whole run into one file; returns the anchor of that state, to be kept elsewhere."""
        with self._checked_writer() as writer:
            return back_up(writer, Path(file))

    def purge(self, *, figures: bool = False) -> Purge:
        """Permanently erase what still holds an uncovered part of anyone forgotten; says what remains and why.

        With `figures` also what certificates by noise rest on: drifts, Psi, sigma and the auditor's certificates. The
        run is verified first, which is the last time for these certificates; this cannot be undone.
        """
        verified = None
        if figures:
            with self._checked_writer():
                pass  # a writer first finishes an erasure that was interrupted, which does not verify half-way
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
    """What changes with a file, if it is there."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
