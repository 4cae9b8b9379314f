"""Premises of a certificate, and the level that follows from them (docs/theory.md, sections 12.1 and 12.2).

Each premise has one of four statuses: `met` (by construction, or measured as an upper bound), `trusted` (reported by
clients or declared by the operator; every certificate states this), `assumed` (the level is at most `conditional`) or
`failed` (the level is `none`). The level is computed from the premises alone; nobody can set it.

The module first defines the single premises, then the list of premises for each kind of guarantee: a model released
with noise, and no noise at all (heads in closed form, merged groups).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sifu.choices import Level
from sifu.core.ledger import finite_or_text
from sifu.core.premise_sentences import sentence
from sifu.core.round import NoiseSource
from sifu.core.spec import Spec
from sifu.theory import facts as fact
from sifu.theory.arrays import Floats
from sifu.theory.facts import ClientProfile, TrainingFacts, decides_rounds
from sifu.theory.merging import STRETCH
from sifu.theory.regularity import RegularityClass, classify, client_factors

Status = Literal["met", "trusted", "assumed", "failed"]


@dataclass(frozen=True)
class Premise:
    """One premise: its name, its status, and the values for its sentence (`premise_sentences`).

    `case` selects one of several sentences of a name; it is the status by default. `values` are the figures in the
    sentence. `confidential` figures may depend on clients' data and appear only in the auditor's copy. Certificates
    contain these fields but no sentence, so a better wording changes no certificate.

    >>> Premise("arithmetic", "assumed", values={"dtype": "float32"}).statement
    'Rounding errors of the float32 local steps are not bounded; they are assumed to be negligible.'
    """

    name: str
    status: Status
    case: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    confidential: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "case", self.case or self.status)

    @property
    def statement(self) -> str:
        """Sentence in the current wording."""
        return sentence(self.name, self.case, self.values)

    @property
    def detail(self) -> str:
        """Confidential figures as a phrase."""
        return ", ".join(f"{name.replace('_', ' ')} {value!r}" for name, value in self.confidential.items())

    def in_words(self) -> dict[str, str]:
        """Return name, status, sentence and figures for readers."""
        return {"name": self.name, "status": self.status, "statement": self.statement, "detail": self.detail}


FRESH_START = (
    "preprocessing", "features", "module", "hyper-parameters", "identity", "grouping", "rounds apart",
    "initial model", "engine", "layout", "deterministic device",
)  # fmt: skip
"""Premises that matter even for a fresh model.

They concern everything before training, the initial model, the method itself and the identity of clients.
"""

BITS = ("layout", "deterministic device")
"""Premises that matter only if no noise hides the last bits; with noise, bounds on rounding hold for any layout."""

ON_THE_PATH = ("counterfactual", "replies", "schedule", "record")
"""Premises that also matter if training continues from a trained model that the client did not influence.

Without the client, different rounds might have counted.
"""


def premises_that_count(premises: Sequence[Premise], *, exact: bool, fresh: bool) -> list[Premise]:
    """Return the premises that decide the level; the arguments are those of `level_of`."""
    if not exact:
        return [premise for premise in premises if premise.name not in BITS]
    names = FRESH_START if fresh else FRESH_START + ON_THE_PATH
    return [premise for premise in premises if premise.name in names]


def level_of(premises: Sequence[Premise], *, exact: bool, fresh: bool = False) -> Level:
    """Return the level that the premises allow.

    If training continues from a trained model, the premises in `ON_THE_PATH` also count (docs/theory.md, section 12.2).

    Args:
        premises: All premises of the certificate.
        exact: True if no forgotten client influenced the model that training continues from.
        fresh: True if that model is a new initial model.
    """
    statuses = {premise.status for premise in premises_that_count(premises, exact=exact, fresh=fresh)}
    if "failed" in statuses:
        return "none"
    if "assumed" in statuses:
        return "conditional"
    return "exact" if exact else "proven"


RateSource = Literal["given", "own", "fixed"]
"""Source of the clients' steps.

`given`: the operator set a limit. `own`: only each client's own safe step limits them. `fixed`: a head in closed form
has no steps.
"""

INITIAL_MODELS: Mapping[str, Status] = {fact.DRAWN_FROM_SEED: "met", fact.MADE_BY_OPERATOR: "trusted"}
PREPROCESSING: Mapping[str, Status] = {fact.FIXED_CONSTANTS: "met", fact.DECLARED_FIXED: "trusted"}
"""Status of the premises on the initial model and on preprocessing, by source; any other source is `assumed`."""
IDENTITIES = {
    fact.IN_PROCESS: (),
    fact.AUTHENTICATED: (Premise("identity", "trusted"),),
    fact.BY_OPERATOR: (Premise("identity", "trusted", "operator"),),
    fact.CLAIMED: (Premise("identity", "assumed", "claimed"),),
}
"""Premises for each method of identifying clients; within one process none is needed."""
ENGINES = {
    fact.BY_PARTICIPANTS: (),
    fact.ON_A_GPU: (Premise("layout", "assumed"),),
    fact.ON_A_REPEATING_GPU: (Premise("deterministic device", "trusted"),),
    fact.ON_NODES: (Premise("engine", "trusted"),),
}
"""Premises for each value of `TrainingFacts.engine`. A round whose bits depend on its participants alone needs none."""
RATE_SOURCES: Mapping[RateSource, Status] = {"given": "trusted", "own": "met", "fixed": "met"}


def before_training_premises(facts: TrainingFacts, rate_source: RateSource) -> tuple[Premise, ...]:
    """Return the premises about everything before the first round; they matter to every method and level."""
    solved = rate_source == "fixed"
    initial = Premise("initial model", INITIAL_MODELS.get(facts.initial, "assumed"))
    hyper = Premise("hyper-parameters", RATE_SOURCES[rate_source], rate_source)
    engine = ENGINES.get(facts.engine, (Premise("engine", "assumed"),))
    features = Premise(
        "features", "trusted" if facts.features_declared else "met", confidential={"feature_map": facts.features}
    )
    return (
        *(() if solved else (initial,)),
        # No rollback undoes preprocessing.
        Premise("preprocessing", PREPROCESSING.get(facts.preprocessing, "assumed")),
        *((features,) if facts.features else ()),
        *module_premise(facts.module),
        Premise("hyper-parameters", "assumed", "labels") if facts.shape_from_labels else hyper,
        *IDENTITIES.get(facts.identity, (Premise("identity", "assumed", "unknown"),)),
        *(premise for premise in engine if not solved or premise.name != "engine" or premise.status == "assumed"),
    )


def module_premise(module: str) -> tuple[Premise, ...]:
    """Return the premise on modules of the operator (docs/theory.md, section 6.6), or nothing if there are none."""
    if module.startswith(fact.MODULE_DECLARED):
        return (Premise("module", "trusted", values={"functions": module.removeprefix(fact.MODULE_DECLARED)}),)
    if module:
        return (Premise("module", "met" if module == fact.MODULE_KNOWN else "assumed"),)
    return ()


@dataclass(frozen=True)
class RecordHistory:
    """Number of restorations from a backup, and of events without a signature, in the record before a certificate."""

    restored: int = 0
    unsigned: int = 0


UNBROKEN = RecordHistory()


def counterfactual_premise(independent: bool, *, separate: bool) -> Premise:
    """Return the premise that, without the client, training follows the same schedule and leaves its slots empty.

    Clients that run on their own machines (`separate`) may be absent or late, and the server cannot see whether one
    client caused the absence of another.
    """
    if not independent:
        return Premise("counterfactual", "assumed")
    return Premise("counterfactual", "trusted" if separate else "met")


def replies_premise(left_out: int) -> tuple[Premise, ...]:
    """Return a premise if replies were refused, because the schedule then depends on clients' data."""
    if left_out == 0:
        return ()
    return (Premise("replies", "assumed", confidential={"replies_left_out": left_out}),)


def record_premises(history: RecordHistory, *, merge: bool = False) -> tuple[Premise, ...]:
    """Return the premises on a record that was restored or has unsigned events. Any other record needs none.

    Releases that the record does not contain are charged to no budget, and a backup cannot show that the original run
    stopped there. If that run continued, both runs spend the same budget. A merge of groups spends no budget, so
    missing releases do not affect it, but it relies on the recorded members of the groups (docs/theory.md, section
    15.2). Until an event is covered by a signature, anyone who can write to the folder can change it.
    """
    unsigned = (Premise("signatures", "trusted"),) if history.unsigned else ()
    record = (Premise("record", "trusted" if merge else "assumed"),) if history.restored else ()
    return (*record, *unsigned)


def outside_premises(facts: TrainingFacts) -> Iterator[Premise]:
    """Yield a premise for each item of `facts.outside`; it is named `schedule` if it decides whether a round counts."""
    for what in facts.outside:
        name = "schedule" if decides_rounds(what) else "outside the theory"
        yield Premise(name, "assumed", values={"what": what})


def noise_premise(noise: str) -> Premise:
    """Return the premise that the operator drew the noise; it fails for any other source than the system."""
    if noise == "system":
        return Premise("noise", "trusted")
    return Premise("noise", "failed", "given" if noise == "given" else "")


@dataclass(frozen=True)
class MeasuredRegularity:
    """Regularity class of a run, with the expansion P_i of every client and the assumed one, if any."""

    kind: RegularityClass
    factors: Floats
    assumed_factor: float | None = None

    @staticmethod
    def of(clients: Sequence[ClientProfile], facts: TrainingFacts, spec: Spec) -> MeasuredRegularity:
        """Return the regularity from the expansions that the clients reported, or that the spec assumes.

        Raises:
            InputError: If an expansion is unknown, or one that safe steps cannot have.
        """
        assumed = spec.regularity.factor if spec.regularity.kind == "assumed" else None
        factors = client_factors(clients, facts.weight_decay, assumed)
        return MeasuredRegularity(classify(factors, assumed is not None), factors, assumed)


def regularity_premise(facts: TrainingFacts, measured: MeasuredRegularity) -> Premise:
    """Return the premise on the regularity of the local losses, from the run's measurements or its assumed factor."""
    if measured.kind == "assumed":
        return Premise("regularity", "assumed", values={"factor": measured.assumed_factor})
    if not facts.smooth_model:
        return Premise("regularity", "assumed", "not smooth")
    return Premise(
        "regularity",
        "met",
        measured.kind,
        confidential={"largest_P_i": finite_or_text(float(measured.factors.max()))},
    )


def collect_premises(
    facts: TrainingFacts,
    measured: MeasuredRegularity,
    *,
    noise: NoiseSource,
    largest_psi: float,
    rate_source: RateSource,
    left_out: int = 0,
    history: RecordHistory = UNBROKEN,
) -> tuple[Premise, ...]:
    """Return every premise of a release with noise, in a fixed order.

    Args:
        facts: Facts about training that the engine declared.
        measured: Regularity class of the run.
        noise: Source of the noise's randomness.
        largest_psi: Largest Psi of any subject on the path to the node with noise.
        rate_source: Source of the local learning rate.
        left_out: Number of clients' replies that were refused on that path.
        history: Restorations and late signatures of the record.
    """
    return (
        regularity_premise(facts, measured),
        *outside_premises(facts),
        counterfactual_premise(facts.participation.independent, separate=facts.identity != fact.IN_PROCESS),
        *replies_premise(left_out),
        *record_premises(history),
        _arithmetic_premise(facts, largest_psi),
        noise_premise(noise),
        *before_training_premises(facts, rate_source),
        Premise("honest reports", "trusted"),
    )


def psi_status(facts: TrainingFacts, measured: MeasuredRegularity, largest_psi: float) -> Status:
    """Return the status of the claim that Psi bounds a client's influence: met or assumed."""
    premises = (
        regularity_premise(facts, measured),
        *outside_premises(facts),
        _arithmetic_premise(facts, largest_psi),
    )
    return "assumed" if any(premise.status == "assumed" for premise in premises) else "met"


def _arithmetic_premise(facts: TrainingFacts, largest_psi: float) -> Premise:
    if not largest_psi <= fact.ROUNDING_HOLDS_UP_TO:
        return Premise("arithmetic", "assumed", "beyond")
    if facts.dtype == "float64" and facts.rounding_bounded:
        return Premise("arithmetic", "met")
    return Premise("arithmetic", "assumed", values={"dtype": facts.dtype})


def closed_form_premises(facts: TrainingFacts) -> tuple[Premise, ...]:
    """Return every premise of a head solved from a sum over the remaining clients (docs/theory.md, section 14.3)."""
    masked = "masked" if fact.MASKED_STATISTICS in facts.outside else ""
    return (*before_training_premises(facts, "fixed"), Premise("statistics", "trusted", masked))


def group_premises(spec: Spec) -> tuple[Premise, ...]:
    """Return the premises of a merge of group models, in a fixed order (docs/theory.md, section 15.2)."""
    return (
        Premise("grouping", "met", values={"count": spec.groups.count}),
        Premise("rounds apart", "met", "moved on", values={"rounds": spec.groups.rounds, "stretch": STRETCH}),
    )
