"""What a certificate rests on, and the level that follows (docs/theory.md, sections 12.1 and 12.2).

Each premise is either `met` (by construction, or measured as an upper bound), `trusted` (what clients report and
the operator declares; every certificate says so), `assumed` (so the level is at most `conditional`) or
`failed` (so the level is `none`). The level is computed from the premises and from nothing else; nobody can
write a level down.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from sifu.choices import Calibration, Level
from sifu.core.noise import NoiseSource
from sifu.theory.composition import TrainingNoise
from sifu.theory.facts import (
    AUTHENTICATED,
    CLAIMED,
    DECLARED_FIXED,
    DRAWN_FROM_SEED,
    FIXED_CONSTANTS,
    IN_PROCESS,
    MADE_BY_OPERATOR,
    ROUNDING_HOLDS_UP_TO,
    TrainingFacts,
    decides_rounds,
)
from sifu.theory.history import Accounting
from sifu.theory.regularity import RegularityClass

Status = Literal["met", "trusted", "assumed", "failed"]
RateSource = Literal["given", "near", "others", "forgotten"]
"""Whether the local rate was given, given near what clients' data would have set, or set by clients' data without or
with the forgotten ones deciding it."""


FRESH_START = (
    "preprocessing", "features", "hyper-parameters", "method", "identity", "grouping", "rounds apart", "initial model",
    "noise size",
)  # fmt: skip
"""The premises that matter even for a fresh model: what came before training, what it starts from, whether the method
proves anything at all, and whether a client is who it says it is."""
ON_THE_PATH = ("counterfactual", "replies", "schedule", "record")
"""The premises that matter for a model that was trained before, even if the client has no part in it: without the
client other rounds might have counted."""


@dataclass(frozen=True)
class Premise:
    """One premise: its name, whether it holds, and a sentence. `detail` may hold figures that depend on
    clients' data; it stands in the auditor's copy only."""

    name: str
    status: Status
    statement: str
    detail: str = ""


@dataclass(frozen=True)
class MeasuredRegularity:
    """The regularity class of a run with the figures it was decided on."""

    kind: RegularityClass
    largest_smoothness: float | None
    largest_factor: float
    local_rate: float
    largest_certified_rate: float | None
    assumed_factor: float | None = None


@dataclass(frozen=True)
class Restorations:
    """How often the run was restored from a backup before a certificate: one that ends with the anchor that was kept
    elsewhere (`complete`), or one that may be older than the run was."""

    complete: int = 0
    older: int = 0


NEVER_RESTORED = Restorations()


def regularity_premise(facts: TrainingFacts, measured: MeasuredRegularity) -> Premise:
    """Which theorem bounds L, and whether what it needs was measured."""
    if measured.kind == "assumed":
        return Premise(
            "regularity",
            "assumed",
            f"Every local step is taken to expand distances by at most B = {measured.assumed_factor:g}; "
            "nothing proves this for the model trained here.",
        )
    if not facts.smooth_model:
        return Premise("regularity", "assumed", "The loss is taken to be smooth; the model is not known to be.")
    detail = (
        f"largest beta {measured.largest_smoothness!r}, local rate {measured.local_rate!r}, "
        f"largest P_i {measured.largest_factor!r}, largest certified rate {measured.largest_certified_rate!r}"
    )
    statement = {
        "strongly convex": "The local losses are strongly convex (weight decay) and smooth, with every client's "
        "smoothness bounded from above.",
        "convex": "The local losses are convex and smooth, every client's smoothness is bounded from above, and the "
        "local rate is within the range where no step expands distances.",
        "smooth": "The local losses are smooth with every client's smoothness bounded from above; the local rate is "
        "beyond the range certified as convex, so distances may grow.",
    }[measured.kind]
    if facts.local_clip > 0.0:
        statement = (
            "The local losses are smooth with every client's smoothness bounded from above. Each step's gradient is "
            f"clipped to a norm of at most {facts.local_clip:g}, which keeps this bound; but a clipped step is not a "
            "convex one, so distances may grow."
        )
    return Premise("regularity", "met", statement, detail)


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
    restorations: Restorations = NEVER_RESTORED,
) -> tuple[Premise, ...]:
    """Every premise of a noised release, in a fixed order.

    `largest_psi` is the largest Psi that any subject reached on the way to the noised node, `left_out` how many
    clients' replies were refused on that way.
    """
    return (
        regularity_premise(facts, measured),
        *outside_premises(facts),
        accounting_premise(accounting),
        counterfactual_premise(facts.participation.independent),
        *replies_premise(left_out),
        *record_premise(restorations),
        calibration_premise(calibration, epsilon),
        _arithmetic_premise(facts, largest_psi),
        noise_premise(noise),
        *before_training_premises(facts, rate_source),
        Premise(
            "honest reports",
            "trusted",
            "Sample counts, drifts and smoothness bounds are those the engine computed or the clients reported; "
            "they are trusted.",
        ),
    )


def closed_form_premises(facts: TrainingFacts) -> tuple[Premise, ...]:
    """Every premise of a head solved from a sum over those who stay (docs/theory.md, section 14.3)."""
    if facts.shape_from_labels:
        hyper_parameters = hyper_parameters_premise("given", shape_from_labels=True)
    else:
        hyper_parameters = Premise(
            "hyper-parameters",
            "met",
            "Outputs, precision and the rule for lambda are fixed in the spec; lambda follows from the sum of those "
            "who stay.",
        )
    return (
        preprocessing_premise(facts),
        *features_premise(facts),
        hyper_parameters,
        *identity_premises(facts),
        Premise(
            "statistics",
            "trusted",
            "Statistics that no data can have were refused; otherwise clients are trusted to have sent their own.",
        ),
    )


def training_noise_premises(
    facts: TrainingFacts,
    promised: TrainingNoise,
    *,
    epsilon: float,
    rate_source: RateSource,
    replayed: bool = False,
    left_out: int = 0,
    restorations: Restorations = NEVER_RESTORED,
) -> tuple[Premise, ...]:
    """Every premise of what noise in training promises (`sifu.theory.composition`), in a fixed order.

    `replayed` says that stored updates were replayed on the way to the model: they were added up with other weights
    than those that were counted, and calibration is neither clipped nor noised.
    """
    within, reached = promised.epsilon_composed <= epsilon, _digits_up(promised.epsilon_composed)
    return (
        Premise(
            "clipping",
            "met",
            f"Every client's update was scaled to a norm of at most {facts.clip:g} and noise of {facts.noise:g} times "
            "that was added to it, in float64, in every round; this bounds a client's part whatever the model is.",
        ),
        training_noise_size_premise(promised.counted_rounds),
        Premise(
            "history",
            "failed" if replayed else "met",
            "A model made from stored updates lies on the history; no noise was counted for what went into it."
            if replayed
            else "Every step of the history is a round that was counted, or was made from such steps alone.",
        ),
        Premise(
            "budget",
            "met" if within else "failed",
            f"Over all rounds the clients took part in, training reached epsilon {reached}"
            + (", within the one asked for." if within else f", more than the {epsilon:g} asked for."),
        ),
        counterfactual_premise(facts.participation.independent),
        *(one for one in outside_premises(facts) if one.name == "schedule"),
        *replies_premise(left_out),
        *record_premise(restorations),
        noise_premise(facts.noise_source),
        *before_training_premises(facts, rate_source),
        Premise("honest reports", "trusted", "Sample counts and who took part are as recorded; they are trusted."),
    )


def _digits_up(value: float) -> str:
    """Four digits, rounded up."""
    scale = 10.0 ** (3 - math.floor(math.log10(value))) if value > 0.0 else 1.0
    return f"{math.ceil(value * scale) / scale:.6g}"


def heuristic_premise(method: str) -> Premise:
    """A heuristic proves nothing, whatever else holds: its level is always `none`."""
    return Premise(
        "method",
        "failed",
        f"{method} is a heuristic: nothing bounds what the model it makes still holds of the clients.",
    )


def accounting_premise(accounting: Accounting) -> Premise:
    """Only weights of rounds that happened bound anything."""
    if accounting == "round":
        return Premise("accounting", "met", "Weights are those of the rounds that really happened.")
    statement = "Population accounting under-states sensitivity; it can be compared, never certified."
    return Premise("accounting", "failed", statement)


def counterfactual_premise(independent: bool) -> Premise:
    """Whether the same schedule without the client is the law of training without it."""
    if independent:
        return Premise(
            "counterfactual",
            "met",
            "Clients take part independently of each other, so the same schedule without the client is the law of "
            "training without it.",
        )
    return Premise(
        "counterfactual",
        "assumed",
        "Rounds sample a fixed number of clients: the certificate compares with the same schedule, the "
        "client's slots left empty, not with a world where others filled them.",
    )


def replies_premise(left_out: int) -> tuple[Premise, ...]:
    """Which replies are refused depends on clients' data, so the schedule does too; said only where it happened."""
    if left_out == 0:
        return ()
    return (
        Premise(
            "replies",
            "assumed",
            "Some clients' replies were refused and left out; the certificate compares with a world in which the same "
            "ones were left out.",
            f"{left_out} replies left out",
        ),
    )


def record_premise(restorations: Restorations) -> tuple[Premise, ...]:
    """Releases that this record knows nothing of are charged to nobody; said wherever there may be some.

    That a backup ends with an anchor shows that nothing is missing up to there. It cannot show that the run it was made
    of did not go on: both would then spend the same budget.
    """
    if restorations.older:
        statement = (
            "The run was restored from a backup that may not have been its latest state; models released in between "
            "are not counted."
        )
    elif restorations.complete:
        statement = (
            "The run was restored from a backup; it is assumed that the run it was made of released nothing more, "
            "since that would not be counted here."
        )
    else:
        return ()
    return (Premise("record", "assumed", statement),)


def outside_premises(facts: TrainingFacts) -> Iterator[Premise]:
    """What the theorems do not speak of, item by item; what decides whether a round counts has a name of its own."""
    for what in facts.outside:
        capitalised = f"{what[0].upper()}{what[1:]}"
        if decides_rounds(what):
            yield Premise(
                "schedule",
                "assumed",
                f"{capitalised} lets one client decide whether a round counts; the certificate compares with a world "
                "in which the same rounds counted.",
            )
        else:
            yield Premise(
                "outside the theory", "assumed", f"{capitalised} is outside the theorem and assumed harmless."
            )


def training_noise_size_premise(counted_rounds: int) -> Premise:
    """Without a client the average of a round would have noise of another size (docs/theory.md, section 10)."""
    if counted_rounds == 0:
        return Premise("training noise", "met", "The clients took part in no round, so no noise depends on them.")
    return Premise(
        "training noise",
        "assumed",
        "The noise of an average depends on who took part. The certificate compares with a world in which it has the "
        "size it had; without the client it would have a slightly different one, and what that size reveals is assumed "
        "not to matter.",
    )


def chosen_noise_premise(chosen: bool) -> Premise:
    """Whether noise on a fresh model was sized by what the forgotten clients had done to another one."""
    if chosen:
        return Premise(
            "noise size",
            "assumed",
            "The size of the noise was chosen from the influence of the forgotten clients (sigma auto); what it "
            "reveals of them is assumed not to matter.",
        )
    return Premise("noise size", "met", "The size of the noise was given; no client's data decided it.")


def initial_model_premise(facts: TrainingFacts) -> Premise:
    """Whether clients' data can have shaped the model that training starts from."""
    if facts.initial == DRAWN_FROM_SEED:
        return Premise("initial model", "met", "The initial model is drawn from the seed; no client's data shaped it.")
    if facts.initial == MADE_BY_OPERATOR:
        return Premise(
            "initial model",
            "trusted",
            "The operator's own program makes the initial model; that no client's data shaped it is trusted.",
        )
    return Premise(
        "initial model",
        "assumed",
        "Where the initial model comes from is not known; it is assumed that no client's data shaped it.",
    )


def before_training_premises(facts: TrainingFacts, rate_source: RateSource) -> tuple[Premise, ...]:
    """What came before any round; these premises matter to every method and level."""
    return (
        initial_model_premise(facts),
        preprocessing_premise(facts),
        *features_premise(facts),
        hyper_parameters_premise(rate_source, facts.shape_from_labels),
        *identity_premises(facts),
    )


def noise_premise(noise: str) -> Premise:
    """Whether nobody can draw the noise again; noise of an unknown source may be noise that somebody knows."""
    if noise == "system":
        statement = "The noise was drawn from the operating system's entropy and added in float64."
        return Premise("noise", "met", statement)
    if noise == "seeded":
        statement = "The noise came from a seeded generator, so whoever has the seed can remove it."
        return Premise("noise", "failed", statement)
    return Premise("noise", "failed", "Where the noise came from is not known.")


def hyper_parameters_premise(rate_source: RateSource, shape_from_labels: bool) -> Premise:
    """Hyper-parameters belong to the plan, which the guarantee takes as given; say where they came from."""
    if shape_from_labels:
        return Premise(
            "hyper-parameters",
            "assumed",
            "The number of outputs was counted from all clients' labels; it is assumed to be the same without the "
            "forgotten clients.",
        )
    statements = {
        "given": "Hyper-parameters were given by the operator; the local rate is not the one that clients' data set.",
        "near": "Hyper-parameters were given by the operator; the local rate is near a simple multiple of the one that "
        "clients' data would have set, and that it was not taken from there is trusted.",
        "others": "The local rate is the one clients' smoothness bounds set; without the forgotten clients it would be "
        "the same.",
        "forgotten": "The local rate is the one clients' smoothness bounds set and would be another one without the "
        "forgotten clients; what it reveals of them is assumed not to matter.",
    }
    status: dict[RateSource, Status] = {"given": "met", "near": "trusted", "others": "met", "forgotten": "assumed"}
    return Premise("hyper-parameters", status[rate_source], statements[rate_source])


def identity_premises(facts: TrainingFacts) -> tuple[Premise, ...]:
    """How clients on other machines are known; in one process there is nothing to say."""
    if facts.identity == IN_PROCESS:
        return ()
    if facts.identity == AUTHENTICATED:
        return (
            Premise(
                "identity",
                "trusted",
                "Clients are known by the public keys of their nodes; the operator's list says whose key is whose.",
            ),
        )
    claimed = facts.identity == CLAIMED
    known = "Clients were known by the names they claimed" if claimed else "How clients were told apart is not known"
    return (
        Premise(
            "identity",
            "assumed",
            f"{known}; it is assumed that each was who it said it was, and that no forgotten client came back under "
            "another name.",
        ),
    )


def group_premises(count: int, rounds: int) -> tuple[Premise, ...]:
    """What a merge of group models rests on (docs/theory.md, section 15.2), in a fixed order."""
    return (
        Premise(
            "grouping",
            "met",
            f"A keyed hash of its name put each client into one of {count} groups; the key was fixed when the run was "
            "created, and no client's data had a part in it.",
        ),
        Premise(
            "rounds apart",
            "met",
            f"Every merged group trained apart for {rounds} rounds, fixed before training; its model never saw a "
            "common round.",
        ),
    )


def preprocessing_premise(facts: TrainingFacts) -> Premise:
    """Whether clients' data shaped the preprocessing, which no rollback undoes."""
    if facts.preprocessing == FIXED_CONSTANTS:
        return Premise("preprocessing", "met", "Preprocessing uses fixed constants; no client's data shaped it.")
    if facts.preprocessing == DECLARED_FIXED:
        return Premise("preprocessing", "trusted", "The operator declares that no client's data shaped preprocessing.")
    return Premise(
        "preprocessing",
        "assumed",
        "The data were prepared before they were handed over; it is assumed that the forgotten clients' data did "
        "not shape that.",
    )


def features_premise(facts: TrainingFacts) -> tuple[Premise, ...]:
    """Whether clients' data shaped the features that a linear model is put on; said only where there are some."""
    if not facts.features:
        return ()
    if facts.features_declared:
        status: Status = "trusted"
        statement = "The features are those of a public network; the operator declares that no client's data shaped it."
    else:
        status, statement = "met", "The features are drawn from a seed in the spec; no client's data shaped them."
    return (Premise("features", status, statement, f"feature map {facts.features}"),)


def calibration_premise(calibration: Calibration, epsilon: float) -> Premise:
    """Whether the noise is as large as (epsilon, delta) needs."""
    if calibration == "exact":
        return Premise("calibration", "met", "Exact calibration of the Gaussian mechanism (Balle & Wang 2018).")
    if epsilon < 1.0:
        return Premise(
            "calibration",
            "assumed",
            "Classical calibration inside its range (epsilon < 1), not the exact one.",
        )
    return Premise(
        "calibration",
        "failed",
        f"Classical calibration is proven for epsilon < 1 only; it was used at epsilon = {epsilon:g}.",
    )


def _arithmetic_premise(facts: TrainingFacts, largest_psi: float) -> Premise:
    if not largest_psi <= ROUNDING_HOLDS_UP_TO:
        return Premise(
            "arithmetic",
            "assumed",
            "The sensitivity is beyond the range in which rounding is bounded; it is assumed not to matter.",
        )
    if facts.dtype == "float64" and facts.rounding_bounded:
        return Premise(
            "arithmetic",
            "met",
            "Local steps ran in float64; a bound on their rounding is added to the sensitivity.",
        )
    return Premise(
        "arithmetic",
        "assumed",
        f"Rounding of the {facts.dtype} local steps is not bounded and is assumed not to matter.",
    )


def premises_that_count(premises: Sequence[Premise], *, exact: bool, fresh: bool) -> list[Premise]:
    """The premises that a level rests on: all of them, unless no forgotten client has a part in the model."""
    if not exact:
        return list(premises)
    names = FRESH_START if fresh else FRESH_START + ON_THE_PATH
    return [premise for premise in premises if premise.name in names]


def level_of(premises: Sequence[Premise], *, exact: bool, fresh: bool = False) -> Level:
    """The level that the premises allow.

    `exact` says that no forgotten client has a part in the model training goes on from. `fresh` says that it is a new
    initial model; one that was trained before also rests on which rounds counted (docs/theory.md, section 12.2).
    """
    statuses = {premise.status for premise in premises_that_count(premises, exact=exact, fresh=fresh)}
    if "failed" in statuses:
        return "none"
    if "assumed" in statuses:
        return "conditional"
    return "exact" if exact else "proven"
