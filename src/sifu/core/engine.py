"""Interface of engines, such as the embedded simulator and Flower, which run the rounds of training.

Methods use engines only through this protocol and optional capabilities, so they do not depend on the kind of engine.
Engines know nothing about Psi, budgets or stores. They report scalars, rounded so that no bound computed from them is
too small.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from sifu.core.layout import ModelLayout, Vector
from sifu.theory.arrays import Floats, Integers
from sifu.theory.facts import ClientProfile, TrainingFacts
from sifu.theory.participation import ClientIndices


@dataclass(frozen=True)
class Position:
    """Position in a run at which a round starts: theta_u^n of the paper, with `branch` u and `round` n.

    `branch` is 0 for the first training and grows by one with every request; groups that are rebuilt later have
    negative branches. A position is therefore never used twice, and it is the key of every random choice of its round.
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
"""Reasons to refuse a client's reply (`sifu.core.replies`)."""


@dataclass(frozen=True)
class Rejection:
    """A refused reply, with the reason.

    `client` is the name of a known client, or the name that an unknown one gave. `left_out` is True if the round asked
    the client and accepted no reply from it.
    """

    position: Position
    client: str
    reason: Reason
    left_out: bool
    detail: str = ""
    """Details for the operator in the error message, which are not recorded."""

    def row(self, **more: int) -> dict[str, Any]:
        """Return the rejection as a row of the record, with the additional columns `more`."""
        place = {"branch": self.position.branch, "round": self.position.round}
        return place | {"client": self.client, "reason": self.reason, "left_out": int(self.left_out)} | more


@dataclass(frozen=True)
class Incident:
    """Problem of one client in a round, or of the whole round (then `client` is empty)."""

    branch: int
    round: int
    client: str
    what: str


@dataclass(frozen=True)
class RoundResult:
    """Result of one round of FedAvg (eq. 5 of the paper; docs/theory.md, section 2.1).

    An empty round has no participants and leaves the model unchanged; its shift and rounding are zero.

    Attributes:
        model: Model after the round.
        participants: Sorted indices of the clients that took part.
        samples: Number of samples |D_i| of each participant.
        drifts: Distance ||theta_i - mean|| of each participant's model from the mean, in float64, rounded up.
        mean_shift: Distance ||mean - theta^n|| that the mean moved from the round's start, rounded up.
        rounding: Bound on the distance of the result from exact arithmetic, or 0.0 if nothing is proven (see
            `TrainingFacts.rounding_bounded`).
        rejections: Refused replies; the model does not depend on them.
    """

    model: Vector
    participants: ClientIndices
    samples: Integers
    drifts: Floats
    mean_shift: float
    rounding: float
    rejections: tuple[Rejection, ...] = ()


@dataclass(frozen=True)
class Evaluation:
    """Samples, correct predictions (0 for regression) and sum of losses of each evaluated client."""

    clients: ClientIndices
    samples: Integers
    correct: Integers
    loss_sum: Floats

    @property
    def accuracy(self) -> float:
        """Share of correct predictions over all samples of the evaluated clients, or NaN without samples."""
        total = int(self.samples.sum())
        return float(self.correct.sum()) / total if total else float("nan")

    @property
    def loss(self) -> float:
        """Mean loss over all samples of the evaluated clients, or NaN without samples."""
        total = int(self.samples.sum())
        return float(self.loss_sum.sum()) / total if total else float("nan")


class Federation(Protocol):
    """Description of a federation by its engine: the layout of the model, the clients and the training."""

    @property
    def layout(self) -> ModelLayout:
        """Names and shapes of the model's parameters."""
        ...

    @property
    def clients(self) -> tuple[ClientProfile, ...]:
        """Profile of every known client."""
        ...

    @property
    def facts(self) -> TrainingFacts:
        """Facts about the training that the theorems need."""
        ...


class Engine(Federation, Protocol):
    """Engine that runs rounds and evaluates models, which are flat vectors of `layout`.

    An engine with optional abilities inherits their capability classes (`sifu.core.capabilities`).
    """

    def initial_model(self, branch: int) -> Vector:
        """Return a fresh model that depends on no client's data; a random initialisation differs between branches."""
        ...

    def run_round(self, model: Vector, position: Position, active: ClientIndices) -> RoundResult:
        """Run one round from `model` among the `active` clients, without modifying `model`.

        The same model, position and active clients give the same result, bit for bit, on one machine.

        Args:
            model: Model at the start of the round.
            position: Branch and number of the round.
            active: Clients that may take part.
        """
        ...

    def evaluate(self, model: Vector, clients: ClientIndices) -> Evaluation:
        """Evaluate `model` on the data of each of `clients`."""
        ...


class LacksData:
    """Capability of an engine that may lack the data of some of its clients."""

    absent: frozenset[int] = frozenset()
    """Clients whose data are missing; they are never trained on or evaluated."""


class MayNotEvaluate(ABC):
    """Capability of an engine whose clients may be unable to evaluate models."""

    @property
    @abstractmethod
    def evaluates(self) -> bool:
        """True if clients evaluate models at all."""


class RunsGroupRounds(ABC):
    """Capability of an engine that runs the rounds of several groups together, to share the fixed cost of a round."""

    @abstractmethod
    def run_group_rounds(
        self, models: Sequence[Vector], position: Position, groups: Sequence[ClientIndices]
    ) -> list[RoundResult]:
        """Run one round of each group from its own model."""


class LosesRounds(ABC):
    """Capability of an engine whose clients may all fail to answer."""

    @abstractmethod
    def loses(self, position: Position, active: ClientIndices, participants: ClientIndices) -> bool:
        """Return whether a round was lost: no client took part although enough clients were asked."""


class LeavesOut(ABC):
    """Capability of an engine that contacts other machines and must be told which clients to stop contacting."""

    @abstractmethod
    def leave_out(self, clients: Iterable[int]) -> None:
        """Stop contacting these clients, even if a round selects them."""


class NotesIncidents(ABC):
    """Capability of an engine that reports incidents."""

    @abstractmethod
    def take_incidents(self) -> list[Incident]:
        """Return the incidents since the last call."""


class ShowsSamples(ABC):
    """Capability of an engine that provides digests of its clients' samples, so that a run can recognise them."""

    @property
    @abstractmethod
    def sample_digests(self) -> tuple[str, ...]:
        """One digest per client (`sifu.data.dataset.sample_digest`)."""


def evaluate_present(engine: Engine, model: Vector, clients: ClientIndices) -> Evaluation:
    """Evaluate `model` on the data of `clients`; return an empty evaluation if the data of any of them are missing."""
    if isinstance(engine, LacksData) and not engine.absent.isdisjoint(clients.tolist()):
        none = np.zeros(0, dtype=np.int64)
        return Evaluation(none, none, none, np.zeros(0))
    return engine.evaluate(model, clients)


def run_group_rounds(
    engine: Engine, models: Sequence[Vector], position: Position, groups: Sequence[ClientIndices]
) -> list[RoundResult]:
    """Run one round of each group from its own model, all at the same position.

    No client is in two groups and draws are keyed by client. Each group therefore gets, bit for bit, the result it
    would get alone, and together the results form one round of the federation.

    Args:
        engine: Engine that runs the rounds.
        models: Model of each group.
        position: Branch and number of the round.
        groups: Members of each group.
    """
    if isinstance(engine, RunsGroupRounds):
        return engine.run_group_rounds(models, position, groups)
    return [engine.run_round(model, position, members) for model, members in zip(models, groups, strict=True)]
