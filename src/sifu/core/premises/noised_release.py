"""Every premise of a model released with noise (docs/theory.md, section 12.1)."""

from __future__ import annotations

from sifu.choices import Calibration
from sifu.core.noise import NoiseSource
from sifu.core.premises.before_training import RateSource, before_training_premises
from sifu.core.premises.history import (
    UNBROKEN,
    RecordHistory,
    accounting_premise,
    counterfactual_premise,
    outside_premises,
    record_premises,
    replies_premise,
)
from sifu.core.premises.noise import noise_premise
from sifu.core.premises.premise import Premise, Status
from sifu.core.premises.regularity import MeasuredRegularity, regularity_premise
from sifu.theory.facts import IN_PROCESS, ROUNDING_HOLDS_UP_TO, TrainingFacts
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
