"""The certificate of a request in its two forms (docs/theory.md, section 12.5).

The auditor's copy states everything and is confidential: exact Psi, drift, beta, the node, and any plain
hash of an un-noised model are functions of the forgotten client's data. The public copy leaves them out
and has salted commitments instead of hashes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from sifu.choices import Level
from sifu.core.ledger import finite_or_text
from sifu.core.method_info import Protection, attacker_rate
from sifu.core.premises import Premise
from sifu.core.request_terms import TERMS, RequestTerms
from sifu.core.wording import WORDING
from sifu.theory.calibration import TrainingNoise
from sifu.theory.history import Accounting

FORMAT = "sifu-certificate-4"
LACKING = {FORMAT: frozenset[str](), "sifu-certificate-3": frozenset(("terms",))}
"""The formats that can be read, each with the fields of today that it lacks."""
Start = Literal["fresh", "merge", "initial", "trained"]
"""What training went on from: a fresh model, merged groups, an initial model that updates were replayed on, or a model
that was trained before."""

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
"""What each form says, and nothing else."""

STATED_TERMS = tuple(name for name in TERMS if name not in ("clients", "records"))
"""The terms of the request that both forms state as they were filed; clients, and how many records, are fields of
their own, and which rows they are stays in the ledger."""
SOLVE_FIELDS = ("sum", "samples")
"""What an auditor's copy says of a head in closed form: the digest of (G, H, n, q), n, r and lambda."""
MODELS = ("source_model", "noised_model", "final_model")
BOTH_ACCOUNTINGS = ("clip", "noise", "epsilon_one_round", "epsilon_composed")
"""What is said of noise in training; of the two epsilons only the composed one counts."""
TERMS_AS_THEY_ARE = ("unit", "scope", "epsilon", "delta", "calibration", "retention")
COMMON_AS_THEY_ARE = (
    "run", "request", "method", "records", "level", "protection", "untouched", "delta_at_most", "accounting",
    "participation", "start", "keeps_updates", "received", "carried_out", "issued",
)  # fmt: skip
CONFIDENTIAL_AS_THEY_ARE = ("delta_reached", "psi_star", "node", "noise_node", "final_node", "rounds")
"""Fields that a certificate states under the names that `CertificateFacts` has."""


@dataclass(frozen=True)
class SubjectStatement:
    """One subject of the request: its clients, Psi at the node, its charge (None where nothing is charged) and what
    its budget allows."""

    clients: tuple[str, ...]
    psi: float
    charge: float | None
    budget: float


@dataclass(frozen=True)
class ModelCommitment:
    """A model as the certificate names it: salted commitment for all, digest and nonce for the auditor."""

    node: int
    digest: str
    nonce: str
    commitment: str


@dataclass(frozen=True)
class CertificateFacts:
    """Everything a certificate states, before it is put into either form."""

    run: str
    request: str
    method: str
    clients: tuple[str, ...]
    records: int | None
    """How many records of the one client, None where clients were forgotten whole."""
    terms: RequestTerms
    """As they were filed."""
    delta_at_most: float
    delta_reached: float
    multiplier: float
    accounting: Accounting
    participation: str
    noise: str
    noise_std: float
    psi_star: float
    psi: float
    node: int
    noise_node: int
    final_node: int
    rounds: int
    subjects: tuple[SubjectStatement, ...]
    earlier: tuple[SubjectStatement, ...]
    premises: tuple[Premise, ...]
    level: Level
    source_model: ModelCommitment
    noised_model: ModelCommitment
    final_model: ModelCommitment
    erased_nodes: tuple[int, ...]
    remaining_nodes: tuple[int, ...]
    ledger_seq: int
    ledger_head: str
    ledger_time: str
    ledger_signature: str
    received: str
    carried_out: str
    issued: str
    versions: Mapping[str, str]
    fresh: bool = False
    replayed: bool = False
    merged: bool = False
    keeps_updates: bool = False
    untouched: bool = False
    protection: Protection = "noise"
    training_noise: TrainingNoise | None = None
    statistics: Literal["clients", "sum"] | None = None
    solve: Mapping[str, Any] | None = None
    """Of a head in closed form: what was recorded of its solve."""

    @property
    def start(self) -> Start:
        """What training went on from."""
        if self.replayed:
            return "initial"
        if self.merged:
            return "merge"
        return "fresh" if self.fresh else "trained"


def _common(facts: CertificateFacts) -> dict[str, Any]:
    terms, noise = facts.terms, facts.training_noise
    return {
        "format": FORMAT,
        "wording": WORDING,
        "clients": list(facts.clients),
        "terms": {name: value for name, value in terms.to_mapping().items() if name in STATED_TERMS},
        "noise_multiplier": facts.multiplier,
        "noise_source": facts.noise,
        "sigma": facts.noise_std,
        "training_noise": None if noise is None else {name: getattr(noise, name) for name in BOTH_ACCOUNTINGS},
        "attacker_true_positive_rate_at_1_percent": attacker_rate(facts.level, facts.multiplier),
        "keeps_statistics": facts.statistics,
        "commitments": {name: getattr(facts, name).commitment for name in MODELS},
        "ledger": {name: getattr(facts, f"ledger_{name}") for name in ("seq", "head", "time", "signature")},
        "versions": dict(facts.versions),
        **{name: getattr(terms, name) for name in TERMS_AS_THEY_ARE},
        **{name: getattr(facts, name) for name in COMMON_AS_THEY_ARE},
    }


def public_form(facts: CertificateFacts) -> dict[str, Any]:
    """What anyone may see: no Psi, drift, beta, node or plain hash."""
    return _common(facts) | {"form": "public", "premises": [_premise(premise) for premise in facts.premises]}


def auditor_form(facts: CertificateFacts) -> dict[str, Any]:
    """Everything, confidential."""
    return _common(facts) | {
        "form": "auditor",
        "premises": [_premise(premise) | {"confidential": dict(premise.confidential)} for premise in facts.premises],
        "psi": finite_or_text(facts.psi),
        "subjects": [_statement(subject) for subject in facts.subjects],
        "earlier_subjects": [_statement(subject) for subject in facts.earlier],
        "models": {name: asdict(getattr(facts, name)) for name in MODELS},
        "erased_nodes": list(facts.erased_nodes),
        "remaining_nodes": list(facts.remaining_nodes),
        "solve": None if facts.solve is None else {name: facts.solve[name] for name in SOLVE_FIELDS},
        **{name: getattr(facts, name) for name in CONFIDENTIAL_AS_THEY_ARE},
    }


def _premise(premise: Premise) -> dict[str, Any]:
    return {"name": premise.name, "status": premise.status, "case": premise.case, "values": dict(premise.values)}


def _statement(subject: SubjectStatement) -> dict[str, Any]:
    return {
        "clients": list(subject.clients),
        "psi": finite_or_text(subject.psi),
        "charge": None if subject.charge is None else finite_or_text(subject.charge),
        "budget": subject.budget,
    }
