"""What the theorems need to know of a federation: its clients before any round, and what each round does."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sifu.theory.participation import Participation

AUTHENTICATED = "node keys"
CLAIMED = "claimed names"
IN_PROCESS = "in process"
BY_OPERATOR = "authenticated by the operator's program"
"""How clients are known to the engine, `TrainingFacts.identity`; the second, or any other value, leaves a doubt."""

FIXED_CONSTANTS = "fixed constants"
DECLARED_FIXED = "declared fixed by the operator"
"""Two values of `TrainingFacts.preprocessing`; any other means that nothing is known of it."""

DRAWN_FROM_SEED = "drawn from the seed"
MADE_BY_OPERATOR = "made by the operator's program"
"""Two values of `TrainingFacts.initial`; any other means that nothing is known of it."""

FRESH_COPIES = "a fresh copy for each client, compared when repeated"
"""`TrainingFacts.module` where a module of the operator's own takes part: how it is kept from carrying data."""

BY_PARTICIPANTS = "the data of its participants"
BY_LARGEST_CLIENT = "its participants, padded to the largest of all clients"
ON_A_GPU = "its participants, computed on a GPU"
ON_A_REPEATING_GPU = "its participants, on a GPU that repeated their bits"
ON_NODES = "what nodes of their own send"
"""What the last bits of a round follow from, `TrainingFacts.engine` (docs/theory.md, section 6.6)."""

UNKNOWN = "not known"
"""What an engine that does not say has for preprocessing, identity, initial models and source of noise, and what is
known of the rounds of an engine that is not sifu's own."""
NO_NOISE = "none"
"""`TrainingFacts.noise_source` of a training that adds no noise."""

MINIMUM_OF_ANSWERS = "a minimum of"
MASKED_STATISTICS = "masked statistics, of which only the sum can be checked"
LEAST_MASKED = 3
"""Participants of a masked sum: with two, anyone who knows one client's part knows the other's."""
DROPPED_MASKED_ROUND = "dropping a masked round in which one client fails"
BATCH_NORMALISATION = "batch normalisation"
OTHER_BUFFERS = "buffers that are not parameters"
"""Two items of `TrainingFacts.outside`: a file of parameters alone may not be the model that was evaluated."""
CLOSED_EARLY = "closing a round before the slowest clients have answered"


def decides_rounds(what: str) -> bool:
    """Whether an item of `TrainingFacts.outside` lets one client decide whether a round, or another's answer, counts.

    >>> decides_rounds("a minimum of 3 answers a round"), decides_rounds("dropout")
    (True, False)
    """
    return what.startswith((MINIMUM_OF_ANSWERS, DROPPED_MASKED_ROUND, CLOSED_EARLY))


ROUNDING_HOLDS_UP_TO = 1000.0
"""`RoundResult.rounding` must cover every other world whose model is at most this far away: Psi beyond it has
no proven allowance, and the certificate then says so."""


@dataclass(frozen=True)
class ClientProfile:
    """What is known of a client before any round.

    `smoothness` (beta) bounds from above the curvature of *every* loss one of its local steps descends
    (each mini-batch too), `curvature` (mu) bounds it from below; both include weight decay. With clipped steps mu is
    -beta: a clipped gradient is beta-Lipschitz, but not that of a convex loss (docs/theory.md, section 5.9). None
    means that nothing is known: then only an assumed regularity can be used.
    """

    name: str
    samples: int
    local_steps: int
    smoothness: float | None = None
    curvature: float | None = None


def clipped_profile(client: ClientProfile) -> ClientProfile:
    """What is known of a client whose steps are clipped, from what is known of its loss (docs/theory.md, section 5.9).

    >>> clipped_profile(ClientProfile("a", 10, 5, smoothness=2.0, curvature=0.1)).curvature
    -2.0
    """
    return replace(client, curvature=None if client.smoothness is None else -client.smoothness)


@dataclass(frozen=True)
class TrainingFacts:
    """What every client does in every round, and the facts a certificate's premises need.

    `smooth_model` says that the loss has Lipschitz gradients in the parameters (a linear model with
    softmax, logistic or squared loss); a ReLU network, dropout, or an unknown user module has False.
    `rounding_bounded` says that `RoundResult.rounding` is a proven allowance (float64 linear models) in rounds whose
    participants all have eta beta <= 2; of a view, that this holds for everyone on its path.
    `outside` lists what lies outside the theory (dropout, batch norm, clipping...), in words.
    `shape_from_labels` says that the number of outputs was counted from all clients' labels. `clip` bounds the norm
    of every client's update (0: it does not), `noise` is the noise added to each, as a multiple of `clip`, and
    `noise_source` where that noise comes from. `identity` says how clients are known (`sifu.core.identity`), `initial`
    where initial models come from. What an engine does not say is not known. `local_clip` bounds the norm of the
    gradient of every local step (0: it does not). `features` is the digest of the public feature map that samples go
    through first ("" where there is none); `features_declared` says that it is not drawn from a seed, so that the
    operator must declare that no client's data shaped it. `module` says how a module of the operator's own is used ("":
    there is none, or the run was made before this was recorded). `engine` says what a round follows from; it is
    decided by the engine's class when a run is made, never by what the engine says of itself.
    """

    local_rate: float
    momentum: float
    nesterov: bool
    weight_decay: float
    batch_size: int | None
    server_rate: float
    participation: Participation
    dtype: str
    smooth_model: bool
    rounding_bounded: bool
    outside: tuple[str, ...] = ()
    preprocessing: str = UNKNOWN
    shape_from_labels: bool = False
    clip: float = 0.0
    noise: float = 0.0
    noise_source: str = UNKNOWN
    identity: str = UNKNOWN
    initial: str = UNKNOWN
    local_clip: float = 0.0
    features: str = ""
    features_declared: bool = False
    module: str = ""
    engine: str = UNKNOWN
