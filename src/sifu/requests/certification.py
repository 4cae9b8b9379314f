"""Statements of a certificate, recomputed from the recorded scalars, and its issue as the last event of a request.

A certificate has two forms (docs/theory.md, section 12.5). The auditor's form states everything and is confidential:
exact Psi, drift, beta, the node, and any plain hash of an un-noised model are functions of the forgotten client's data.
The public form omits them and has salted commitments instead of hashes.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from sifu.choices import Level, Retention
from sifu.core.certificate_words import WORDING, Start
from sifu.core.engine import Engine, evaluate_present
from sifu.core.ledger import NONCE_BYTES, Event, finite_or_text
from sifu.core.method_info import CLOSED_FORM, attacker_rate, delta_of_budget, delta_of_charges
from sifu.core.observers import BeforeAfter
from sifu.core.premises import Premise, level_of
from sifu.core.request_terms import TERMS
from sifu.errors import InputError
from sifu.methods.base import Claim, is_scratch, premises_of
from sifu.methods.registry import method_named
from sifu.run.group_state import is_hit, nodes_always_kept
from sifu.run.releases import guarantee_of_all
from sifu.run.run_view import RunView, evaluation_row, measures_training_rows
from sifu.store import keys
from sifu.store.actors import actor_name
from sifu.store.files import uninterrupted
from sifu.store.last_failure import remove_failure
from sifu.store.projection import NewEvent, RequestRow
from sifu.store.reader import RunReader, plain_names, remainder_to_join
from sifu.store.release_files import released_model, released_node
from sifu.store.statistics_files import UpdatesRow
from sifu.store.writer import SCRUB_FILE, RunWriter
from sifu.theory.calibration import TrainingNoise, hidden_sensitivity
from sifu.theory.rollback import Exposure, Subject, charge, depths_to_erase

FORMAT = "sifu-certificate-4"
LACKING = {FORMAT: frozenset[str](), "sifu-certificate-3": frozenset(("terms",))}
"""Readable formats, each with the fields of the current format that it lacks."""

COMMON_FIELDS = frozenset((
    "format", "run", "request", "method", "clients", "records", "level", "protection", "untouched", "unit", "scope",
    "epsilon", "delta", "delta_at_most", "calibration", "noise_multiplier", "noise_source", "sigma", "training_noise",
    "attacker_true_positive_rate_at_1_percent", "accounting", "participation", "retention", "start", "keeps_updates",
    "keeps_statistics", "terms", "wording", "commitments", "ledger", "received", "carried_out", "issued", "versions",
    "form", "premises",
))  # fmt: skip
FIELDS = {
    "public": COMMON_FIELDS,
    "auditor": COMMON_FIELDS | {
        "delta_reached", "psi", "psi_star", "node", "noise_node", "final_node", "rounds", "subjects",
        "earlier_subjects", "models", "erased_nodes", "remaining_nodes", "solve",
    },
}  # fmt: skip
"""Fields of each form."""

OPTIONAL_FIELDS = frozenset(("before_after",))
"""Fields that either form may lack: `before_after` is the guarantee against an observer of all releases."""

STATED_TERMS = tuple(name for name in TERMS if name not in ("clients", "records"))
"""Terms of the request that both forms of the certificate repeat unchanged.

Clients and the number of records have separate fields; only the ledger lists the rows of the records.
"""
SOLVE_FIELDS = ("sum", "samples")
"""Fields of a closed-form solve in the auditor's form: the digest of the summed statistics, and their samples."""
MODELS = ("source_model", "noised_model", "final_model")
BOTH_ACCOUNTINGS = ("clip", "noise", "epsilon_one_round", "epsilon_composed")
"""Statements about noise in training; of the two epsilons only the composed one counts."""


def public_form(auditor: Mapping[str, Any]) -> dict[str, Any]:
    """Return the public form of an auditor's form: without Psi, drift, beta, node or plain hash."""
    premises = [{name: premise[name] for name in premise if name != "confidential"} for premise in auditor["premises"]]
    stated = COMMON_FIELDS | (OPTIONAL_FIELDS & auditor.keys())
    return {name: auditor[name] for name in stated} | {"form": "public", "premises": premises}


def model_commitment(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model with the commitment that certificates name it by: SHA-256(nonce || digest), 32 bytes each."""
    nonce, digest = str(row["nonce"]), str(row["digest"])
    commitment = hashlib.sha256(bytes.fromhex(nonce) + bytes.fromhex(digest)).hexdigest()
    return {"node": int(row["node"]), "digest": digest, "nonce": nonce, "commitment": commitment}


def committed_model(node: int, digest: str) -> dict[str, Any]:
    """Return a model for one certificate, with a fresh nonce, so that no two certificates can be linked."""
    return {"node": node, "digest": digest, "nonce": secrets.token_hex(NONCE_BYTES)}


def nodes_to_erase(
    view: RunView, available: set[int], exposures: Sequence[Exposure], cut_after: int, retention: Retention
) -> set[int]:
    """Return the nodes whose models a request erases.

    Args:
        view: The history that the request is executed on.
        available: Nodes with a stored model.
        exposures: Subjects of the request.
        cut_after: Depth of its source; -1 for a fresh initial model.
        retention: Retention of the request.
    """
    depth_of = view.path.depth_of
    depths = depths_to_erase(
        sorted(depth_of[node] for node in available if node in depth_of),
        cut_after,
        retention,
        lambda depth: any(exposure.psi_to_hide(depth) > 0.0 for exposure in exposures),
    )
    # Models of groups are on no path. Regardless of the source, the models of groups that held a client of the request
    # are erased.
    leaving = {client for exposure in exposures for client in exposure.subject.clients}
    groups = view.reader.group_models()
    off_path = {node for node in available - set(depth_of) if node not in groups or is_hit(groups[node], leaving)}
    return ({view.path.nodes[depth].node for depth in depths} | off_path) - nodes_always_kept(view.reader)


@dataclass(frozen=True)
class UpdatesErased:
    """Files of clients' updates that a request drops, and the shorter files that replace some of them.

    `shortened` maps a dropped file to the clients that remain in its replacement.
    """

    dropped: tuple[str, ...]
    shortened: dict[str, tuple[int, ...]]


def updates_to_erase(
    view: RunView, stored: Iterable[UpdatesRow], exposures: Sequence[Exposure], cut_after: int, retention: Retention
) -> UpdatesErased:
    """Return the files of clients' updates that a request drops or shortens.

    Rounds that are cut off are dropped entirely. In the other rounds, the updates of the request's own clients are
    removed; under `strict` retention, also every update computed from a model with uncovered influence of these
    clients, since it is a function of that model.

    Args:
        view: The history that the request is executed on.
        stored: Stored files of updates.
        exposures: Subjects of the request.
        cut_after: Depth of its source; -1 for a fresh initial model.
        retention: Retention of the request.
    """
    depth_of, nodes = view.path.depth_of, view.path.nodes
    gone = {client for exposure in exposures for client in exposure.subject.clients}
    dropped, shortened = [], {}
    for row in stored:
        depth = depth_of.get(row.node)
        if depth is not None and depth <= cut_after:
            start = depth if nodes[depth].kind == "heuristic" else depth - 1
            traced = retention == "strict" and any(exposure.psi_to_hide(start) > 0.0 for exposure in exposures)
            stay = () if traced else tuple(sorted(set(row.clients) - gone))
            if len(stay) == len(row.clients):
                continue
            if stay:
                shortened[row.file] = stay
        dropped.append(row.file)
    return UpdatesErased(tuple(sorted(dropped)), shortened)


@dataclass(frozen=True)
class SubjectStatement:
    """One subject of the request: its clients, Psi at the node, charge and budget.

    `charge` is None if nothing is charged.
    """

    clients: tuple[str, ...]
    psi: float
    charge: float | None
    budget: float

    def to_mapping(self) -> dict[str, Any]:
        """Return the subject as a certificate states it."""
        return asdict(self) | {"psi": finite_or_text(self.psi), "charge": finite_or_text(self.charge)}


class RecordedRequest:
    """An executed request, with the history as it was when its noise was added.

    Its statements follow the `rules` of its certificate, or the current rules if it has none yet.
    """

    def __init__(self, reader: RunReader, request: RequestRow, rules: int | None = None) -> None:
        if request.noise_node is None or request.request_order is None:
            raise ValueError(f"request {request.request} was not executed")
        self.reader, self.request = reader, request
        self.rules = rules or rules_of(reader, request.request)
        self.order: int = request.request_order
        self.noise_std: float = request.noise_std or 0.0
        # Clients that joined later are not part of its statements.
        self.rolled_back = reader.steps()["rolled back", request.request] if reader.joined() else None
        # Premises are evaluated at certification, so a restoration after the rollback counts as well.
        certified = reader.steps().get(("request done", request.request))
        self.view = RunView(reader, tip=request.noise_node, before=self.rolled_back, certified=certified)
        # The noise node is a child of its source; a fresh initial model has no source.
        self.source_depth = self.view.path.tip - 1 if request.source_node is not None else 0
        self.replayed = self.view.path.nodes[-1].kind == "heuristic"
        self.merged = self.view.path.nodes[-1].kind == "merge"
        self.multiplier = request.terms.multiplier
        self.method = method_named(request.method)
        self.terms = replace(request.terms, method=request.method)

    @cached_property
    def new_exposures(self) -> list[Exposure]:
        """Subjects of the request itself."""
        terms = self.terms
        return self.view.exposures(
            [
                Subject(row.subject, row.clients, self.multiplier, terms.scope, self.order, 0.0, terms.reserve)
                for row in self.reader.subjects()
                if row.request == self.request.request
            ]
        )

    @cached_property
    def earlier_exposures(self) -> list[Exposure]:
        """Subjects forgotten earlier, with the budget they had used before this request."""
        return self.view.exposures(self.view.earlier_subjects(before_order=self.order))

    def psi(self, exposure: Exposure) -> float:
        """Return the Psi that the noise had to hide for this subject at the source.

        Psi is infinite for a model made from stored updates.
        """
        if self.replayed:
            return math.inf
        return 0.0 if self.request.source_node is None else exposure.psi_to_hide(self.source_depth)

    def premises(self) -> tuple[Premise, ...]:
        """Return the premises of the certificate."""
        return premises_of(self.method, self._claim)

    @property
    def _claim(self) -> Claim:
        leaving, exposures = self.view.leaving(self.request.clients), [*self.new_exposures, *self.earlier_exposures]
        claimed = self.source_depth, self.terms, self.gone, self.noise_std, self.rules
        return Claim(self.view, leaving, exposures, *claimed)

    @property
    def starts_fresh(self) -> bool:
        """True if training started from a fresh model, or from the unchanged initial model."""
        return self.request.source_node is None or is_scratch(self.method.info, self._claim)

    @property
    def level(self) -> Level:
        """Level that the premises allow."""
        return level_of(self.premises(), exact=self.untouched, fresh=self.starts_fresh)

    @cached_property
    def untouched(self) -> bool:
        """True if no client to be hidden influenced the source or had a reply refused on the path to it."""
        hidden = any(self.psi(exposure) > 0.0 for exposure in [*self.new_exposures, *self.earlier_exposures])
        fresh = self.request.source_node is None
        return not hidden and (fresh or not self.view.were_refused(self.request.clients, self.source_depth))

    @cached_property
    def training_noise(self) -> TrainingNoise | None:
        """Guarantee of noise in training, if the method relies on it."""
        return self.method.training_noise(self.view, [exposure.subject for exposure in self.new_exposures], self.terms)

    @property
    def delta_at_most(self) -> float:
        """Delta at the request's epsilon once the whole budget is used."""
        return delta_of_budget(
            self.terms.epsilon, self.multiplier, self.untouched, self.method.info.protection, self.training_noise
        )

    @property
    def delta_reached(self) -> float:
        """Delta at the request's epsilon that its release alone reached."""
        charges = [self.statement(exposure).charge or 0.0 for exposure in self.new_exposures]
        return delta_of_charges(self.terms.epsilon, charges, self.method.info.protection, self.training_noise)

    @property
    def gone(self) -> set[int]:
        """Clients forgotten by this request or an earlier one."""
        order_of = {request.request: request.request_order for request in self.reader.requests()}
        done = [subject for subject in self.reader.subjects() if (order_of[subject.request] or 0) <= self.order]
        return {client for subject in done for client in subject.clients}

    @cached_property
    def before_after(self) -> BeforeAfter | None:
        """Guarantee against an observer of all releases up to the request; later releases lack its clients."""
        if self.method.info.name != CLOSED_FORM:
            return None
        rolled_back = self.reader.steps()["rolled back", self.request.request]
        clients = [self.view.index_of[name] for name in self.request.clients]
        return guarantee_of_all(self.reader, self.view.spec, clients, self.request.terms, rolled_back)

    def statement(self, exposure: Exposure) -> SubjectStatement:
        """Return Psi, charge and budget of one subject."""
        psi = self.psi(exposure)
        names = plain_names(self.reader, (self.view.clients[index].name for index in exposure.subject.clients))
        cost = charge(psi, self.noise_std) if self.method.info.protection == "noise" else None
        return SubjectStatement(names, psi, cost, exposure.subject.budget)

    def auditor_form(
        self, models: Mapping[str, Mapping[str, Any]], ledger: Event, ledger_signature: str, issued: str
    ) -> dict[str, Any]:
        """Return the auditor's form, which is confidential; `public_form` derives the public one from it.

        Args:
            models: Rows of the source, noised and final model.
            ledger: The event before the certificate.
            ledger_signature: Signature of the certificate's key over that event.
            issued: Time of issue.
        """
        request, view, terms, method = self.request, self.view, self.request.terms, self.method.info
        premises, noise, level = self.premises(), self.training_noise, self.level
        trained: Start = "fresh" if self.starts_fresh else "trained"
        new = [self.statement(exposure) for exposure in self.new_exposures]
        # A request that adds no noise charges no budget: its starting model existed before it, and stored updates that
        # would break an earlier promise are not replayed.
        others = self.earlier_exposures if method.protection == "noise" else []
        earlier = [self.statement(exposure) for exposure in others if self.psi(exposure) > 0.0]
        rolled_back = payload_of_request(self.reader, request.request, "rolled back")
        filed = self.reader.payload(self.reader.steps()["request received", request.request])
        final_node = int(models["final"]["node"])
        committed = {name: model_commitment(models[name.removesuffix("_model")]) for name in MODELS}
        solve = solves(self.reader).get(final_node)
        guarantee = self.before_after
        return ({} if guarantee is None else {"before_after": asdict(guarantee)}) | {
            "format": FORMAT,
            "form": "auditor",
            "wording": self.rules,
            "run": self.reader.value("run"),
            "request": request.request,
            "method": request.method,
            "clients": list(plain_names(self.reader, request.clients)),
            "records": len(request.records) or None,
            "terms": {name: value for name, value in terms.to_mapping().items() if name in STATED_TERMS},
            "unit": terms.unit,
            "scope": terms.scope,
            "epsilon": terms.epsilon,
            "delta": terms.delta,
            "calibration": terms.calibration,
            "retention": terms.retention,
            "level": level,
            "premises": [asdict(premise) for premise in premises],
            "protection": method.protection,
            "untouched": self.untouched,
            "start": "initial" if self.replayed else "merge" if self.merged else trained,
            "delta_at_most": self.delta_at_most,
            "delta_reached": self.delta_reached,
            "noise_multiplier": self.multiplier,
            "noise_source": view.spec.privacy.noise if noise is None else view.facts.noise_source,
            "sigma": self.noise_std,
            "training_noise": None if noise is None else {name: getattr(noise, name) for name in BOTH_ACCOUNTINGS},
            "attacker_true_positive_rate_at_1_percent": attacker_rate(level, self.multiplier),
            "accounting": view.spec.privacy.accounting,
            "participation": str(view.facts.participation),
            "keeps_updates": view.spec.round_extras.updates_every > 0,
            "keeps_statistics": view.spec.keep.kept_statistics if method.name == CLOSED_FORM else None,
            "psi": finite_or_text(max((statement.psi for statement in new), default=0.0)),
            "psi_star": hidden_sensitivity(self.noise_std, self.multiplier),
            "subjects": [statement.to_mapping() for statement in new],
            "earlier_subjects": [statement.to_mapping() for statement in earlier],
            "node": view.path.nodes[self.source_depth].node,
            "noise_node": request.noise_node or 0,
            "final_node": final_node,
            "rounds": self.reader.nodes_by_number()[final_node].node.position,
            "models": committed,
            "commitments": {name: model["commitment"] for name, model in committed.items()}
            | ({"records": filed["commitments"]} if "commitments" in filed else {}),
            "erased_nodes": rolled_back.get("dropped_models", []),
            "remaining_nodes": rolled_back["remaining_models"],
            "solve": None if solve is None else {name: solve[name] for name in SOLVE_FIELDS},
            "ledger": {
                "seq": ledger.seq,
                "head": ledger.hash.hex(),
                "time": ledger.time,
                "signature": ledger_signature,
            },
            "received": request.received,
            "carried_out": request.carried_out or "",
            "issued": issued,
            "versions": json.loads(self.reader.value("versions")),
        }


def rules_of(reader: RunReader, request: str) -> int:
    """Return the version of the rules a request was certified by; the current version if it has no certificate yet."""
    for text in reader.certificates(request).values():
        stated = json.loads(text)["body"].get("wording")
        return stated if type(stated) is int and 1 <= stated <= WORDING else WORDING
    return WORDING


def solves(reader: RunReader) -> dict[int, dict[str, Any]]:
    """Return the record of each closed-form solve, by the node it made; r is None if it was erased."""
    contents = (event.content for event in reader.events() if {"solve", "rows"} <= event.content.keys())
    return {
        int(content["rows"]["last"]): content["solve"] | {"relative_penalty": content.get("relative_penalty")}
        for content in contents
    }


def payload_of_request(reader: RunReader, request: str, kind: Literal["rolled back", "request done"]) -> dict[str, Any]:
    """Return the payload of a request's event of this kind.

    Raises:
        InputError: If the request has no such event.
    """
    seq = reader.steps().get((kind, request))
    if seq is not None:
        return reader.payload(seq)
    raise InputError(f"request {request} has no event {kind!r}: it was not executed")


def issue_certificates(writer: RunWriter, engine: Engine | None, row: RequestRow, reason: str = "") -> None:
    """Certify the current model for a request whose rounds are done.

    Args:
        writer: Writer of the run.
        engine: Engine that evaluates the model on the request's clients; None evaluates nothing.
        row: Row of the request.
        reason: Reason why the request ended before its stop rule held; empty if it held.
    """
    request, final = row.request, writer.tip
    recorded = RecordedRequest(writer, row)
    asking = np.array([recorded.view.index_of[name] for name in row.clients], dtype=np.int64)
    rolled_back = payload_of_request(writer, request, "rolled back")
    models = _certified_models(writer, row, rolled_back)
    last, public_key = writer.events()[-1], writer.value("public_key")
    # Sign again: if the last event is a key rotation, its own signature is by the old key.
    signature = (writer.signer().sign(writer.value("run"), last) or b"").hex()
    body = recorded.auditor_form(models, last, signature, writer.now())
    certificates = {
        (request, form["form"]): keys.sign(writer.folder, form, public_key) for form in (body, public_form(body))
    }
    payload = {
        "request": request,
        "actor": actor_name(),
        "final_node": final,
        "level": body["level"],
        "run": {"phase": "ready"},
        "certified_models": models,
        "bytes_kept": recorded.method.bytes_kept(RunView(writer)),
    } | ({"reason": reason} if reason else {})
    # The final node may be the noised one, which was evaluated for this request already.
    subset = f"forgotten:{request}"
    is_new = not any((row.node, row.subset) == (final, subset) for row in writer.evaluations())
    evaluations = []
    # A strict request measures nothing on its clients' data; a head that was not released is not measured either.
    measures = engine is not None and row.terms.retention != "strict" and measures_training_rows(recorded.view)
    if engine is not None and is_new and measures and released_node(writer) == final:
        evaluation = evaluate_present(engine, released_model(writer), asking)
        # A failed measurement must not keep the request from being done.
        measured = evaluation.samples.any() and math.isfinite(evaluation.loss)
        evaluations = [evaluation_row(final, subset, evaluation)] if measured else []
    with uninterrupted():
        writer.record(NewEvent("request done", payload, evaluations=evaluations, certificates=certificates))
        if (writer.folder / SCRUB_FILE).exists():  # another process was reading the run during the erasure
            writer.scrub()


def settle(writer: RunWriter, request: str, reason: str) -> str:
    """End a running request with the model that it has reached, because its rounds cannot be finished.

    The forgotten clients do not influence that model beyond what the certificate states; the model may be less
    accurate.

    Args:
        writer: Writer of the run.
        request: Id of the request.
        reason: Reason why its rounds cannot be finished, for the ledger.

    Returns:
        The level of the request.

    Raises:
        InputError: If the request does not run, or its model cannot be certified yet.
    """
    rows = {row.request: row for row in writer.requests()}
    status = rows[request].status if request in rows else "not in this run"
    if status != "running":
        raise InputError(f"only a running request can be settled, and request {request} is {status}")
    if not reason.strip():
        raise InputError("settling a request needs a reason: give one with --reason")
    if not RunView(writer).regime.ends_early:
        raise InputError(
            f"request {request} has no head yet, so there is nothing to certify: run sifu forget again when the "
            f"remaining clients answer, or end it with sifu requests decide DIR {request} withdrawn"
        )
    if remainder_to_join(writer) is not None:
        raise InputError(
            f"request {request} is about records, and its client has not rejoined with its remaining records: run sifu "
            "forget again with the client's data"
        )
    issue_certificates(writer, None, rows[request], reason)
    remove_failure(writer.folder)
    level: str = next(row.level for row in writer.requests() if row.request == request) or "none"
    return level


def _certified_models(writer: RunWriter, row: RequestRow, rolled_back: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the three models that a certificate names; with a fresh start, the source is the start itself."""
    noised = next(model for model in rolled_back["models"] if model["node"] == row.noise_node)
    final = writer.tip
    return {
        "source": rolled_back["source_model"] or committed_model(noised["node"], noised["digest"]),
        "noised": committed_model(noised["node"], noised["digest"]),
        "final": committed_model(final, writer.models()[final].digest),
    }
