"""The life of a request: received, rolled back, retrained, certified; each step one event of the ledger."""

from __future__ import annotations

import secrets
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np

from sifu.core.certificate import auditor_form, public_form
from sifu.core.engine import Engine
from sifu.core.ledger import NONCE_BYTES, finite_or_text
from sifu.core.noise import noise_rounding
from sifu.core.premises import Level
from sifu.core.request_terms import RequestTerms, check_request_id
from sifu.errors import InputError
from sifu.methods.base import Start
from sifu.methods.registry import method_named
from sifu.planning.plan import Plan
from sifu.record.run_view import RunView
from sifu.record.training import (
    ProgressCallback,
    RecordedTraining,
    evaluation_row,
    retrain_unrecorded,
    uninterrupted,
)
from sifu.requests.certification import RecordedRequest, nodes_to_erase, payload_of_request, updates_to_erase
from sifu.requests.given_terms import check_level, terms_of
from sifu.store import keys
from sifu.store.actor import actor_name
from sifu.store.client_accuracy import remove_standing
from sifu.store.rows import NodeRow
from sifu.store.updates import NewUpdates, only_clients
from sifu.store.writer import SCRUB_FILE, NewModel, NewRows, RunWriter, utc_now
from sifu.theory.history import NodeKind, PathNode
from sifu.theory.rounding import norm

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
    content = asdict(asked) | {
        "request": request,
        "clients": list(asked.clients),
        "sigma": str(asked.sigma),
        "deadline_days": deadline_days,
    }
    with uninterrupted():
        writer.record("request received", {"request": content, "actor": actor_name(actor)})
    return request


def check_new(view: RunView, asked: RequestTerms, request: str | None) -> None:
    """Refuse a request that cannot be received; one that already was, with the same terms, may come again."""
    known = {one.request: one for one in view.requests}
    if request is not None:
        check_request_id(request)
        if request in known:
            if terms_of(known[request]) != asked:
                raise InputError(f"request {request} is already in the ledger with other terms: use another id")
            return
    method_named(asked.method).check_run(view)
    view.new_subjects(asked, view.next_order)
    for one in view.requests:
        both = set(one.clients) & set(asked.clients)
        if one.waits and both:
            raise InputError(
                f"client {', '.join(sorted(both))} already waits in request {one.request}; to ask with other terms, "
                "withdraw that one first (sifu decide)"
            )
    waiting = sum(len(one.clients) for one in view.requests if one.waits)
    if len(view.forgotten) + waiting + len(asked.clients) >= len(view.clients):
        raise InputError("the requests together would forget every client: nobody would be left to train with")


class Mail(Protocol):
    """What may arrive between two rounds."""

    def waiting(self) -> bool:
        """Whether something did."""
        ...

    def take_in(self) -> None:
        """Make events of it."""
        ...


class Lifecycle:
    """Carries requests out on a run that this process may write to."""

    def __init__(
        self,
        writer: RunWriter,
        engine: Engine,
        progress: ProgressCallback | None = None,
        mail: Mail | None = None,
    ) -> None:
        self.writer, self.engine, self.progress, self.mail = writer, engine, progress, mail

    def finish_running(self) -> list[str]:
        """Go on with a request that an interruption left half-way; returns what was finished."""
        running = [one.request for one in self.writer.requests() if one.status == "running"]
        for request in running:
            self._retrain(request)
        return running

    def carry_out(self, request: str, min_level: Level | None = None) -> None:
        """Roll back, add noise, retrain, certify."""
        row = next(one for one in self.writer.requests() if one.request == request)
        view = RunView(self.writer)
        method = method_named(row.method)
        plan = method.plan(view, terms_of(row))
        check_level(plan, min_level)
        if row.status != "planned":
            content = {
                "request": request,
                "actor": actor_name(),
                "source_node": plan.source_node,
                "noise_std": plan.noise_std,
                "level": plan.level,
            }
            with uninterrupted():
                self.writer.record("request planned", content)
        self._roll_back(view, plan, request, method.starting_model(view, plan, self.engine))
        self._retrain(request)

    def _roll_back(self, view: RunView, plan: Plan, request: str, made: Start) -> None:
        """One event: the new starting model, the charges, the cut, and everything that is erased."""
        tip, start = view.rows[-1].node.node, made.model
        asking = np.array([index for one in plan.subjects for index in one.clients], dtype=np.int64)
        noise_node = 1 + max(self.writer.nodes_by_number())
        fresh = plan.source_node is None
        replayed = made.replayed is not None
        kind: NodeKind = "heuristic" if replayed else "initial" if fresh else "noise"
        node = PathNode(
            noise_node,
            plan.source_node,
            kind,
            plan.order,
            made.rounds,
            rounding=noise_rounding(start) if plan.noise_std > 0.0 and view.facts.rounding_bounded else 0.0,
            noise_std=plan.noise_std,
            order=plan.order,
        )
        on_disk = self.writer.models()
        exposures = view.exposures(plan.subjects)
        cut_after = -1 if fresh else plan.source_depth
        erased = nodes_to_erase(view, set(on_disk), exposures, cut_after, plan.terms.retention)
        root = start if fresh else self.writer.load_model(view.rows[0].node.node)
        distance = norm(start.astype(np.float64) - root.astype(np.float64))
        psi_max = 1e300 if replayed else 0.0
        if not fresh and not replayed:
            at_source = RunView(self.writer, tip=plan.source_node).tracker()
            psi_max = min(float(at_source.total(view.active).max(initial=0.0)), 1e300)
        models = [NewModel(noise_node, start, kept=True, psi_max=psi_max)]
        source = on_disk.get(plan.source_node) if plan.source_node is not None else None
        if source is not None and not source.kept and source.node not in erased:
            # The request stays at the current model: keep it, later requests may go back to it.
            models.append(NewModel(source.node, self.writer.load_model(source.node), kept=True, psi_max=psi_max))
        stored = self.writer.updates()
        gone = updates_to_erase(view, stored.values(), exposures, cut_after, plan.terms.retention)
        updates = [
            only_clients(stored[file], self.writer.load_updates(stored[file]), stay, plan.order)
            for file, stay in gone.shortened.items()
        ] + [
            NewUpdates(noise_node, part, plan.order, one.clients, one.values)
            for part, one in enumerate(made.replayed or (), start=1)
        ]
        current = self.writer.load_model(tip)
        evaluations = [
            evaluation_row(node, subset, found)
            for node, subset, found in (
                (tip, f"forgotten:{request}", self.engine.evaluate(current, asking)),
                (tip, f"remaining:{request}", self.engine.evaluate(current, view.active)),
                (noise_node, f"forgotten:{request}", self.engine.evaluate(start, asking)),
            )
            if found.samples.any()  # clients on other machines are not asked once they want to be forgotten
        ]
        payload: dict[str, Any] = {
            "request": request,
            "actor": actor_name(),
            "run": {"tip": str(noise_node), "phase": "retraining"},
            "choice": {
                "request_order": plan.order,
                "multiplier": plan.multiplier,
                "noise_std": plan.noise_std,
                "source_node": plan.source_node,
                "wanted_node": plan.wanted_node,
                "noise_node": noise_node,
            },
            "subjects": [{"subject": one.subject, "clients": list(one.clients)} for one in plan.subjects],
            "charges": [
                {"subject": one.subject.subject, "psi": repr(finite_or_text(one.psi)), "charge": one.charge}
                for one in plan.charges
            ],
            "source_model": _committed(source.node, source.digest) if source else None,
            "remaining_models": sorted(set(on_disk) - erased),
            "extra": {"rounds": made.rounds, "local_steps": made.local_steps, "bytes_sent": made.bytes_sent},
        }
        with uninterrupted():
            self.writer.record(
                "rolled back",
                payload,
                rows=NewRows(nodes=[NodeRow(node, distance)]),
                models=models,
                dropped_models=sorted(erased),
                updates=updates,
                dropped_updates=gone.dropped,
                evaluations=evaluations,
                for_good=plan.terms.retention == "strict",
            )
        remove_standing(self.writer.folder)

    def _retrain(self, request: str) -> None:
        """Rounds without the client, then the certificate."""
        row = next(one for one in self.writer.requests() if one.request == request)
        view = RunView(self.writer)
        stop = terms_of(row).stop(view.spec.stop)
        pause = self.mail.waiting if self.mail else None
        training = RecordedTraining(self.engine, self.writer, view, stop)
        while not training.run(f"retraining {request}", self.progress, pause):
            assert self.mail is not None  # nobody else asks for a pause
            self.mail.take_in()
            training = RecordedTraining(self.engine, self.writer, RunView(self.writer), stop)
        training.note_standing()
        recorded = RecordedRequest(self.writer, row)
        asking = np.array([recorded.view.index_of[name] for name in row.clients], dtype=np.int64)
        final = self.writer.tip
        after = self.engine.evaluate(self.writer.load_model(final), asking)
        rolled = payload_of_request(self.writer, request, "rolled back")
        on_disk = self.writer.models()
        noised_row = next(one for one in rolled["models"] if one["node"] == row.noise_node)
        noised = _committed(noised_row["node"], noised_row["digest"])
        source = rolled["source_model"] or _committed(noised_row["node"], noised_row["digest"])
        models = {"source": source, "noised": noised, "final": _committed(final, on_disk[final].digest)}
        facts = recorded.facts(
            final_node=final,
            models=models,
            erased=tuple(rolled.get("dropped_models", [])),
            remaining=tuple(rolled["remaining_models"]),
            ledger=self.writer.last_event(),
            issued=utc_now(),
        )
        public_key = self.writer.value("public_key")
        certificates = {
            (request, "auditor"): keys.sign(self.writer.folder, auditor_form(facts), public_key),
            (request, "public"): keys.sign(self.writer.folder, public_form(facts), public_key),
        }
        payload = {
            "request": request,
            "actor": actor_name(),
            "final_node": final,
            "level": facts.level,
            "run": {"phase": "ready"},
            "certified_models": models,
            "bytes_kept": recorded.method.bytes_kept(RunView(self.writer)),
        }
        # The final node may have been evaluated for this request already, when it is the noised one itself.
        known = {(one.node, one.subset) for one in self.writer.evaluations()}
        subset = f"forgotten:{request}"
        wanted = (final, subset) not in known and after.samples.any()
        evaluations = [evaluation_row(final, subset, after)] if wanted else []
        with uninterrupted():
            self.writer.record("request done", payload, evaluations=evaluations, certificates=certificates)
            if (self.writer.folder / SCRUB_FILE).exists():  # somebody read the run while it was to be erased for good
                self.writer.scrub()

    def compare_scratch(self, request: str) -> None:
        """How many rounds Scratch takes for the same request, by doing it beside the run."""
        if any(one.request == request and one.method == "scratch" for one in self.writer.comparisons()):
            return
        row = next(one for one in self.writer.requests() if one.request == request)
        recorded = RecordedRequest(self.writer, row)
        gone = recorded.gone
        active = np.array([k for k in range(len(recorded.view.clients)) if k not in gone], dtype=np.int64)
        asking = np.array([recorded.view.index_of[name] for name in row.clients], dtype=np.int64)
        stop = terms_of(row).stop(recorded.view.spec.stop)
        model, rounds, accuracy, reached = retrain_unrecorded(self.engine, active, stop, recorded.order, self.progress)
        forgotten = self.engine.evaluate(model, asking).accuracy
        payload = {
            "request": request,
            "method": "scratch",
            "rounds": rounds,
            "reached": int(reached),
            "accuracy": accuracy,
            "forgotten_accuracy": forgotten,
        }
        with uninterrupted():
            self.writer.record("comparison", payload)


def _committed(node: int, digest: str) -> dict[str, Any]:
    """A model as one certificate names it: with a nonce of its own, so that no two certificates can be linked."""
    return {"node": node, "digest": digest, "nonce": secrets.token_hex(NONCE_BYTES)}
