"""A run from Python: train, plan, request, forget, verify, export."""

from __future__ import annotations

import datetime
import json
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sifu.api.backups import back_up
from sifu.api.key_rotation import rotate_key
from sifu.api.status import status_of
from sifu.choices import Level
from sifu.core.engine import Engine
from sifu.core.spec import Spec
from sifu.errors import InputError, NotCertifiableError, RunBusyError, RunDamagedError
from sifu.launch.federation import clients_from_spec, engine_from_spec, way_to_go_on
from sifu.methods.registry import method_named
from sifu.planning.budgets import most_expensive
from sifu.planning.plan import Plan
from sifu.record.run_view import RunView
from sifu.record.training import ProgressCallback
from sifu.requests.erasure import Purge, purge
from sifu.requests.given_terms import LEVELS, check_level, make_terms
from sifu.requests.mailbox import take_in
from sifu.requests.outcome import Outcome, outcome_of
from sifu.requests.receiving import DEADLINE_DAYS, check_new, receive
from sifu.requests.request_record import decide, history_of, public_record
from sifu.requests.signed_requests import id_of_signed, terms_of_signed
from sifu.requests.worker import Worker
from sifu.store import keys
from sifu.store.actor import actor_name
from sifu.store.database import DATABASE
from sifu.store.files import model_bytes, write_atomically
from sifu.store.inbox import post
from sifu.store.reader import RunReader
from sifu.store.table_rows import RequestRow
from sifu.store.writer import RunWriter
from sifu.theory.facts import ClientProfile
from sifu.verify.anchor import anchor_of
from sifu.verify.integrity import blaming_damage, check_integrity
from sifu.verify.operator_keys import keys_of
from sifu.verify.verification import Verification, verify_run


class Run:
    """A run folder and, where training is needed, the engine that goes with it."""

    def __init__(self, folder: str | Path, make_engine: Callable[[Spec], Engine] | None = None) -> None:
        self.folder = Path(folder)
        RunReader(self.folder).close()  # refuses at once what is not a run
        self._make_engine = make_engine
        self._engine: Engine | None = None
        self._constants: dict[Any, Any] = {}
        self._seen: tuple[Any, RunView] | None = None

    # -- reading -----------------------------------------------------------------------------------------

    def reader(self) -> RunReader:
        """A fresh reader; close it when done."""
        return RunReader(self.folder, constants=self._constants)

    @contextmanager
    def _view(self) -> Iterator[RunView]:
        """The run at this instant; what was worked out is used again as long as nothing was written."""
        files = [self.folder / name for name in (DATABASE, f"{DATABASE}-wal")]
        stamps = [(one.st_ino, one.st_size, one.st_mtime_ns) if (one := _stat(path)) else None for path in files]
        reader = self.reader()
        try:
            with reader.snapshot(), blaming_damage(reader):
                state = (reader.value("head"), *stamps)
                if self._seen is not None and self._seen[0] == state:
                    reader.take_over(self._seen[1].reader)
                    self._seen[1].reader = reader
                else:
                    self._seen = (state, RunView(reader))
                yield self._seen[1]
        except BaseException:
            self._seen = None
            raise
        finally:
            reader.close()

    @property
    def spec(self) -> Spec:
        """The merged spec of the run."""
        reader = self.reader()
        try:
            return Spec.from_mapping(reader.spec)
        finally:
            reader.close()

    def plan(self, clients: Sequence[str], **terms: Any) -> Plan:
        """What a request would do: node, noise, rounds, level. Changes nothing.

        `terms` are those of a request: epsilon, delta, sigma, unit, scope, calibration, retention, reserve,
        method; what is not given comes from the run's spec.
        """
        with self._view() as view:
            asked = make_terms(view.spec, clients, terms)
            return method_named(asked.method).plan(view, asked)

    def most_expensive(self) -> str:
        """The name of the active client whom it costs most to forget now."""
        reader = self.reader()
        try:
            with reader.snapshot(), blaming_damage(reader):
                return most_expensive(RunView(reader))
        finally:
            reader.close()

    def verify(self, public_key: str | None = None, anchor: str | None = None) -> Verification:
        """Recompute every claim of the run from its recorded scalars, offline; an `anchor` must be in the chain."""
        return verify_run(self.folder, public_key, anchor)

    def anchor(self) -> str:
        """`SEQ:HASH` of the last event, to be published or kept elsewhere."""
        reader = self.reader()
        try:
            return anchor_of(reader)
        finally:
            reader.close()

    def status(self) -> dict[str, Any]:
        """Clients, rounds, Psi, kept models and requests, as plain values."""
        with self._view() as view:
            return status_of(view)

    def request_status(self, request: str) -> str:
        """`received`, `running` or `done`; `posted` while it waits in the inbox of a run in use."""
        reader = self.reader()
        try:
            return next((one.status for one in reader.requests() if one.request == request), "posted")
        finally:
            reader.close()

    def request_history(self, request: str) -> list[dict[str, Any]]:
        """Every step of a request with its time and actor."""
        reader = self.reader()
        try:
            return history_of(reader, request)
        finally:
            reader.close()

    def public_record(self) -> list[dict[str, Any]]:
        """The requests without personal data."""
        reader = self.reader()
        try:
            return public_record(reader, datetime.datetime.now(datetime.UTC))
        finally:
            reader.close()

    def certificate(self, request: str, form: str = "public") -> dict[str, Any]:
        """A signed certificate, as recorded."""
        reader = self.reader()
        try:
            found = reader.certificates().get((request, form))
        finally:
            reader.close()
        if found is None:
            raise InputError(f"request {request!r} has no {form} certificate: is it done? See sifu requests")
        content: dict[str, Any] = json.loads(found)
        return content

    def decide(self, request: str, decision: str, reason: str = "", actor: str | None = None) -> bool:
        """Record that a waiting request was verified, refused or withdrawn; False if it was so already."""
        writer = RunWriter.open(self.folder, self._constants)
        try:
            return decide(writer, request, decision, reason, actor)
        finally:
            writer.close()

    def outcomes(self) -> list[Outcome]:
        """What came of the requests that are done, in order."""
        reader = self.reader()
        try:
            with reader.snapshot(), blaming_damage(reader):
                return [outcome_of(reader, one) for one in reader.requests() if one.status == "done"]
        finally:
            reader.close()

    def export(self, path: str | Path) -> Path:
        """Write the current released model as safetensors."""
        target = Path(path)
        if target.is_dir():
            raise InputError(
                f"{target} is a folder: name the file to write, for example {target / 'model.safetensors'}"
            )
        reader = self.reader()
        try:
            if reader.phase not in ("training", "retraining", "ready"):
                raise RunDamagedError(f"{self.folder} is damaged: its phase is {reader.phase!r}")
            if reader.phase != "ready":
                way = way_to_go_on(self.spec, reader.phase)
                raise InputError(
                    f"the run is still {reader.phase}: its current model is not a released one. Finish it first ({way})"
                )
            if not target.parent.is_dir():
                raise InputError(f"there is no folder {target.parent} to write {target.name} into")
            with blaming_damage(reader):
                write_atomically(target, model_bytes(reader.layout, reader.load_model(reader.tip)))
        finally:
            reader.close()
        return target

    # -- writing -----------------------------------------------------------------------------------------

    def engine(self) -> Engine:
        """The engine of this run, built when it is first needed."""
        if self._engine is None:
            spec = self.spec
            if self._make_engine is None:
                self._engine, _ = engine_from_spec(spec, clients_from_spec(spec))
            else:
                self._engine = self._make_engine(spec)
            self._check_engine(self._engine)
        return self._engine

    def _check_engine(self, engine: Engine) -> None:
        reader = self.reader()
        try:
            recorded, layout, outside = reader.clients(), reader.layout, set(reader.facts.get("outside", ()))
        finally:
            reader.close()
        strange = [one for one in engine.facts.outside if one not in outside]
        if strange:  # certificates name what was recorded when the run was begun
            raise InputError(
                f"{self.folder} was not begun with {', '.join(strange)}, and its certificates would not say so: "
                "go on as it was begun"
            )
        if layout != engine.layout:
            raise InputError(
                f"the model is not the one the run was made with: its parameters are {engine.layout.names} of shapes "
                f"{engine.layout.shapes}, recorded {layout.names} of {layout.shapes}"
            )
        different = [a.name for a, b in zip(recorded, engine.clients, strict=False) if not _same_client(a, b)]
        if different or len(recorded) != len(engine.clients):
            raise InputError(
                f"the clients' data are not those the run was made with: {len(engine.clients)} clients, "
                f"{len(recorded)} recorded, first difference at {different[0] if different else 'the end'}"
            )

    def train(self, progress: ProgressCallback | None = None) -> Run:
        """Go on with the first training until its stop rule holds; nothing to do if it already does."""
        engine = self.engine()
        writer = RunWriter.open(self.folder, self._constants)
        try:
            if writer.phase == "training":
                check_integrity(writer)
                worker = Worker(writer, engine, progress)
                worker.mailbox.take_in()
                worker.train()
        finally:
            writer.close()
        return self

    def keys(self) -> dict[str, Any]:
        """The operator's public keys with the event each was named by, and whether the private one is encrypted."""
        reader = self.reader()
        try:
            named = [{"key": key, "since": seq} for seq, key in keys_of(reader)]
        finally:
            reader.close()
        return {"public_keys": named, "encrypted": keys.is_encrypted(self.folder)}

    def rotate_key(self, brought: str | Path | None = None) -> str:
        """Put a new operator's key (or the one in a PEM file) in place of the old; returns the new public key."""
        writer = RunWriter.open(self.folder, self._constants)
        try:
            return rotate_key(writer, None if brought is None else Path(brought))
        finally:
            writer.close()

    def backup(self, file: str | Path) -> str:
        """Write everything the run is into one file; returns the anchor of that state, to be kept elsewhere."""
        writer = RunWriter.open(self.folder, self._constants)
        try:
            check_integrity(writer)
            return back_up(writer, Path(file))
        finally:
            writer.close()

    def purge(self) -> Purge:
        """Erase for good what still holds an uncovered part of anybody forgotten; says what remains and why."""
        writer = RunWriter.open(self.folder, self._constants)
        try:
            check_integrity(writer)
            return purge(writer)
        finally:
            writer.close()

    def request(
        self,
        clients: Sequence[str],
        request: str | None = None,
        *,
        deadline_days: int = DEADLINE_DAYS,
        actor: str | None = None,
        **terms: Any,
    ) -> str:
        """Put a request into the ledger; the same id with the same terms again changes nothing."""
        try:
            writer = RunWriter.open(self.folder, self._constants)
        except RunBusyError:
            return self._post_request(clients, request, terms, deadline_days, actor)
        try:
            take_in(writer)
            view = RunView(writer)
            asked = make_terms(view.spec, clients, terms)
            _check_not_settled(view, request)
            return receive(writer, view, asked, request, deadline_days, actor)
        finally:
            writer.close()

    def request_signed(self, statement: dict[str, Any]) -> str:
        """Take in a request that a client signed with its node's key; what does not count is refused and recorded."""
        request = id_of_signed(statement)
        try:
            writer = RunWriter.open(self.folder, self._constants)
        except RunBusyError:
            post(self.folder, "signed", request, statement)
            self._check_signed(statement, request)
            return request  # the server takes it in
        try:
            post(self.folder, "signed", request, statement)
            refused = [one for one in take_in(writer) if one.startswith(f"signed {request}: ")]
        finally:
            writer.close()
        if refused:
            raise InputError(f"refused and recorded: {refused[0].partition(': ')[2]}")
        return request

    def _check_signed(self, statement: dict[str, Any], request: str) -> None:
        """Say now what the server that writes to the run will find when it opens the letter."""
        reader = self.reader()
        try:
            with reader.snapshot(), blaming_damage(reader):
                check_new(RunView(reader), terms_of_signed(reader, statement), request)
        except InputError as error:
            raise InputError(f"{error}. The running server will refuse it, too, and record that") from error
        finally:
            reader.close()

    def _post_request(
        self,
        clients: Sequence[str],
        request: str | None,
        terms: Mapping[str, Any],
        deadline_days: int,
        actor: str | None,
    ) -> str:
        """Leave a request in the inbox of a run that another process writes to; it is taken in between rounds."""
        reader = self.reader()
        try:
            with reader.snapshot(), blaming_damage(reader):
                view = RunView(reader)
                asked = make_terms(view.spec, clients, terms)
                _check_not_settled(view, request)
                check_new(view, asked, request)
        finally:
            reader.close()
        chosen = request if request is not None else f"r-{secrets.token_hex(4)}"
        letter = asked.to_mapping() | {"deadline_days": deadline_days, "actor": actor_name(actor)}
        post(self.folder, "request", chosen, letter)
        return chosen

    def forget(
        self,
        clients: Sequence[str] | None = None,
        request: str | None = None,
        *,
        min_level: Level | None = None,
        compare_scratch: bool = False,
        progress: ProgressCallback | None = None,
        **terms: Any,
    ) -> list[Outcome]:
        """Carry out the queued requests, or one of them, or a new one for `clients`.

        `min_level` is the least level that is accepted (by default `conditional` for methods that certify):
        a plan below it is refused and nothing is changed. `compare_scratch` also trains Scratch beside each, for
        the rounds it takes.
        """
        if min_level is not None and min_level not in LEVELS:
            raise InputError(f"the least level must be one of {', '.join(LEVELS)}, found {min_level!r}")
        writer = RunWriter.open(self.folder, self._constants)
        try:
            check_integrity(writer)
            take_in(writer)
            view = RunView(writer)
            known = {one.request: one for one in view.requests}
            asked = None if clients is None else make_terms(view.spec, clients, terms)
            if asked is None and request is not None and request not in known:
                raise InputError(f"there is no request {request!r} in this run; it has {', '.join(known) or 'none'}")
            _check_not_settled(view, request)
            if asked is not None:
                # The same command again after an interruption goes on with what it had begun.
                begun = [one.request for one in view.requests if _is_open(one) and one.terms == asked]
                request = begun[0] if request is None and begun else request
                check_new(view, asked, request)
            elif not any(_is_open(one) for one in view.requests) and request is None:
                return []
            keys.load_key(self.folder, writer.value("public_key"))  # a missing key is noticed before the work is done
            worker = Worker(writer, self.engine(), progress)
            resumed = worker.finish_running()
            if asked is not None:
                view = RunView(writer)
                if request not in known:
                    check_level(method_named(asked.method).plan(view, asked), min_level)
                request = receive(writer, view, asked, request)
            chosen = [request] if request is not None else [row.request for row in writer.requests() if row.waits]
            while worker.carry_out_next(min_level, chosen):
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
                raise NotCertifiableError(f"{refusals[0]} Carried out: {', '.join(done)}")
            rows = {row.request: row for row in writer.requests()}
            return [outcome_of(writer, rows[name]) for name in done]
        finally:
            writer.close()


def _stat(path: Path) -> os.stat_result | None:
    """What the file system says of a file, if it is there."""
    try:
        return path.stat()
    except OSError:
        return None


def _check_not_settled(view: RunView, request: str | None) -> None:
    """A request that was refused or withdrawn is never carried out: saying that it is in the ledger would mislead."""
    for one in view.requests:
        if one.request == request and one.status in ("refused", "withdrawn"):
            raise InputError(f"request {request} was {one.status}: ask again with another id")


def _is_open(row: RequestRow) -> bool:
    """Whether there is something left to be done for a request."""
    return row.waits or row.status == "running"


def _same_client(recorded: ClientProfile, found: ClientProfile) -> bool:
    """The same client with the same data, as far as it shows; smoothness may differ in its last digits."""
    plain = all(getattr(recorded, name) == getattr(found, name) for name in ("name", "samples", "local_steps"))
    pairs = ((recorded.smoothness, found.smoothness), (recorded.curvature, found.curvature))
    return plain and all(
        a == b or (a is not None and b is not None and math.isclose(a, b, rel_tol=1e-9)) for a, b in pairs
    )
