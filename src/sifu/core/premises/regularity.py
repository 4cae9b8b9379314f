"""Which theorem bounds how far local steps spread: the premise `regularity` (docs/theory.md, section 12.1)."""

from __future__ import annotations

from dataclasses import dataclass

from sifu.core.ledger import finite_or_text
from sifu.core.premises.premise import Premise
from sifu.theory.facts import TrainingFacts
from sifu.theory.regularity import RegularityClass


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
