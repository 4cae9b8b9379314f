"""Every premise of what noise in training promises (docs/theory.md, section 10)."""

from __future__ import annotations

import math

from sifu.core.premises.before_training import RateSource, before_training_premises
from sifu.core.premises.history import (
    UNBROKEN,
    RecordHistory,
    counterfactual_premise,
    outside_premises,
    record_premises,
    replies_premise,
)
from sifu.core.premises.noise import noise_premise, training_noise_size_premise
from sifu.core.premises.premise import Premise
from sifu.theory.composition import TrainingNoise
from sifu.theory.facts import IN_PROCESS, TrainingFacts


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
    """Every premise of what noise in training promises (`sifu.theory.composition`), in a fixed order.

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
