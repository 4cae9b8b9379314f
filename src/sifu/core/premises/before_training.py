"""What came before any round: the initial model, preprocessing, features, hyper-parameters and who the clients are."""

from __future__ import annotations

from typing import Literal

from sifu.core.premises.premise import Premise, Status
from sifu.theory.facts import (
    AUTHENTICATED,
    CLAIMED,
    DECLARED_FIXED,
    DRAWN_FROM_SEED,
    FIXED_CONSTANTS,
    IN_PROCESS,
    MADE_BY_OPERATOR,
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
    )


def initial_model_premise(facts: TrainingFacts) -> Premise:
    """Whether clients' data can have shaped the model that training starts from."""
    if facts.initial == DRAWN_FROM_SEED:
        return Premise("initial model", "met", "The initial model is drawn from the seed; no client's data shaped it.")
    if facts.initial == MADE_BY_OPERATOR:
        return Premise(
            "initial model",
            "trusted",
            "The operator's own program makes the model; that no client's data shaped the initial one, and that "
            "nothing but its parameters passes from round to round, is trusted.",
        )
    return Premise(
        "initial model",
        "assumed",
        "Where the initial model comes from is not known; it is assumed that no client's data shaped it.",
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
        "given": "Hyper-parameters were given by the operator; that clients' data did not decide them is trusted.",
        "others": "The local rate is the one clients' smoothness bounds set; without the forgotten clients it would be "
        "the same.",
        "forgotten": "The local rate is the one clients' smoothness bounds set and would be another one without the "
        "forgotten clients; what it reveals of them is assumed not to matter.",
    }
    status: dict[RateSource, Status] = {"given": "trusted", "others": "met", "forgotten": "assumed"}
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
    told_apart = (
        "Clients were known by the names they claimed" if claimed else "How clients were told apart is not known"
    )
    return (
        Premise(
            "identity",
            "assumed",
            f"{told_apart}; it is assumed that each was who it said it was, and that no forgotten client came back "
            "under another name.",
        ),
    )
