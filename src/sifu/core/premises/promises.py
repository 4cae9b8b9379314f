"""Every premise of each kind of promise (docs/theory.md, sections 10 and 12.1).

A model released with noise, noise in training, and no noise at all: heads in closed form, merged groups, heuristics.
"""

from __future__ import annotations

import math

from sifu.choices import Calibration
from sifu.core.premises.conditions import (
    UNBROKEN,
    MeasuredRegularity,
    Premise,
    RateSource,
    RecordHistory,
    Status,
    accounting_premise,
    before_training_premises,
    counterfactual_premise,
    engine_premises,
    features_premise,
    hyper_parameters_premise,
    identity_premises,
    noise_premise,
    outside_premises,
    preprocessing_premise,
    record_premises,
    regularity_premise,
    replies_premise,
    training_noise_size_premise,
)
from sifu.core.randomness import NoiseSource
from sifu.core.spec import Spec
from sifu.theory.calibration import TrainingNoise
from sifu.theory.facts import IN_PROCESS, MASKED_STATISTICS, ROUNDING_HOLDS_UP_TO, TrainingFacts
from sifu.theory.history import Accounting


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
        counterfactual_premise(facts.participation.independent, apart=facts.identity != IN_PROCESS),
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
    if not largest_psi <= ROUNDING_HOLDS_UP_TO:
        return Premise("arithmetic", "assumed", "beyond")
    if facts.dtype == "float64" and facts.rounding_bounded:
        return Premise("arithmetic", "met")
    return Premise("arithmetic", "assumed", values={"dtype": facts.dtype})


def training_noise_premises(
    facts: TrainingFacts,
    promised: TrainingNoise,
    *,
    epsilon: float,
    rate_source: RateSource,
    replayed: bool = False,
    left_out: int = 0,
    history: RecordHistory = UNBROKEN,
) -> tuple[Premise, ...]:
    """Every premise of what noise in training promises (`sifu.theory.calibration`), in a fixed order.

    `replayed` says that stored updates were replayed on the way to the model: they were added up with other weights
    than those that were counted, and calibration is neither clipped nor noised.
    """
    within, reached = promised.epsilon_composed <= epsilon, _digits_up(promised.epsilon_composed)
    return (
        Premise("clipping", "met", values={"clip": facts.clip, "noise": facts.noise}),
        training_noise_size_premise(promised.counted_rounds),
        Premise("history", "failed" if replayed else "met"),
        Premise("budget", "met", values={"reached": reached})
        if within
        else Premise("budget", "failed", values={"reached": reached, "epsilon": epsilon}),
        counterfactual_premise(facts.participation.independent, apart=facts.identity != IN_PROCESS),
        *(premise for premise in outside_premises(facts) if premise.name == "schedule"),
        *replies_premise(left_out),
        *record_premises(history),
        noise_premise(facts.noise_source),
        *before_training_premises(facts, rate_source),
        Premise("honest reports", "trusted", "counts"),
    )


def _digits_up(value: float) -> str:
    """Four digits, rounded up."""
    scale = 10.0 ** (3 - math.floor(math.log10(value))) if value > 0.0 else 1.0
    return f"{math.ceil(value * scale) / scale:.6g}"


def closed_form_premises(facts: TrainingFacts) -> tuple[Premise, ...]:
    """Every premise of a head solved from a sum over those who stay (docs/theory.md, section 14.3)."""
    if facts.shape_from_labels:
        hyper_parameters = hyper_parameters_premise("given", shape_from_labels=True)
    else:
        hyper_parameters = Premise("hyper-parameters", "met", "fixed")
    return (
        preprocessing_premise(facts),
        *features_premise(facts),
        hyper_parameters,
        *identity_premises(facts),
        *(premise for premise in engine_premises(facts) if premise.status == "assumed"),
        Premise("statistics", "trusted", "masked" if MASKED_STATISTICS in facts.outside else ""),
    )


def grouping_premise(count: int, depends: bool) -> Premise:
    """Who is in which group; `depends` says that there would be another number of groups without the forgotten."""
    return Premise("grouping", "assumed" if depends else "met", values={"count": count})


def group_premises(count: int, rounds: int, stretch: float, *, depends: bool) -> tuple[Premise, ...]:
    """What a merge of group models rests on (docs/theory.md, section 15.2), in a fixed order."""
    moved = stretch != 1.0
    return (
        grouping_premise(count, depends),
        Premise(
            "rounds apart",
            "met",
            "moved on" if moved else "",
            values={"rounds": rounds} | ({"stretch": stretch} if moved else {}),
        ),
    )


def tuning_premises(spec: Spec, *, depends: bool) -> tuple[Premise, ...]:
    """What a head on networks that groups tuned rests on besides (docs/theory.md, section 15.6), in a fixed order."""
    features, groups = spec.features, spec.groups
    blocks = features.tune == "blocks"
    values = {"block": features.block} if blocks else {"stretch": groups.stretch}
    return (
        grouping_premise(groups.count, depends),
        Premise("rounds apart", "met", f"tuned {features.tune}", values={"rounds": groups.rounds} | values),
        Premise("tuning", "trusted"),
    )


def heuristic_premise(method: str) -> Premise:
    """A heuristic proves nothing, whatever else holds: its level is always `none`."""
    return Premise("method", "failed", values={"method": method})
