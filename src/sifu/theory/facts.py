"""Facts about a federation that the theorems use: profiles of its clients, and settings of its training."""

from __future__ import annotations

from dataclasses import dataclass

from sifu.theory.participation import Participation

AUTHENTICATED = "node keys"
CLAIMED = "claimed names"
IN_PROCESS = "in process"
BY_OPERATOR = "authenticated by the operator's program"
"""Values of `TrainingFacts.identity`, the way clients are identified; `CLAIMED` and other values prove no identity."""

FIXED_CONSTANTS = "fixed constants"
DECLARED_FIXED = "declared fixed by the operator"
"""Values of `TrainingFacts.preprocessing`; any other value means that the preprocessing is unknown."""

DRAWN_FROM_SEED = "drawn from the seed"
MADE_BY_OPERATOR = "made by the operator's program"
"""Values of `TrainingFacts.initial`; any other value means that the origin of initial models is unknown."""

MODULE_KNOWN = "known"
MODULE_DECLARED = "declared: "
MODULE_NOT_DECLARED = "not declared"
"""Values of `TrainingFacts.module`; declared functions follow `MODULE_DECLARED`, with the digests of their files."""

BY_PARTICIPANTS = "the data of its participants"
ON_A_GPU = "its participants, computed on a GPU"
ON_A_REPEATING_GPU = "its participants, on a GPU that repeated their bits"
ON_NODES = "what nodes of their own send"
"""Values of `TrainingFacts.engine`, the inputs that decide the last bits of a round (docs/theory.md, section 6.6)."""

UNKNOWN = "not known"
"""Value of every field that an engine leaves unset, and of `TrainingFacts.engine` for engines from outside sifu."""

MINIMUM_OF_ANSWERS = "a minimum of"
MASKED_STATISTICS = "masked statistics, of which only the sum can be checked"
LEAST_MASKED = 3
"""Fewest participants of a masked sum. With two, anyone who knows one part can compute the other part."""
DROPPED_MASKED_ROUND = "dropping a masked round in which one client fails"
BUFFERS = "averaging buffers with the parameters"
"""Item of `TrainingFacts.outside` for modules with floating buffers, such as statistics of batch normalisation."""
CLOSED_EARLY = "closing a round before the slowest clients have answered"


def decides_rounds(what: str) -> bool:
    """Return whether, by this item of `TrainingFacts.outside`, one client affects which rounds or other replies count.

    >>> decides_rounds("a minimum of 3 answers a round"), decides_rounds("dropout")
    (True, False)
    """
    return what.startswith((MINIMUM_OF_ANSWERS, DROPPED_MASKED_ROUND, CLOSED_EARLY))


ROUNDING_HOLDS_UP_TO = 1000.0
"""Largest distance to a counterfactual model for which `RoundResult.rounding` must hold.

For a larger Psi no allowance for rounding is proven, and the certificate says so.
"""


@dataclass(frozen=True)
class ClientProfile:
    """Properties of a client that are known before any round.

    `expansion` is P_i, an upper bound in (0, 1] on how much the client's steps of a round lengthen the distance of two
    models, for every batch that it can draw (docs/theory.md, section 5.8). None means unknown: only an assumed
    regularity can then be used.
    """

    name: str
    samples: int
    local_steps: int
    expansion: float | None = None


@dataclass(frozen=True)
class TrainingFacts:
    """Training settings common to all clients and rounds, and the facts that a certificate's premises need.

    Fields that an engine leaves unset are unknown.

    Attributes:
        local_rate: Largest learning rate of a local step, or None if only the clients' safe steps limit it.
        momentum: Momentum of local steps.
        weight_decay: Weight decay of local steps.
        batch_size: Samples per local step, or None for all samples.
        participation: Rule that selects a round's participants.
        dtype: Floating-point type of the models.
        smooth_model: True if the loss has Lipschitz gradients in the parameters (a linear model with softmax, logistic
            or squared loss), or False for a ReLU network, dropout, or an unknown user module.
        rounding_bounded: True if `RoundResult.rounding` is a proven allowance (float64 linear models).
        outside: Descriptions of training steps that the theory does not cover (dropout, batch norm, clipping...).
        preprocessing: Origin of the constants used in preprocessing.
        shape_from_labels: True if the number of outputs was counted from all clients' labels.
        identity: Method of identifying clients (`sifu.core.client_names`).
        initial: Origin of the initial models.
        features: Digest of the public feature map applied to samples, or "" without a feature map.
        features_declared: True if the feature map is not drawn from a seed. The operator must then declare that it
            depends on no client's data.
        module: Reason why modules of the operator keep no state between clients, or "" if there is no such module.
        engine: Inputs that determine the last bits of a round. This value follows from the class of the engine when a
            run is created; the engine cannot set it.
        trainer: Name and bits number of the program that takes local steps here; a run goes on only with it.
    """

    local_rate: float | None
    momentum: float
    weight_decay: float
    batch_size: int | None
    participation: Participation
    dtype: str
    smooth_model: bool
    rounding_bounded: bool
    outside: tuple[str, ...] = ()
    preprocessing: str = UNKNOWN
    shape_from_labels: bool = False
    identity: str = UNKNOWN
    initial: str = UNKNOWN
    features: str = ""
    features_declared: bool = False
    module: str = ""
    engine: str = UNKNOWN
    trainer: str = UNKNOWN
