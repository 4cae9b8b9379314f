"""What a certificate rests on, and the level that follows (docs/theory.md, sections 10, 12.1 and 12.2).

Each premise is either `met` (by construction, or measured as an upper bound), `trusted` (what clients report and
the operator declares; every certificate says so), `assumed` (so the level is at most `conditional`) or
`failed` (so the level is `none`). The level is computed from the premises and from nothing else; no one can
write a level down.

First each premise, then every premise of one kind of promise: a model released with noise, noise in training, and no
noise at all (heads in closed form, merged groups, heuristics).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sifu.choices import Calibration, Level
from sifu.core.ledger import finite_or_text
from sifu.core.premise_sentences import sentence
from sifu.core.round import NoiseSource
from sifu.core.spec import Spec
from sifu.theory import facts as fact
from sifu.theory.facts import TrainingFacts, decides_rounds
from sifu.theory.history import Accounting
from sifu.theory.regularity import RegularityClass

Status = Literal["met", "trusted", "assumed", "failed"]


@dataclass(frozen=True)
class Premise:
    """One premise: its name, whether it holds, and what its sentence is made of (`premise_sentences`).

    `case` tells sentences of one name apart; it is the status where that says enough. `values` are the figures in the
    sentence. `confidential` ones may depend on clients' data and are in the auditor's copy only. Certificates hold all
    of these and no sentence: a better wording changes no certificate.

    >>> Premise("calibration", "failed", values={"epsilon": 3.0}).statement
    'Classical calibration is proven for epsilon < 1 only; it was used at epsilon = 3.'
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
        """The sentence, by today's wording."""
        return sentence(self.name, self.case, self.values)

    @property
    def detail(self) -> str:
        """The confidential figures in words."""
        return ", ".join(f"{name.replace('_', ' ')} {value!r}" for name, value in self.confidential.items())

    def in_words(self) -> dict[str, str]:
        """For people: name, status, sentence and figures."""
        return {"name": self.name, "status": self.status, "statement": self.statement, "detail": self.detail}


FRESH_START = (
    "preprocessing", "features", "module", "hyper-parameters", "method", "identity", "grouping", "rounds apart",
    "initial model", "noise size", "engine", "layout", "deterministic device",
    "held-out rows",
)  # fmt: skip
"""The premises that matter even for a fresh model: what came before training, what it starts from, whether the method
proves anything at all, and whether a client is who it says it is."""

BITS = ("layout", "deterministic device")
"""The premises that matter only where no noise hides the last bits: bounds on rounding hold for any layout."""

ON_THE_PATH = ("counterfactual", "replies", "schedule", "record")
"""The premises that matter for a model that was trained before, even if the client has no part in it: without the
client other rounds might have counted."""


def premises_that_count(premises: Sequence[Premise], *, exact: bool, fresh: bool) -> list[Premise]:
    """The premises that a level rests on: all but those on bits, unless no forgotten client has a part in the model."""
    if not exact:
        return [premise for premise in premises if premise.name not in BITS]
    names = FRESH_START if fresh else FRESH_START + ON_THE_PATH
    return [premise for premise in premises if premise.name in names]


def level_of(premises: Sequence[Premise], *, exact: bool, fresh: bool = False) -> Level:
    """The level that the premises allow.

    `exact` says that no forgotten client has a part in the model training continues from. `fresh` says that it is a new
    initial model; one that was trained before also rests on which rounds counted (docs/theory.md, section 12.2).
    """
    statuses = {premise.status for premise in premises_that_count(premises, exact=exact, fresh=fresh)}
    if "failed" in statuses:
        return "none"
    if "assumed" in statuses:
        return "conditional"
    return "exact" if exact else "proven"


RateSource = Literal["given", "others", "forgotten", "anew", "fixed"]
"""Whether the local rate was given, or set by clients' data without or with the forgotten ones deciding it; or was
found anew from those who stay, for training that begins afresh. A head in closed form has no rate (`fixed`)."""

INITIAL_MODELS: Mapping[str, Status] = {fact.DRAWN_FROM_SEED: "met", fact.MADE_BY_OPERATOR: "trusted"}
PREPROCESSING: Mapping[str, Status] = {fact.FIXED_CONSTANTS: "met", fact.DECLARED_FIXED: "trusted"}
"""Where clients' data cannot have shaped the model that training starts from, or the preprocessing, which no rollback
undoes; otherwise it is assumed."""
IDENTITIES = {
    fact.IN_PROCESS: (),
    fact.AUTHENTICATED: (Premise("identity", "trusted"),),
    fact.BY_OPERATOR: (Premise("identity", "trusted", "operator"),),
    fact.CLAIMED: (Premise("identity", "assumed", "claimed"),),
}
"""How clients on other machines are known; in one process there is nothing to say."""
ENGINES = {
    fact.BY_PARTICIPANTS: (),
    fact.BY_LARGEST_CLIENT: (Premise("layout", "assumed"),),
    fact.ON_A_GPU: (Premise("layout", "assumed", "device"),),
    fact.ON_A_REPEATING_GPU: (Premise("deterministic device", "trusted"),),
    fact.ON_NODES: (Premise("engine", "trusted"),),
}
"""Whether a round follows from its participants' data alone; said only where it is not so by construction."""
RATE_SOURCES: Mapping[RateSource, Status] = {
    "given": "trusted", "others": "met", "forgotten": "assumed", "anew": "met", "fixed": "met"
}  # fmt: skip


def before_training_premises(facts: TrainingFacts, rate_source: RateSource) -> tuple[Premise, ...]:
    """What came before any round; these premises matter to every method and level.

    Hyper-parameters belong to the plan, which the guarantee takes as given; `rate_source` says where they came from.
    """
    solved = rate_source == "fixed"
    initial = Premise("initial model", INITIAL_MODELS.get(facts.initial, "assumed"))
    hyper = Premise("hyper-parameters", RATE_SOURCES[rate_source], rate_source)
    engine = ENGINES.get(facts.engine, (Premise("engine", "assumed"),))
    features = Premise(
        "features", "trusted" if facts.features_declared else "met", confidential={"feature_map": facts.features}
    )
    return (
        *(() if solved else (initial,)),
        preprocessing_premise(facts),
        *((features,) if facts.features else ()),
        *((Premise("module", "trusted"),) if facts.module else ()),
        Premise("hyper-parameters", "assumed", "labels") if facts.shape_from_labels else hyper,
        *IDENTITIES.get(facts.identity, (Premise("identity", "assumed", "unknown"),)),
        *(premise for premise in engine if not solved or premise.name != "engine" or premise.status == "assumed"),
    )


def preprocessing_premise(facts: TrainingFacts) -> Premise:
    """Whether clients' data shaped the preprocessing, which no rollback undoes."""
    return Premise("preprocessing", PREPROCESSING.get(facts.preprocessing, "assumed"))


@dataclass(frozen=True)
class RecordHistory:
    """What happened to the record before a certificate: how often it was restored from a backup that ends with the
    anchor that was kept elsewhere (`complete`), or from one that may be older than the run was; and how often the
    operator vouched for events that were written without a signature."""

    complete: int = 0
    older: int = 0
    vouched: int = 0


UNBROKEN = RecordHistory()


def accounting_premise(accounting: Accounting) -> Premise:
    """Only weights of rounds that happened bound anything."""
    return Premise("accounting", "met" if accounting == "round" else "failed")


def counterfactual_premise(independent: bool, *, apart: bool = False) -> Premise:
    """Whether the same schedule without the client is the law of training without it.

    Clients on machines of their own (`apart`) may be absent or late; that none of them makes another so is not seen.
    """
    if not independent:
        return Premise("counterfactual", "assumed")
    return Premise("counterfactual", "trusted" if apart else "met")


def replies_premise(left_out: int) -> tuple[Premise, ...]:
    """Which replies are refused depends on clients' data, so the schedule does too; said only where it happened."""
    if left_out == 0:
        return ()
    return (Premise("replies", "assumed", confidential={"replies_left_out": left_out}),)


def record_premises(history: RecordHistory, *, merge: bool = False) -> tuple[Premise, ...]:
    """Releases that this record knows nothing of are charged to no one; said wherever there may be some.

    That a backup ends with an anchor shows that nothing is missing up to there. It cannot show that the run it was made
    of did not go on: both would then spend the same budget. A `merge` of groups spends none, so such releases do not
    matter to it; who was in a group does (docs/theory.md, section 15.2). And until an event is signed anyone who can
    write to the folder can change it.
    """
    signed_late = (Premise("signatures", "trusted"),) if history.vouched else ()
    if not (history.older or history.complete):
        return signed_late
    if merge:
        return (Premise("record", "trusted"), *signed_late)
    return (Premise("record", "assumed", "older" if history.older else "complete"), *signed_late)


def outside_premises(facts: TrainingFacts) -> Iterator[Premise]:
    """What the theorems do not speak of, item by item; what decides whether a round counts has its own name."""
    for what in facts.outside:
        name = "schedule" if decides_rounds(what) else "outside the theory"
        yield Premise(name, "assumed", values={"what": what})


def noise_premise(noise: str) -> Premise:
    """Whether no one can draw the noise again; noise of an unknown source may be noise that someone knows."""
    if noise == "system":
        return Premise("noise", "met")
    return Premise("noise", "failed", "seeded" if noise == "seeded" else "")


@dataclass(frozen=True)
class MeasuredRegularity:
    """The regularity class of a run with the figures it was decided on."""

    kind: RegularityClass
    largest_smoothness: float | None
    largest_factor: float
    local_rate: float
    largest_certified_rate: float | None
    assumed_factor: float | None = None


def regularity_premise(facts: TrainingFacts, measured: MeasuredRegularity) -> Premise:
    """Which theorem bounds L, and whether what it needs was measured."""
    if measured.kind == "assumed":
        return Premise("regularity", "assumed", values={"factor": measured.assumed_factor})
    if not facts.smooth_model:
        return Premise("regularity", "assumed", "not smooth")
    clipped = facts.local_clip > 0.0
    return Premise(
        "regularity",
        "met",
        "clipped" if clipped else measured.kind,
        values={"clip": facts.local_clip} if clipped else {},
        confidential={
            "largest_beta": finite_or_text(measured.largest_smoothness),
            "local_rate": measured.local_rate,
            "largest_P_i": finite_or_text(measured.largest_factor),
            "largest_certified_rate": finite_or_text(measured.largest_certified_rate),
        },
    )


def collect_premises(
    facts: TrainingFacts,
    measured: MeasuredRegularity,
    *,
    accounting: Accounting,
    calibration: Calibration,
    epsilon: float,
    noise: NoiseSource,
    largest_psi: float,
    rate_source: RateSource,
    left_out: int = 0,
    history: RecordHistory = UNBROKEN,
) -> tuple[Premise, ...]:
    """Every premise of a noised release, in a fixed order.

    `largest_psi` is the largest Psi that any subject reached on the way to the noised node, `left_out` how many
    clients' replies were refused on that way.
    """
    return (
        regularity_premise(facts, measured),
        *outside_premises(facts),
        accounting_premise(accounting),
        counterfactual_premise(facts.participation.independent, apart=facts.identity != fact.IN_PROCESS),
        *replies_premise(left_out),
        *record_premises(history),
        calibration_premise(calibration, epsilon),
        _arithmetic_premise(facts, largest_psi),
        noise_premise(noise),
        *before_training_premises(facts, rate_source),
        Premise("honest reports", "trusted"),
    )


def psi_status(
    facts: TrainingFacts, measured: MeasuredRegularity, accounting: Accounting, largest_psi: float
) -> Status:
    """Whether Psi bounds what a client did: met, only if something assumed holds, or not at all (failed)."""
    premises = (
        regularity_premise(facts, measured),
        *outside_premises(facts),
        accounting_premise(accounting),
        _arithmetic_premise(facts, largest_psi),
    )
    statuses = {premise.status for premise in premises}
    return "failed" if "failed" in statuses else "assumed" if "assumed" in statuses else "met"


def calibration_premise(calibration: Calibration, epsilon: float) -> Premise:
    """Whether the noise is as large as (epsilon, delta) needs."""
    if calibration == "exact":
        return Premise("calibration", "met")
    if epsilon < 1.0:
        return Premise("calibration", "assumed")
    return Premise("calibration", "failed", values={"epsilon": epsilon})


def _arithmetic_premise(facts: TrainingFacts, largest_psi: float) -> Premise:
    if not largest_psi <= fact.ROUNDING_HOLDS_UP_TO:
        return Premise("arithmetic", "assumed", "beyond")
    if facts.dtype == "float64" and facts.rounding_bounded:
        return Premise("arithmetic", "met")
    return Premise("arithmetic", "assumed", values={"dtype": facts.dtype})


def closed_form_premises(facts: TrainingFacts) -> tuple[Premise, ...]:
    """Every premise of a head solved from a sum over those who stay (docs/theory.md, section 14.3)."""
    masked = "masked" if fact.MASKED_STATISTICS in facts.outside else ""
    return (*before_training_premises(facts, "fixed"), Premise("statistics", "trusted", masked))


def grouping_premise(count: int, depends: bool) -> Premise:
    """Who is in which group; `depends` says that there would be another number of groups without the forgotten."""
    return Premise("grouping", "assumed" if depends else "met", values={"count": count})


def group_premises(spec: Spec, *, depends: bool) -> tuple[Premise, ...]:
    """What a merge of group models rests on, or a head on networks that groups tuned, in a fixed order.

    docs/theory.md, sections 15.2 and 15.6.
    """
    regime = spec.regime
    case, values = regime.separate_rounds()
    return (
        grouping_premise(spec.groups.count, depends),
        Premise("rounds apart", "met", case, values=values),
        *(Premise(name, "trusted") for name in regime.trusted),
    )


def heuristic_premise(method: str) -> Premise:
    """A heuristic proves nothing, whatever else holds: its level is always `none`."""
    return Premise("method", "failed", values={"method": method})
