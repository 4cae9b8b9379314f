"""Premises of methods that add no noise: heads in closed form, merged groups, and heuristics."""

from __future__ import annotations

from sifu.core.premises.before_training import (
    engine_premises,
    features_premise,
    hyper_parameters_premise,
    identity_premises,
    preprocessing_premise,
)
from sifu.core.premises.premise import Premise
from sifu.core.spec import Spec
from sifu.theory.facts import MASKED_STATISTICS, TrainingFacts


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
