"""Which theorem bounds how far local steps spread: the premise `regularity` (docs/theory.md, section 12.1)."""

from __future__ import annotations

from dataclasses import dataclass

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
