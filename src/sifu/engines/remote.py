"""What engines of clients elsewhere share: the training they run, and rounds of models that came back.

A client that gives no answer was absent from the round. Every reply is checked before anything of it touches the model
(`sifu.core.replies`), and what went otherwise than asked is noted (`take_incidents`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sifu.core.closed_form_engine import Trunk
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
from sifu.core.round import AcceptedModels, Average, RoundSetup, draw, gate_replies
from sifu.engines.averaging import average_replies
from sifu.engines.sim.client_updates import Clipping
from sifu.errors import InputError
from sifu.theory.arrays import Integers
from sifu.theory.closed_form import FixedPoint
from sifu.theory.facts import ClientProfile, TrainingFacts
from sifu.theory.participation import ClientIndices, base_key
from sifu.theory.rounding import norm_up

Score = tuple[int, int, float]
"""Samples, correct predictions and the sum of losses."""
NO_SCORE: Score = (0, 0, 0.0)


@dataclass(frozen=True)
class MetricNames:
    """What an app calls the loss and the accuracy of an evaluation; empty: the usual names are looked for."""

    loss: str = ""
    accuracy: str = ""


USUAL_METRICS = MetricNames()


@dataclass(frozen=True)
class HeadPlan:
    """A head in closed form: how statistics are written, and r of lambda (None for cross-validation).

    Where groups tune the network under it, `tuning` is the training of a group, and `networks` says what the networks
    that features go through are tuned by.
    """

    fixed: FixedPoint
    relative_penalty: float | None
    tuning: Blueprint | None = None
    networks: Callable[[Sequence[Trunk]], Mapping[int, Vector]] | None = None


@dataclass(frozen=True)
class Blueprint:
    """What a server knows of the training it runs: everything of an engine but the way to its clients.

    `rounding` bounds floating point in a round of some participants from a model of a norm (None: nothing is proven).
    `plan` travels in every message. `several`: all clients evaluate several models at once. What follows is for
    clients that were not written for us: `carried` arrays of whole numbers travel with the model and stay what they
    are, `config` goes into every message (evaluations get `evaluate_config` if it is given), `metrics` are what an
    evaluation's numbers are called, and without `evaluates` no client is asked to evaluate. `head` is given where
    clients send statistics, from which a head is solved, instead of models.
    """

    layout: ModelLayout
    clients: tuple[ClientProfile, ...]
    facts: TrainingFacts
    initial_model: Callable[[int], Vector]
    seed: int
    plan: str = ""
    rounding: Callable[[float, ClientIndices], float] | None = None
    clipping: Clipping | None = None
    replies: ReplyRules = ReplyRules()
    several: bool = False
    carried: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    evaluate_config: Mapping[str, Any] | None = None
    metrics: MetricNames = USUAL_METRICS
    evaluates: bool = True
    head: HeadPlan | None = None


class RemoteFederation(MayNotEvaluate, LeavesOut, NotesIncidents, RunsGroupRounds, LosesRounds):
    """An `Engine` of clients elsewhere, but for the messages: these are up to the engines made of it."""

    least = 0
    """How many answers a round needs, if it is dropped with fewer."""

    def __init__(self, blueprint: Blueprint, facts: TrainingFacts) -> None:
        self._facts = facts
        self.participation_key = base_key(blueprint.seed, "participation")
        self.left_out: frozenset[int] = frozenset()
        self.incidents: list[Incident] = []
        self._use(blueprint)

    def _use(self, blueprint: Blueprint) -> None:
        self.blueprint, self.layout, self.clients = blueprint, blueprint.layout, blueprint.clients
        self.samples: Integers = np.array([client.samples for client in blueprint.clients], dtype=np.int64)

    @property
    def facts(self) -> TrainingFacts:
        """What every round does, and what is proven about it."""
        return self._facts

    @property
    def evaluates(self) -> bool:
        """Whether clients evaluate models at all."""
        return self.blueprint.evaluates

    def initial_model(self, branch: int) -> Vector:
        """A fresh model of a branch."""
        return self.blueprint.initial_model(branch)

    def renew(self, blueprint: Blueprint) -> None:
        """Go on with a training that knows more clients; the first ones must be those known so far."""
        old = self.blueprint
        if blueprint.clients[: len(old.clients)] != old.clients:
            raise InputError("clients join at the end of the list")
        if (blueprint.layout, blueprint.facts) != (old.layout, old.facts):
            raise InputError("the model, or what is known of the training, would be another one with this client")
        self._use(blueprint)

    def leave_out(self, clients: Iterable[int]) -> None:
        """From now on nothing is asked of these clients, whatever a round says."""
        self.left_out = frozenset(int(client) for client in clients)

    def may_ask(self, clients: Iterable[int] | ClientIndices) -> list[int]:
        """Those of `clients` that are not left out."""
        return [int(client) for client in clients if int(client) not in self.left_out]

    def note(self, position: Position, client: int | None, what: str) -> None:
        """Record an incident of a client, or of a whole round."""
        name = "" if client is None else self.clients[client].name
        self.incidents.append(Incident(position.branch, position.round, name, what))

    def take_incidents(self) -> list[Incident]:
        """What went otherwise than asked since this was last called."""
        taken, self.incidents = self.incidents, []
        return taken

    @abstractmethod
    def run_together(self, setups: Sequence[RoundSetup], *, apart: bool) -> list[RoundResult]:
        """The round that each setup asks for, all at one place and of different clients; `apart`: of groups."""

    def run_round(
        self,
        model: Vector,
        position: Position,
        active: ClientIndices,
        *,
        want_gram: bool = False,
        want_updates: bool = False,
    ) -> RoundResult:
        """One round of FedAvg among those who answer; too few answers leave the model as it was."""
        setup = RoundSetup(self.layout.own_copy(model), position, active, want_gram, want_updates)
        return self.run_together([setup], apart=False)[0]

    def run_group_rounds(
        self, models: Sequence[Vector], position: Position, groups: Sequence[ClientIndices]
    ) -> list[RoundResult]:
        """One round of every group at once: each member is sent its own group's model."""
        pairs = zip(models, groups, strict=True)
        setups = [RoundSetup(self.layout.own_copy(model), position, members) for model, members in pairs]
        return self.run_together(setups, apart=True) if setups else []

    def draw(self, setup: RoundSetup) -> ClientIndices:
        """The participants of a round, sorted."""
        return draw(self.facts.participation, self.participation_key, setup)

    def loses(self, position: Position, active: ClientIndices, participants: ClientIndices) -> bool:
        """Whether a round was lost: no client took part although enough were asked; a draw of fewer is no loss."""
        drawn = self.draw(RoundSetup(np.zeros(0), position, active))
        return not participants.size and drawn.size >= max(1, self.least)


def evaluation_of(clients: ClientIndices, scores: Sequence[Score]) -> Evaluation:
    """The scores of clients in their order."""
    samples, correct, losses = np.array(scores, dtype=np.float64).reshape(-1, 3).T
    return Evaluation(np.array(clients, dtype=np.int64), samples.astype(np.int64), correct.astype(np.int64), losses)


class RemoteRound:
    """What the steps of every such round know (`sifu.core.round.RoundSteps`)."""

    def __init__(self, engine: RemoteFederation) -> None:
        self._engine = engine
        self.layout, self.clients, self.facts = engine.layout, engine.clients, engine.facts
        self.samples, self.participation_key = engine.samples, engine.participation_key


class OpenRound(RemoteRound):
    """A round of models that the server sees one by one; `replies` are what came back."""

    def __init__(self, engine: RemoteFederation, replies: Sequence[Reply] = ()) -> None:
        super().__init__(engine)
        self._replies = replies

    def collect(self, setup: RoundSetup, drawn: ClientIndices) -> Sequence[Reply]:
        """What was answered."""
        return self._replies

    def gate(
        self, setup: RoundSetup, drawn: ClientIndices, collected: Sequence[Reply]
    ) -> tuple[AcceptedModels | None, tuple[Rejection, ...]]:
        """Check every reply; too few that can be used drop the round."""
        engine, blueprint = self._engine, self._engine.blueprint
        look_together = blueprint.clipping is None and not blueprint.replies.update_bound
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
        """One walk over the replies gives their mean and every drift."""
        blueprint, participants, start = self._engine.blueprint, accepted.participants, setup.start
        rounding = blueprint.rounding(norm_up(start), participants) if blueprint.rounding else 0.0
        if blueprint.clipping:
            updates, samples = np.stack(accepted.models) - start, self.samples[participants]
            average = blueprint.clipping.average(updates, setup.position, participants, samples, setup.want_gram)
        else:
            average = accepted.average or self._average_models(setup, accepted)
            if setup.want_updates:
                average = replace(average, updates=np.stack(accepted.models) - start)
        return replace(average, rounding=rounding)

    def _average_models(self, setup: RoundSetup, accepted: AcceptedModels) -> Average:
        return average_replies(accepted.models, setup.start, self.samples[accepted.participants], setup.want_gram)
