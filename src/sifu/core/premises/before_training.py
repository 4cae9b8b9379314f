"""What came before any round: the initial model, preprocessing, features, hyper-parameters and who the clients are."""

from __future__ import annotations

from typing import Literal

from sifu.core.premises.premise import Premise, Status
from sifu.theory.facts import (
    AUTHENTICATED,
    BY_LARGEST_CLIENT,
    BY_PARTICIPANTS,
    CLAIMED,
    DECLARED_FIXED,
    DRAWN_FROM_SEED,
    FIXED_CONSTANTS,
    IN_PROCESS,
    MADE_BY_OPERATOR,
    ON_NODES,
    TrainingFacts,
)

RateSource = Literal["given", "others", "forgotten"]
"""Whether the local rate was given, or set by clients' data without or with the forgotten ones deciding it."""


def before_training_premises(facts: TrainingFacts, rate_source: RateSource) -> tuple[Premise, ...]:
    """What came before any round; these premises matter to every method and level."""
    return (
        initial_model_premise(facts),
        preprocessing_premise(facts),
        *features_premise(facts),
        hyper_parameters_premise(rate_source, facts.shape_from_labels),
        *identity_premises(facts),
        *engine_premises(facts),
    )


def engine_premises(facts: TrainingFacts) -> tuple[Premise, ...]:
    """Whether a round follows from its participants' data alone; said only where it is not so by construction."""
    if facts.engine == BY_PARTICIPANTS:
        return ()
    if facts.engine == BY_LARGEST_CLIENT:
        return (Premise("layout", "assumed"),)
    return (Premise("engine", "trusted" if facts.engine == ON_NODES else "assumed"),)


def initial_model_premise(facts: TrainingFacts) -> Premise:
    """Whether clients' data can have shaped the model that training starts from."""
    if facts.initial == DRAWN_FROM_SEED:
        return Premise("initial model", "met")
    return Premise("initial model", "trusted" if facts.initial == MADE_BY_OPERATOR else "assumed")


def preprocessing_premise(facts: TrainingFacts) -> Premise:
    """Whether clients' data shaped the preprocessing, which no rollback undoes."""
    if facts.preprocessing == FIXED_CONSTANTS:
        return Premise("preprocessing", "met")
    return Premise("preprocessing", "trusted" if facts.preprocessing == DECLARED_FIXED else "assumed")


def features_premise(facts: TrainingFacts) -> tuple[Premise, ...]:
    """Whether clients' data shaped the features that a linear model is put on; said only where there are some."""
    if not facts.features:
        return ()
    status: Status = "trusted" if facts.features_declared else "met"
    return (Premise("features", status, confidential={"feature_map": facts.features}),)


def hyper_parameters_premise(rate_source: RateSource, shape_from_labels: bool) -> Premise:
    """Hyper-parameters belong to the plan, which the guarantee takes as given; say where they came from."""
    if shape_from_labels:
        return Premise("hyper-parameters", "assumed", "labels")
    status: dict[RateSource, Status] = {"given": "trusted", "others": "met", "forgotten": "assumed"}
    return Premise("hyper-parameters", status[rate_source], rate_source)


def identity_premises(facts: TrainingFacts) -> tuple[Premise, ...]:
    """How clients on other machines are known; in one process there is nothing to say."""
    if facts.identity == IN_PROCESS:
        return ()
    if facts.identity == AUTHENTICATED:
        return (Premise("identity", "trusted"),)
    return (Premise("identity", "assumed", "claimed" if facts.identity == CLAIMED else "unknown"),)
