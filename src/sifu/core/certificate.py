"""The certificate of a request in its two forms (docs/theory.md, section 12.5).

The auditor's copy states everything and is confidential: exact Psi, drift, beta, the node, and any plain
hash of an un-noised model are functions of the forgotten client's data. The public copy leaves them out
and has salted commitments instead of hashes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from sifu.choices import Calibration, Level, Retention, Scope, Unit
from sifu.core.ledger import finite_or_text
from sifu.core.premises import Premise
from sifu.theory.calibration import delta_reached, delta_reached_up, true_positive_rate
from sifu.theory.composition import TrainingNoise
from sifu.theory.history import Accounting

FORMAT = "sifu-certificate-2"
SMALLEST_DELTA = 1e-9
"""Below this the delta that was reached is not told apart from it."""

GUARANTEE = (
    "For the plan that was carried out (initial model, hyper-parameters, preprocessing, participation, batches, "
    "earlier noise, source models and noise sizes), and over the noise drawn from the moment this request was "
    "carried out, what is released {scope} from the data with the client and without it, under that same plan, is "
    "(epsilon, delta)-close."
)
TRAINING_NOISE_GUARANTEE = (
    "For the plan that was carried out (initial model, hyper-parameters, preprocessing, participation, batches and "
    "noise sizes), and over the noise added to every update in training, all models released from this request on, "
    "from the data with the client and without it, under that same plan, are together (epsilon, delta)-close."
)
SCOPE_WORDS = {
    "all": "in all models from that moment on",
    "latest": "in the latest model alone",
}
NOT_COVERED = (
    "What the plan itself reveals is not covered: which model training went on from, and how long it took. When to "
    "stop is decided by the accuracy on every active client, whether it takes part in rounds or not.",
    "Models seen before this request was carried out are not covered.",
    "The other participants and the operator, who hold more than the released models, are not covered.",
    "Sample counts, drifts and smoothness bounds reported by clients are trusted.",
    "Noise is drawn in floating point; attacks on the last bits of such noise are not covered.",
    "This is evidence for the operator's file, not a statement of legal compliance.",
)
SEVERAL_RELEASES = (
    "Only the latest model is covered (scope latest): whoever keeps several of the models released since this request "
    "learns more, and nothing bounds how much.",
)
EACH_BY_ITSELF = (
    "Each of the clients is covered by itself; what they reveal together is not (unit joint would cover it).",
)
EXACT_GUARANTEE = (
    "The client's data has no part in the model training went on from, so the models released from it are those of "
    "training without the client under the same plan."
)
CLOSED_FORM_GUARANTEE = (
    "The model was solved from a sum of whole numbers over the clients that stay, which is bit for bit the sum of a "
    "federation that never had the client."
)
CLOSED_FORM_NOT_COVERED = (
    "The difference between releases before and after this request tells of the client; only those from now on are "
    "covered.",
    "Whoever kept a copy of the client's statistics, or of a sum with them, still knows them.",
)
COUNTERFACTUAL = "the same schedule with the client absent and its slots not refilled"
CONFIDENTIAL = "This copy holds figures that depend on the forgotten clients' data."
NO_GUARANTEE = "Nothing is guaranteed: at least one premise does not hold, so no claim is made."

COMMON_FIELDS = frozenset((
    "format", "run", "request", "method", "clients", "level", "protection", "untouched", "unit", "scope", "epsilon",
    "delta", "delta_at_most", "calibration", "noise_multiplier", "noise_source", "sigma", "training_noise",
    "attacker_true_positive_rate_at_1_percent", "accounting", "participation", "counterfactual", "retention",
    "guarantee", "not_covered", "commitments", "ledger", "received", "carried_out", "issued", "versions", "form",
    "premises",
))  # fmt: skip
FIELDS = {
    "public": COMMON_FIELDS | {"erased", "remains"},
    "auditor": COMMON_FIELDS | {
        "confidential", "delta_reached", "psi", "psi_star", "node", "noise_node", "final_node", "rounds", "subjects",
        "earlier_subjects", "models", "erased_nodes", "remaining_nodes", "solve",
    },
}  # fmt: skip
"""What each form says, and nothing else."""

SOLVE_FIELDS = ("sum", "samples", "relative_penalty", "penalty")
"""What an auditor's copy says of a head in closed form: the digest of (G, H, n, q), n, r and lambda."""

Protection = Literal["noise", "training noise", "nothing"]
"""What a method's promise rests on: noise of the request, charged to budgets; noise of training; or nothing.

Only the first is charged, covers whoever asked before, and binds later requests to the budgets of its clients."""


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
    unit: Unit
    scope: Scope
    epsilon: float
    delta: float
    delta_at_most: float
    delta_reached: float
    calibration: Calibration
    multiplier: float
    accounting: Accounting
    participation: str
    retention: Retention
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
    def solved(self) -> bool:
        """Whether the model is a head in closed form."""
        return self.statistics is not None


def delta_of_budget(
    epsilon: float, multiplier: float, untouched: bool, protection: Protection, training_noise: TrainingNoise | None
) -> float:
    """The delta at epsilon once the budget is used up whole: 0 where nothing needs hiding, 1 where nothing is hidden.

    >>> delta_of_budget(10.0, 0.31075, False, "nothing", None)
    1.0
    >>> round(delta_of_budget(10.0, 0.31075, False, "noise", None), 5)
    0.04058
    """
    if protection == "nothing":
        return 1.0
    if untouched:
        return 0.0
    return delta_reached(epsilon, multiplier) if training_noise is None else training_noise.delta_composed


def delta_of_charges(
    epsilon: float, charges: Iterable[float], protection: Protection, training_noise: TrainingNoise | None
) -> float:
    """The delta at epsilon that the release of this request reached: what was spent, not what may be.

    `charges` are those of the request's own subjects. Rounded up to four digits, and never between 0 and 1e-9. It tells
    Psi, so it stands in the auditor's copy alone.

    >>> delta_of_charges(10.0, [1 / 0.31075**2], "noise", None), delta_of_charges(10.0, [0.0], "noise", None)
    (0.04058, 0.0)
    """
    if protection == "nothing":
        return 1.0
    if training_noise is not None:
        return training_noise.delta_composed
    largest = max(charges, default=0.0)
    if largest == 0.0:
        return 0.0
    delta = max(delta_reached_up(epsilon, 1.0 / math.sqrt(largest)), SMALLEST_DELTA)
    scale = 10.0 ** (3 - math.floor(math.log10(delta)))
    return min(1.0, math.ceil(delta * scale - 1e-6) / scale)


def attacker_rate(level: Level, multiplier: float) -> float | None:
    """What an attacker allowed 1 % false alarms can spot at most, rounded up to four digits.

    0.01 is a blind guess: all there is at level `exact`. At level `none` nothing bounds it.

    >>> attacker_rate("proven", 0.3501), attacker_rate("exact", 0.3501), attacker_rate("none", 0.3501)
    (0.702, 0.01, None)
    """
    if level == "none":
        return None
    if level == "exact":
        return 0.01
    return math.ceil(true_positive_rate(1.0 / multiplier) * 1e4 - 1e-6) / 1e4


def guarantee_of(level: Level, protection: Protection, scope: Scope, *, solved: bool = False) -> str:
    """The sentence that says what is promised; `solved` is a head in closed form."""
    if level == "exact":
        return CLOSED_FORM_GUARANTEE if solved else EXACT_GUARANTEE
    if level == "none":
        return NO_GUARANTEE
    wording = TRAINING_NOISE_GUARANTEE if protection == "training noise" else GUARANTEE
    guarantee = CLOSED_FORM_GUARANTEE if solved else wording.format(scope=SCOPE_WORDS[scope])
    if level == "conditional":
        return f"Provided that every premise marked 'assumed' below holds: {guarantee[0].lower()}{guarantee[1:]}"
    return guarantee


def not_covered_by(unit: Unit, clients: int, scope: Scope, level: Level, *, solved: bool = False) -> list[str]:
    """The sentences that say what is not promised; a head in closed form forgets clients together anyway."""
    if solved:
        return [*NOT_COVERED, *CLOSED_FORM_NOT_COVERED]
    latest = scope == "latest" and level in ("proven", "conditional")
    together = unit == "client" and clients > 1
    return [*NOT_COVERED, *(SEVERAL_RELEASES if latest else ()), *(EACH_BY_ITSELF if together else ())]


def what_was_erased(
    retention: Retention,
    *,
    fresh: bool,
    replayed: bool,
    keeps_updates: bool,
    statistics: Literal["clients", "sum"] | None = None,
    merged: bool = False,
) -> tuple[str, str]:
    """What anyone may know of what was erased, and of what remains; `statistics` are those a head was solved from."""
    if replayed:
        erased = "Any model after the initial one was erased."
        remains = "The initial model remains. What was made from stored updates may still hold the client's part."
    elif merged:
        erased = "Every model after the initial one was erased, and the model of every group that held the client."
        remains = "The initial model and the models of groups that never held the client remain."
    elif fresh:
        erased, remains = "Every model of the history was erased.", "No model from before this request remains."
    elif retention == "strict":
        erased = "Any kept model that held the client's part was erased."
        remains = "No model that holds the client's part without noise remains."
    else:
        erased = "Any kept model after the one training went on from was erased."
        remains = (
            "Models up to that one stay with the operator, unreleased and without noise, for later requests; they "
            "may hold the client's part."
        )
    if keeps_updates:
        erased += " Any stored update of the client was erased."
        remains += " Updates of other clients are stored with the operator, unreleased."
    if statistics is not None:
        erased += " The client's statistics, and every sum with them, were erased."
        who = "of each other client and their sum" if statistics == "clients" else "of the other clients, as one sum,"
        remains += f" Statistics {who} are stored with the operator, unreleased."
    return erased, remains


def _common(facts: CertificateFacts) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "run": facts.run,
        "request": facts.request,
        "method": facts.method,
        "clients": list(facts.clients),
        "level": facts.level,
        "protection": facts.protection,
        "untouched": facts.untouched,
        "unit": facts.unit,
        "scope": facts.scope,
        "epsilon": facts.epsilon,
        "delta": facts.delta,
        "delta_at_most": facts.delta_at_most,
        "calibration": facts.calibration,
        "noise_multiplier": facts.multiplier,
        "noise_source": facts.noise,
        "sigma": facts.noise_std,
        "training_noise": None if facts.training_noise is None else _training_noise(facts.training_noise),
        "attacker_true_positive_rate_at_1_percent": attacker_rate(facts.level, facts.multiplier),
        "accounting": facts.accounting,
        "participation": facts.participation,
        "counterfactual": COUNTERFACTUAL,
        "retention": facts.retention,
        "guarantee": guarantee_of(facts.level, facts.protection, facts.scope, solved=facts.solved),
        "not_covered": not_covered_by(facts.unit, len(facts.clients), facts.scope, facts.level, solved=facts.solved),
        "commitments": {
            "source_model": facts.source_model.commitment,
            "noised_model": facts.noised_model.commitment,
            "final_model": facts.final_model.commitment,
        },
        "ledger": {
            "seq": facts.ledger_seq,
            "head": facts.ledger_head,
            "time": facts.ledger_time,
            "signature": facts.ledger_signature,
        },
        "received": facts.received,
        "carried_out": facts.carried_out,
        "issued": facts.issued,
        "versions": dict(facts.versions),
    }


def public_form(facts: CertificateFacts) -> dict[str, Any]:
    """What anyone may see: no Psi, drift, beta, node or plain hash."""
    erased, remains = what_was_erased(
        facts.retention,
        fresh=facts.fresh,
        replayed=facts.replayed,
        keeps_updates=facts.keeps_updates,
        statistics=facts.statistics,
        merged=facts.merged,
    )
    return _common(facts) | {
        "form": "public",
        "premises": [{"name": one.name, "status": one.status, "statement": one.statement} for one in facts.premises],
        "erased": erased,
        "remains": remains,
    }


def auditor_form(facts: CertificateFacts) -> dict[str, Any]:
    """Everything, confidential."""
    return _common(facts) | {
        "form": "auditor",
        "confidential": CONFIDENTIAL,
        "delta_reached": facts.delta_reached,
        "premises": [asdict(one) for one in facts.premises],
        "psi": finite_or_text(facts.psi),
        "psi_star": facts.psi_star,
        "node": facts.node,
        "noise_node": facts.noise_node,
        "final_node": facts.final_node,
        "rounds": facts.rounds,
        "subjects": [_statement(one) for one in facts.subjects],
        "earlier_subjects": [_statement(one) for one in facts.earlier],
        "models": {
            "source_model": asdict(facts.source_model),
            "noised_model": asdict(facts.noised_model),
            "final_model": asdict(facts.final_model),
        },
        "erased_nodes": list(facts.erased_nodes),
        "remaining_nodes": list(facts.remaining_nodes),
        "solve": None if facts.solve is None else {name: facts.solve[name] for name in SOLVE_FIELDS},
    }


def _training_noise(noise: TrainingNoise) -> dict[str, float]:
    """Both accountings; only the composed one counts."""
    return {
        "clip": noise.clip,
        "noise": noise.noise,
        "epsilon_one_round": noise.epsilon_one_round,
        "epsilon_composed": noise.epsilon_composed,
    }


def _statement(subject: SubjectStatement) -> dict[str, Any]:
    return {
        "clients": list(subject.clients),
        "psi": finite_or_text(subject.psi),
        "charge": None if subject.charge is None else finite_or_text(subject.charge),
        "budget": subject.budget,
    }
