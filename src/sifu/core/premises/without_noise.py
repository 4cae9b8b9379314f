"""Premises of methods that add no noise: heads in closed form, merged groups, and heuristics."""

from __future__ import annotations

from sifu.core.premises.before_training import (
    features_premise,
    hyper_parameters_premise,
    identity_premises,
    preprocessing_premise,
)
from sifu.core.premises.premise import Premise
from sifu.theory.facts import MASKED_STATISTICS, TrainingFacts


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
            "Statistics were masked: a sum that no data can have was refused, single clients' could not be checked; "
            "clients are trusted to have sent their own."
            if MASKED_STATISTICS in facts.outside
            else "Statistics that no data can have were refused; otherwise clients are trusted to have sent their own.",
        ),
    )


def grouping_premise(count: int, depends: bool) -> Premise:
    """Who is in which group; `depends` says that there would be another number of groups without the forgotten."""
    if depends:
        return Premise(
            "grouping",
            "assumed",
            f"The number of groups, {count}, was set by rule from how many clients there are, and would be another one "
            "without the forgotten; the certificate compares with a world that has as many groups.",
        )
    return Premise(
        "grouping",
        "met",
        f"A keyed hash of its name put each client into one of {count} groups; the key was fixed when the run was "
        "created, no client's data had a part in it, and without the forgotten there would be as many groups.",
    )


def group_premises(count: int, rounds: int, stretch: float, *, depends: bool) -> tuple[Premise, ...]:
    """What a merge of group models rests on (docs/theory.md, section 15.2), in a fixed order."""
    return (
        grouping_premise(count, depends),
        Premise(
            "rounds apart",
            "met",
            f"Every merged group trained apart for {rounds} rounds, fixed before training; its model never saw a "
            f"common round.{_moved_on(stretch)}",
        ),
    )


def _moved_on(stretch: float) -> str:
    if stretch == 1.0:
        return ""
    return f" The mean was moved on from the fresh model by a factor of {stretch:g}, fixed before training, too."


def heuristic_premise(method: str) -> Premise:
    """A heuristic proves nothing, whatever else holds: its level is always `none`."""
    return Premise(
        "method",
        "failed",
        f"{method} is a heuristic: nothing bounds what the model it makes still holds of the clients.",
    )
