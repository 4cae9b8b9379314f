"""What an engine is: it runs rounds. The embedded simulator and Flower are two of them.

A method is handed an engine and speaks only to this protocol, so every method runs on every engine.
Engines know nothing of Psi, budgets or stores; they report scalars, rounded so that no bound built on
them is too small.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from sifu.core.layout import ModelLayout, Vector
from sifu.theory.arrays import Floats, Integers
from sifu.theory.facts import ClientProfile, TrainingFacts
from sifu.theory.participation import ClientIndices


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
    "impossible statistics",
    "unusable samples",
    "another feature map",
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
    detail: str = ""
    """What exactly was wrong, for the operator who reads the error; it is not recorded."""

    def row(self, **more: int) -> dict[str, Any]:
        """As it is recorded, with `more` that says where."""
        place = {"branch": self.position.branch, "round": self.position.round}
        return place | {"client": self.client, "reason": self.reason, "left_out": int(self.left_out)} | more


@dataclass(frozen=True)
class Incident:
    """Something that went otherwise than asked: of a client, or of a whole round (then without a name)."""

    branch: int
    round: int
    client: str
    what: str


@dataclass(frozen=True)
class RoundResult:
    """One round of FedAvg (eq. 5 of the paper; docs/theory.md, section 2.1) as it happened.

    `participants` are sorted client indices; `samples` their |D_i|; `drifts` ||theta_i - mean||,
    rounded up, in float64. `mean_shift` is ||mean - theta^n||, rounded up. `rounding` bounds how far
    floating point may have moved the result from exact arithmetic (0.0 where nothing is proven, see
    `TrainingFacts.rounding_bounded`). `gram` holds <theta_i - mean, theta_j - mean> and `updates` the rows
    theta_i - theta^n of the participants, when asked for; `gram_errors` bounds how far each theta_i - mean in `gram` is
    off, and without it the matrix is not recorded. An empty round has no participants, leaves the model
    as it was, and has zeros everywhere. `rejections` are replies that were refused; nothing of them is in the model.
    """

    model: Vector
    participants: ClientIndices
    samples: Integers
    drifts: Floats
    mean_shift: float
    rounding: float
    gram: Floats | None = None
    updates: NDArray[np.floating] | None = None
    rejections: tuple[Rejection, ...] = ()
    gram_errors: Floats | None = None


@dataclass(frozen=True)
class Evaluation:
    """Per evaluated client: samples, correct predictions (or 0 for regression), sum of losses."""

    clients: ClientIndices
    samples: Integers
    correct: Integers
    loss_sum: Floats

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
    """Runs rounds and evaluates models. Models are flat vectors of `layout`.

    An engine that can do more inherits the capabilities it has (`sifu.core.capabilities`).
    """

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


class LacksData:
    """Capability of an engine that may lack the data of some of its clients."""

    absent: frozenset[int] = frozenset()
    """Clients whose data are missing: stand-ins, which are never trained on and never evaluated."""


class EvaluatesSeveral(ABC):
    """Capability of an engine for which a message costs more than a model."""

    @abstractmethod
    def evaluate_several(self, models: Iterable[Vector], clients: ClientIndices) -> list[Evaluation]:
        """Evaluate each of `models` on the data of `clients`."""


class MayNotEvaluate(ABC):
    """Capability of an engine whose clients may not evaluate models."""

    @property
    @abstractmethod
    def evaluates(self) -> bool:
        """Whether clients evaluate models at all."""


class RunsGroupRounds(ABC):
    """Capability of an engine whose rounds have a fixed cost, shared by groups that train at the same time."""

    @abstractmethod
    def run_group_rounds(
        self, models: Sequence[Vector], position: Position, groups: Sequence[ClientIndices]
    ) -> list[RoundResult]:
        """Run one round of each group from its own model."""


class LosesRounds(ABC):
    """Capability of an engine whose clients may all fail to answer."""

    @abstractmethod
    def loses(self, position: Position, active: ClientIndices, participants: ClientIndices) -> bool:
        """Return whether a round was lost: nobody took part although enough clients were asked."""


class LeavesOut(ABC):
    """Capability of an engine that contacts other machines, and must be told whom not to contact any more."""

    @abstractmethod
    def leave_out(self, clients: Iterable[int]) -> None:
        """Ask nothing of these clients from now on, whatever a round says."""


class NotesIncidents(ABC):
    """Capability of an engine that notes what did not happen as asked."""

    @abstractmethod
    def take_incidents(self) -> list[Incident]:
        """Return the incidents since the last call."""


class ShowsSamples(ABC):
    """Capability of an engine that shows digests of its clients' samples, so that a run can recognise them."""

    @property
    @abstractmethod
    def sample_digests(self) -> tuple[str, ...]:
        """One digest per client (`sifu.data.dataset.sample_digest`)."""


class ChecksModule(ABC):
    """Capability of an engine that trains a user's module."""

    @abstractmethod
    def check_module(self) -> None:
        """Refuse a module whose local trainings give different results when they are repeated."""


def evaluate_present(engine: Engine, model: Vector, clients: ClientIndices) -> Evaluation:
    """How `model` does on the data of `clients`; nothing where those of some are not there, which would say less."""
    if isinstance(engine, LacksData) and not engine.absent.isdisjoint(clients.tolist()):
        none = np.zeros(0, dtype=np.int64)
        return Evaluation(none, none, none, np.zeros(0))
    return engine.evaluate(model, clients)


def evaluate_each(engine: Engine, models: Iterable[Vector], clients: ClientIndices) -> list[Evaluation]:
    """How each of `models` does on the data of `clients`, in whatever way is cheapest for the engine.

    A client that does not answer has no samples.
    """
    if isinstance(engine, EvaluatesSeveral):
        return engine.evaluate_several(models, clients)
    return [engine.evaluate(model, clients) for model in models]


def run_group_rounds(
    engine: Engine, models: Sequence[Vector], position: Position, groups: Sequence[ClientIndices]
) -> list[RoundResult]:
    """One round of each group from its own model, all at the same place; bit for bit what each would do alone.

    No client is in two groups and draws are keyed by client, so together they are one round of the federation.
    """
    if isinstance(engine, RunsGroupRounds):
        return engine.run_group_rounds(models, position, groups)
    return [engine.run_round(model, position, members) for model, members in zip(models, groups, strict=True)]
