"""Base class of engines with remote clients, their training configuration, and rounds that average returned models.

A client that sends no reply counts as absent from the round. Every reply is checked before it affects the model
(`sifu.core.replies`). Missing replies and dropped rounds are recorded as incidents (`take_incidents`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sifu.core.engine import (
    Evaluation,
    Incident,
    LeavesOut,
    LosesRounds,
    MayNotEvaluate,
    NotesIncidents,
    Position,
    Rejection,
    RoundResult,
    RunsGroupRounds,
)
from sifu.core.layout import ModelLayout, Vector
from sifu.core.replies import Reply, ReplyRules
from sifu.core.round import AcceptedModels, Average, RoundSetup, draw, gate_replies, listed
from sifu.engines.averaging import average_replies
from sifu.errors import InputError, NoClientResponseError
from sifu.theory.arrays import Integers
from sifu.theory.closed_form import FixedPoint
from sifu.theory.facts import ClientProfile, TrainingFacts
from sifu.theory.participation import ClientIndices, base_key
from sifu.theory.rounding import norm_up

Score = tuple[int, int, float]
"""Number of samples, number of correct predictions, and summed loss."""
NO_SCORE: Score = (0, 0, 0.0)
ATTEMPTS = 3
"""Number of attempts to get a reply that the run cannot continue without."""
LOST_IN_A_ROW = 5
"""Number of consecutive lost rounds after which training stops; it can be continued later."""
NO_ROUND = Position(0, 0)
"""Position of messages that belong to no round, such as evaluations."""


@dataclass(frozen=True)
class MetricNames:
    """Names of loss and accuracy in an app's evaluation; if empty, the usual names are tried."""

    loss: str = ""
    accuracy: str = ""


@dataclass(frozen=True)
class Blueprint:
    """Server's description of its training: everything an engine needs except the connection to the clients.

    `rounding` bounds the floating-point error of a round, given the norm of its starting model and its participants
    (None if no bound is proven). `plan` is part of every message. `head` is the number format of the statistics if
    clients send these, for a closed-form head, instead of models.

    The remaining fields serve clients that were not written for sifu. `carried` holds integer arrays that accompany the
    model unchanged. `config` is added to every message; evaluations use `evaluate_config` instead if it is given.
    `metrics` names the values of an evaluation. If `evaluates` is false, no client is asked to evaluate.
    """

    layout: ModelLayout
    clients: tuple[ClientProfile, ...]
    facts: TrainingFacts
    initial_model: Callable[[int], Vector]
    seed: int
    plan: str = ""
    rounding: Callable[[float, ClientIndices], float] | None = None
    replies: ReplyRules = ReplyRules()
    carried: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    evaluate_config: Mapping[str, Any] | None = None
    metrics: MetricNames = MetricNames()
    evaluates: bool = True
    head: FixedPoint | None = None


class RemoteFederation(MayNotEvaluate, LeavesOut, NotesIncidents, RunsGroupRounds, LosesRounds):
    """Base class of engines with remote clients; subclasses implement the messages."""

    least = 0
    """Minimum number of replies; a round with fewer is dropped."""
    pause = 0.0
    """Seconds between two attempts."""

    def __init__(self, blueprint: Blueprint, facts: TrainingFacts) -> None:
        self._facts = facts
        self.participation_key = base_key(blueprint.seed, "participation")
        self.left_out: frozenset[int] = frozenset()
        self._lost_in_a_row = 0
        self.incidents: list[Incident] = []
        self._use(blueprint)

    def _use(self, blueprint: Blueprint) -> None:
        self.blueprint, self.layout, self.clients = blueprint, blueprint.layout, blueprint.clients
        self.samples: Integers = np.array([client.samples for client in blueprint.clients], dtype=np.int64)
        self.index_of = {client.name: index for index, client in enumerate(blueprint.clients)}

    @property
    def facts(self) -> TrainingFacts:
        """Facts about the training that certificates rely on."""
        return self._facts

    @property
    def evaluates(self) -> bool:
        """True if clients evaluate models."""
        return self.blueprint.evaluates

    def initial_model(self, branch: int) -> Vector:
        """Return the initial model of a branch."""
        return self.blueprint.initial_model(branch)

    def renew(self, blueprint: Blueprint) -> None:
        """Continue with a blueprint in which additional clients follow the present ones.

        Raises:
            InputError: If the present clients, the layout or the facts would change.
        """
        old = self.blueprint
        if blueprint.clients[: len(old.clients)] != old.clients:
            raise InputError("new clients must be at the end of the list")
        if (blueprint.layout, blueprint.facts) != (old.layout, old.facts):
            raise InputError("this client would change the model or the facts of the training")
        self._use(blueprint)

    def leave_out(self, clients: Iterable[int]) -> None:
        """Exclude these clients from all messages from now on."""
        self.left_out = frozenset(int(client) for client in clients)

    def may_ask(self, clients: Iterable[int] | ClientIndices) -> list[int]:
        """Return the `clients` that are not excluded."""
        asked = clients.tolist() if isinstance(clients, np.ndarray) else map(int, clients)
        return [client for client in asked if client not in self.left_out]

    def note(self, position: Position, client: int | None, what: str) -> None:
        """Record an incident of a client, or of the whole round if `client` is None."""
        name = "" if client is None else self.clients[client].name
        self.incidents.append(Incident(position.branch, position.round, name, what))

    def take_incidents(self) -> list[Incident]:
        """Return the incidents recorded since the last call, and clear them."""
        taken, self.incidents = self.incidents, []
        return taken

    @abstractmethod
    def run_together(self, setups: Sequence[RoundSetup], *, separate: bool) -> list[RoundResult]:
        """Run one round per setup at the same time, all at the same position and with disjoint clients."""

    @abstractmethod
    def evaluate(self, model: Vector, clients: ClientIndices) -> Evaluation:
        """Evaluate `model` on the clients that reply; others count with zero samples."""

    def run_round(self, model: Vector, position: Position, active: ClientIndices) -> RoundResult:
        """Run one round of FedAvg with the clients that reply; too few replies leave the model unchanged."""
        setup = RoundSetup(self.layout.own_copy(model), position, active)
        return self.run_together([setup], separate=False)[0]

    def run_group_rounds(
        self, models: Sequence[Vector], position: Position, groups: Sequence[ClientIndices]
    ) -> list[RoundResult]:
        """Run one round of every group at the same time; each client receives the model of its group."""
        pairs = zip(models, groups, strict=True)
        setups = [RoundSetup(self.layout.own_copy(model), position, members) for model, members in pairs]
        return self.run_together(setups, separate=True) if setups else []

    def draw(self, setup: RoundSetup) -> ClientIndices:
        """Return the sorted participants drawn for a round."""
        return draw(self.facts.participation, self.participation_key, setup)

    def loses(self, position: Position, active: ClientIndices, participants: ClientIndices) -> bool:
        """Return whether a round was lost: no client took part although enough clients were drawn.

        A draw of too few clients does not count as a loss.
        """
        if participants.size:
            return False
        return self.draw(RoundSetup(np.zeros(0), position, active)).size >= max(1, self.least)

    def _count_lost(self, lost: bool, why: Sequence[str], restart: str) -> None:
        """Count consecutive lost rounds, and raise an error after `LOST_IN_A_ROW` of them.

        The error names the reasons `why` the last round was lost, and the program that the operator has to `restart`.
        """
        self._lost_in_a_row = self._lost_in_a_row + 1 if lost else 0
        if self._lost_in_a_row >= LOST_IN_A_ROW:
            raise NoClientResponseError(
                f"{self._lost_in_a_row} rounds in a row were lost because no client's training could be used "
                f"({listed(why) or 'no replies were submitted'}): every round is saved; check the clients and start "
                f"{restart} again to continue"
            )


def evaluation_of(clients: ClientIndices, scores: Sequence[Score]) -> Evaluation:
    """Combine the clients' scores, in the order of `clients`, into an evaluation."""
    samples, correct, losses = zip(*scores, strict=True) if scores else ((), (), ())
    counts = np.array(samples, dtype=np.int64), np.array(correct, dtype=np.int64)
    return Evaluation(np.array(clients, dtype=np.int64), *counts, np.array(losses, dtype=np.float64))


class RemoteRound:
    """Base class of rounds with remote clients; it sets the attributes of `sifu.core.round.RoundSteps`."""

    def __init__(self, engine: RemoteFederation) -> None:
        self._engine = engine
        self.layout, self.clients, self.facts = engine.layout, engine.clients, engine.facts
        self.samples = engine.samples


class OpenRound(RemoteRound):
    """Round in which the server sees each model in `replies`."""

    def __init__(self, engine: RemoteFederation, replies: Sequence[Reply] = ()) -> None:
        super().__init__(engine)
        self._replies = replies

    def collect(self, setup: RoundSetup, drawn: ClientIndices) -> Sequence[Reply]:
        """Return the `replies` given to the constructor, which have already arrived."""
        return self._replies

    def gate(
        self, setup: RoundSetup, drawn: ClientIndices, collected: Sequence[Reply]
    ) -> tuple[AcceptedModels | None, tuple[Rejection, ...]]:
        """Check every reply; drop the round if too few are valid."""
        engine, blueprint = self._engine, self._engine.blueprint
        look_together = not blueprint.replies.update_bound
        accepted, rejections = gate_replies(
            self,
            setup,
            drawn,
            collected,
            blueprint.replies,
            engine.left_out,
            partial(self._average_models, setup) if look_together else None,
        )
        count = 0 if accepted is None else accepted.participants.size
        if count < engine.least:
            engine.note(setup.position, None, f"{count} of {drawn.size} answered: the round was dropped")
            return None, rejections
        return accepted, rejections

    def average(self, setup: RoundSetup, accepted: AcceptedModels) -> Average:
        """Return the mean of the accepted models and each participant's drift."""
        blueprint, participants, start = self._engine.blueprint, accepted.participants, setup.start
        rounding = blueprint.rounding(norm_up(start), participants) if blueprint.rounding else 0.0
        average = accepted.average or self._average_models(setup, accepted)
        return replace(average, rounding=rounding)

    def _average_models(self, setup: RoundSetup, accepted: AcceptedModels) -> Average:
        return average_replies(accepted.models, setup.start, self.samples[accepted.participants])
