"""Statements of a certificate, recomputed from the record of a run.

A certificate has two forms (docs/theory.md, section 12.5). The auditor's form states everything and is confidential:
exact Psi, drift, beta, the node, and any plain hash of an un-noised model are functions of the forgotten client's data.
The public form omits these values and has salted commitments instead of hashes.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

from sifu.choices import Level
from sifu.core.certificate_words import Start
from sifu.core.ledger import NONCE_BYTES, Event, commit, finite_or_text
from sifu.core.method_info import CLOSED_FORM, attacker_rate, delta_of_budget, delta_of_charges
from sifu.core.observers import BeforeAfter
from sifu.core.premises import Premise, level_of
from sifu.core.request_terms import TERMS
from sifu.errors import InputError
from sifu.methods.base import Claim, is_scratch
from sifu.methods.registry import method_named
from sifu.run.releases import guarantee_of_all
from sifu.run.run_view import RunView
from sifu.store.projection import RequestRow
from sifu.store.reader import RunReader, plain_names
from sifu.theory.calibration import hidden_sensitivity
from sifu.theory.rollback import Exposure, Subject, charge
from sifu.version import FORMAT

CERTIFICATE = f"sifu certificate {FORMAT}"
"""Value of the field `format`."""

COMMON_FIELDS = frozenset((
    "format", "run", "request", "method", "clients", "records", "level", "untouched",
    "epsilon", "delta", "delta_at_most", "noise_multiplier", "noise_source", "sigma",
    "attacker_true_positive_rate_at_1_percent", "participation", "retention", "start",
    "keeps_statistics", "terms", "commitments", "ledger", "received", "carried_out", "issued", "versions",
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
"""Fields of a closed-form solve in the auditor's form: digest and number of samples of the summed statistics."""
MODELS = ("source_model", "noised_model", "final_model")


def public_form(auditor: Mapping[str, Any]) -> dict[str, Any]:
    """Return the public form of a certificate, which omits Psi, drift, beta, nodes and plain hashes."""
    premises = [{name: premise[name] for name in premise if name != "confidential"} for premise in auditor["premises"]]
    stated = COMMON_FIELDS | (OPTIONAL_FIELDS & auditor.keys())
    return {name: auditor[name] for name in stated} | {"form": "public", "premises": premises}


def model_commitment(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a model with its commitment, SHA-256(nonce || digest), where both are 32 bytes long."""
    nonce, digest = str(row["nonce"]), str(row["digest"])
    commitment = commit(bytes.fromhex(nonce), bytes.fromhex(digest)).hex()
    return {"node": int(row["node"]), "digest": digest, "nonce": nonce, "commitment": commitment}


def committed_model(node: int, digest: str) -> dict[str, Any]:
    """Return the fields of a model with a fresh nonce, so that commitments in two certificates cannot be linked."""
    return {"node": node, "digest": digest, "nonce": secrets.token_hex(NONCE_BYTES)}


@dataclass(frozen=True)
class SubjectStatement:
    """Statement on one subject of a request; `charge` is None if the method adds no noise."""

    clients: tuple[str, ...]
    psi: float
    charge: float
    budget: float

    def to_mapping(self) -> dict[str, Any]:
        """Return the subject as a certificate states it."""
        return asdict(self) | {"psi": finite_or_text(self.psi), "charge": finite_or_text(self.charge)}


class RecordedRequest:
    """An executed request, with the history as it was when its noise was added."""

    def __init__(self, reader: RunReader, request: RequestRow) -> None:
        if request.noise_node is None or request.request_order is None:
            raise ValueError(f"request {request.request} was not executed")
        self.reader, self.request = reader, request
        self.order: int = request.request_order
        self.noise_std: float = request.noise_std or 0.0
        # The statements ignore clients that joined after the rollback.
        self.rolled_back = reader.steps()["rolled back", request.request] if reader.joined() else None
        # Premises are evaluated at certification, so a restoration after the rollback counts as well.
        certified = reader.steps().get(("request done", request.request))
        self.view = RunView(reader, tip=request.noise_node, before=self.rolled_back, certified=certified)
        # The noise node is a child of its source; a fresh initial model has no source.
        self.source_depth = self.view.path.tip - 1 if request.source_node is not None else 0
        self.merged = self.view.path.nodes[-1].kind == "merge"
        self.multiplier = request.terms.multiplier
        self.method = method_named(request.method)
        self.terms = replace(request.terms, method=request.method)

    @cached_property
    def new_exposures(self) -> list[Exposure]:
        """Subjects of the request itself."""
        return self.view.exposures(
            [
                Subject(row.subject, row.clients, self.multiplier, self.order)
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

        Psi is 0 for a fresh initial model.
        """
        return 0.0 if self.request.source_node is None else exposure.psi_to_hide(self.source_depth)

    def premises(self) -> tuple[Premise, ...]:
        """Return the premises of the certificate."""
        return self.method.premises(self._claim)

    @property
    def _claim(self) -> Claim:
        leaving, exposures = self.view.leaving(self.request.clients), [*self.new_exposures, *self.earlier_exposures]
        return Claim(self.view, leaving, exposures, self.source_depth, self.terms, self.noise_std)

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
        """True if no subject has an influence on the source that earlier noise does not cover.

        If the source is not a fresh model, no reply of the request's clients may have been refused before it.
        """
        hidden = any(self.psi(exposure) > 0.0 for exposure in [*self.new_exposures, *self.earlier_exposures])
        fresh = self.request.source_node is None
        return not hidden and (fresh or not self.view.were_refused(self.request.clients, self.source_depth))

    @property
    def delta_at_most(self) -> float:
        """Delta at the request's epsilon once the whole budget is used."""
        return delta_of_budget(self.terms.epsilon, self.multiplier, self.untouched)

    @property
    def delta_reached(self) -> float:
        """Delta at the request's epsilon that its release alone reached."""
        charges = [self.statement(exposure).charge for exposure in self.new_exposures]
        return delta_of_charges(self.terms.epsilon, charges)

    @cached_property
    def before_after(self) -> BeforeAfter | None:
        """Guarantee against an observer of all releases up to the request, or None without a closed-form head.

        Later releases do not depend on the request's clients.
        """
        if self.method.info.name != CLOSED_FORM:
            return None
        rolled_back = self.reader.steps()["rolled back", self.request.request]
        clients = [self.view.index_of[name] for name in self.request.clients]
        return guarantee_of_all(self.reader, self.view.spec, clients, self.request.terms, rolled_back)

    def statement(self, exposure: Exposure) -> SubjectStatement:
        """Return Psi, charge and budget of one subject."""
        psi = self.psi(exposure)
        names = plain_names(self.reader, (self.view.clients[index].name for index in exposure.subject.clients))
        return SubjectStatement(names, psi, charge(psi, self.noise_std), exposure.subject.budget)

    def auditor_form(
        self, models: Mapping[str, Mapping[str, Any]], ledger: Event, ledger_signature: str, issued: str
    ) -> dict[str, Any]:
        """Return the auditor's form, which is confidential; `public_form` derives the public one from it.

        Args:
            models: Fields of the `source`, `noised` and `final` models (see `committed_model`).
            ledger: The last event before the certificate is issued.
            ledger_signature: Signature of the certificate's key over that event.
            issued: Time of issue.
        """
        request, view, terms, method = self.request, self.view, self.request.terms, self.method.info
        premises, level = self.premises(), self.level
        trained: Start = "fresh" if self.starts_fresh else "trained"
        new = [self.statement(exposure) for exposure in self.new_exposures]
        earlier = [self.statement(exposure) for exposure in self.earlier_exposures if self.psi(exposure) > 0.0]
        rolled_back = payload_of_request(self.reader, request.request, "rolled back")
        filed = self.reader.payload(self.reader.steps()["request received", request.request])
        final_node = int(models["final"]["node"])
        committed = {name: model_commitment(models[name.removesuffix("_model")]) for name in MODELS}
        solve = solves(self.reader).get(final_node)
        guarantee = self.before_after
        return ({} if guarantee is None else {"before_after": asdict(guarantee)}) | {
            "format": CERTIFICATE,
            "form": "auditor",
            "run": self.reader.value("run"),
            "request": request.request,
            "method": request.method,
            "clients": list(plain_names(self.reader, request.clients)),
            "records": len(request.records) or None,
            "terms": {name: value for name, value in terms.to_mapping().items() if name in STATED_TERMS},
            "epsilon": terms.epsilon,
            "delta": terms.delta,
            "retention": terms.retention,
            "level": level,
            "premises": [asdict(premise) for premise in premises],
            "untouched": self.untouched,
            "start": "merge" if self.merged else trained,
            "delta_at_most": self.delta_at_most,
            "delta_reached": self.delta_reached,
            "noise_multiplier": self.multiplier,
            "noise_source": view.noise_source,
            "sigma": self.noise_std,
            "attacker_true_positive_rate_at_1_percent": attacker_rate(level, self.multiplier),
            "participation": str(view.facts.participation),
            "keeps_statistics": view.spec.keep.kept_statistics if method.name == CLOSED_FORM else None,
            "psi": finite_or_text(max((statement.psi for statement in new), default=0.0)),
            "psi_star": hidden_sensitivity(self.noise_std, self.multiplier),
            "subjects": [statement.to_mapping() for statement in new],
            "earlier_subjects": [statement.to_mapping() for statement in earlier],
            "node": view.path.nodes[self.source_depth].node,
            "noise_node": request.noise_node or 0,
            "final_node": final_node,
            "rounds": self.reader.nodes_by_number()[final_node].position,
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


def no_certificate(request: str, form: str) -> InputError:
    """Return the error for a request without a certificate of this form (`auditor` or `public`)."""
    return InputError(
        f"request {request[:80]!r} has no {form} certificate; only finished requests have one: see sifu requests"
    )


def solves(reader: RunReader) -> dict[int, dict[str, Any]]:
    """Return the record of each closed-form solve, by the node of its head."""
    contents = (event.content for event in reader.events() if {"solve", "rows"} <= event.content.keys())
    return {
        int(content["rows"]["last"]): content["solve"] | {"relative_penalty": content["relative_penalty"]}
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
