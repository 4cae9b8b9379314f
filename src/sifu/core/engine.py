"""What an engine is: it runs rounds. The embedded simulator and Flower are two of them.

A method is handed an engine and speaks only to this protocol, so every method runs on every engine.
Engines know nothing of Psi, budgets or stores; they report scalars, rounded so that no bound built on
them is too small.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from sifu.core.identity import IN_PROCESS
from sifu.core.layout import ModelLayout, Vector
from sifu.core.participation import ClientIndices, Participation

FIXED_CONSTANTS = "fixed constants"
DECLARED_FIXED = "declared fixed by the operator"
"""Two values of `TrainingFacts.preprocessing`; any other means that nothing is known of it."""

ROUNDING_HOLDS_UP_TO = 1000.0
"""`RoundResult.rounding` must cover every other world whose model is at most this far away: Psi beyond it has
no proven allowance, and the certificate then says so."""


@dataclass(frozen=True)
class Position:
    """Where a round starts: model theta_u^n of the paper, `branch` u and `round` n.

    `branch` is 0 for the first training and grows by one with every request, so a position is never
    used twice and keys every random choice of its round.
    """

    branch: int
    round: int


Reason = Literal[
    "unknown client",
    "forgotten client",
    "not asked",
    "another round",
    "twice",
    "not an array",
    "wrong dtype",
    "wrong shape",
    "not finite",
    "too large",
    "wrong samples",
    "round dropped",
]
"""Why a client's reply was refused (`sifu.core.replies`)."""


@dataclass(frozen=True)
class Rejection:
    """A reply that was refused, and why.

    `client` is the name of a known client, or what an unknown one called itself. `left_out` says that a client the
    round had asked for is missing from it because of this.
    """

    position: Position
    client: str
    reason: Reason
    left_out: bool


@dataclass(frozen=True)
class ClientProfile:
    """What is known of a client before any round.

    `smoothness` (beta) bounds from above the curvature of *every* loss one of its local steps descends
    (each mini-batch too), `curvature` (mu) bounds it from below; both include weight decay. None means
    that nothing is known: then only an assumed regularity can be used.
    """

    name: str
    samples: int
    local_steps: int
    smoothness: float | None = None
    curvature: float | None = None


@dataclass(frozen=True)
class TrainingFacts:
    """What every client does in every round, and the facts a certificate's premises need.

    `smooth_model` says that the loss has Lipschitz gradients in the parameters (a linear model with
    softmax, logistic or squared loss); a ReLU network, dropout, or an unknown user module has False.
    `rounding_bounded` says that `RoundResult.rounding` is a proven allowance (float64 linear models).
    `outside` lists what lies outside the theory (dropout, batch norm, clipping...), in words.
    `shape_from_labels` says that the number of outputs was counted from all clients' labels. `clip` bounds the norm
    of every client's update (0: it does not), `noise` is the noise added to each, as a multiple of `clip`. `identity`
    says how clients are known (`sifu.core.identity`).
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
    preprocessing: str = FIXED_CONSTANTS
    shape_from_labels: bool = False
    clip: float = 0.0
    noise: float = 0.0
    identity: str = IN_PROCESS


@dataclass(frozen=True)
class RoundResult:
    """One round of FedAvg (eq. 4) as it happened.

    `participants` are sorted client indices; `samples` their |D_i|; `drifts` ||theta_i - mean||,
    rounded up, in float64. `mean_shift` is ||mean - theta^n||, rounded up. `rounding` bounds how far
    floating point may have moved the result from exact arithmetic (0.0 where nothing is proven, see
    `TrainingFacts.rounding_bounded`). `gram` holds <theta_i - mean, theta_j - mean> and `updates` the rows
    theta_i - theta^n of the participants, when asked for. An empty round has no participants, leaves the model
    as it was, and has zeros everywhere. `rejections` are replies that were refused; nothing of them is in the model.
    """

    model: Vector
    participants: ClientIndices
    samples: NDArray[np.int64]
    drifts: NDArray[np.float64]
    mean_shift: float
    rounding: float
    gram: NDArray[np.float64] | None = None
    updates: NDArray[np.floating] | None = None
    rejections: tuple[Rejection, ...] = ()


@dataclass(frozen=True)
class Evaluation:
    """Per evaluated client: samples, correct predictions (or 0 for regression), sum of losses."""

    clients: ClientIndices
    samples: NDArray[np.int64]
    correct: NDArray[np.int64]
    loss_sum: NDArray[np.float64]

    @property
    def accuracy(self) -> float:
        """Correct predictions over all samples of the clients evaluated; NaN when there are none."""
        total = int(self.samples.sum())
        return float(self.correct.sum()) / total if total else float("nan")

    @property
    def loss(self) -> float:
        """Mean loss over all samples of the clients evaluated; NaN when there are none."""
        total = int(self.samples.sum())
        return float(self.loss_sum.sum()) / total if total else float("nan")


class Engine(Protocol):
    """Runs rounds and evaluates models. Models are flat vectors of `layout`."""

    @property
    def layout(self) -> ModelLayout: ...

    @property
    def clients(self) -> tuple[ClientProfile, ...]: ...

    @property
    def facts(self) -> TrainingFacts: ...

    def initial_model(self, branch: int) -> Vector:
        """A fresh model that no client's data has touched; another one for each branch."""
        ...

    def run_round(
        self,
        model: Vector,
        position: Position,
        active: ClientIndices,
        *,
        want_gram: bool = False,
        want_updates: bool = False,
    ) -> RoundResult:
        """One round from `model` among the `active` clients; the argument is never modified.

        Same model, position and active clients: same result, bit for bit, on one machine.
        """
        ...

    def local_updates(
        self, model: Vector, position: Position, clients: ClientIndices, steps: int
    ) -> NDArray[np.floating]:
        """theta_i - model of each of `clients` after `steps` local steps, in their order; nothing is averaged."""
        ...

    def evaluate(self, model: Vector, clients: ClientIndices) -> Evaluation:
        """How `model` does on the data of each of `clients`."""
        ...


@runtime_checkable
class EvaluatesSeveral(Protocol):
    """An engine to which a message costs more than a model: it evaluates several models at once."""

    def evaluate_several(self, models: Iterable[Vector], clients: ClientIndices) -> list[Evaluation]:
        """How each of `models` does; whoever does not answer has no samples."""
        ...


def evaluate_each(engine: Engine, models: Iterable[Vector], clients: ClientIndices) -> list[Evaluation]:
    """How each of `models` does on the data of `clients`, in whatever way is cheapest for the engine."""
    if isinstance(engine, EvaluatesSeveral):
        return engine.evaluate_several(models, clients)
    return [engine.evaluate(model, clients) for model in models]
