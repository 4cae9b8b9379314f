"""An engine that is fed from outside: a program of the operator's own speaks with the clients, by whatever road.

What the engine needs is a `Task`; what comes back are replies by client. A client without a reply was absent from the
round, and every reply is checked before anything of it touches the model (`sifu.core.replies`). That the program hands
in what the clients sent, and for the task that was handed out, is trusted as it is of Flower's nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sifu.core.engine import Evaluation, Incident, Position, Rejection, RoundResult
from sifu.core.layout import Vector, model_pieces
from sifu.core.replies import Reply, ReplyRules
from sifu.core.round import AcceptedModels, Average, RoundSetup, draw, gate_replies, listed, run_round
from sifu.engines.flower.averaging import average_replies
from sifu.engines.own_models import OwnTraining
from sifu.errors import InputError, NoClientResponseError
from sifu.theory.arrays import Integers
from sifu.theory.facts import ClientProfile
from sifu.theory.participation import ClientIndices, base_key

Arrays = Mapping[str, NDArray[Any]]
Kind = Literal["train", "evaluate"]
LOST_IN_A_ROW = 5
"""Rounds without a single usable reply after which training stops, to be continued later."""


@dataclass(frozen=True)
class Task:
    """What clients are to do now: `models` has the model of each of them as named arrays, which are not written to.

    `kind` is "train" (each answers with its trained arrays) or "evaluate" (each answers with the number of its correct
    predictions and the sum of its losses). A round is known by `branch` and `round`: after a request, rounds begin
    again at 0 on the next branch. Groups that train apart have models of their own in the same task.
    """

    kind: Kind
    branch: int
    round: int
    models: Mapping[str, Arrays]


Exchange = Callable[[Task], Mapping[str, Any]]
"""Takes a task to the clients and brings their replies, by name; who is missing did not answer."""


class OutsideFederation:
    """An `Engine` of clients that only `exchange` can reach."""

    def __init__(
        self,
        training: OwnTraining,
        clients: Sequence[ClientProfile],
        seed: int,
        exchange: Exchange,
        *,
        evaluates: bool = False,
    ) -> None:
        self._training, self.clients, self._exchange, self.evaluates = training, tuple(clients), exchange, evaluates
        self.layout, self.facts = training.layout, training.facts
        self.samples: Integers = np.array([client.samples for client in clients], dtype=np.int64)
        self.participation_key = base_key(seed, "participation")
        self.left_out: frozenset[int] = frozenset()
        self._incidents: list[Incident] = []
        self._lost_in_a_row = 0

    def initial_model(self, branch: int) -> Vector:
        """A fresh model of a branch."""
        return self._training.initial_model(branch)

    def leave_out(self, clients: Iterable[int]) -> None:
        """From now on nothing is asked of these clients."""
        self.left_out = frozenset(int(client) for client in clients)

    def take_incidents(self) -> list[Incident]:
        """What went otherwise than asked since this was last called."""
        incidents, self._incidents = self._incidents, []
        return incidents

    def run_round(
        self,
        model: Vector,
        position: Position,
        active: ClientIndices,
        *,
        want_gram: bool = False,
        want_updates: bool = False,
    ) -> RoundResult:
        """One round of FedAvg among those who answer; without any answer the model stays as it was."""
        (result,) = self._together([RoundSetup(self.layout.own_copy(model), position, active, want_gram, want_updates)])
        return result

    def run_group_rounds(
        self, models: Sequence[Vector], position: Position, groups: Sequence[ClientIndices]
    ) -> list[RoundResult]:
        """One round of every group in the same task: each member gets its own group's model."""
        return self._together(
            [
                RoundSetup(self.layout.own_copy(model), position, members)
                for model, members in zip(models, groups, strict=True)
            ]
        )

    def _together(self, setups: Sequence[RoundSetup]) -> list[RoundResult]:
        position, models, drawn = setups[0].position, dict[str, Arrays](), list[ClientIndices]()
        for setup in setups:
            members = draw(self.facts.participation, self.participation_key, setup)
            drawn.append(np.array([client for client in members if int(client) not in self.left_out], dtype=np.int64))
            models |= dict.fromkeys(self._names(drawn[-1]), self._arrays(setup.start))
        replies = self._ask("train", position, models)
        results: list[RoundResult] = []
        for setup, members in zip(setups, drawn, strict=True):
            of_group = set(self._names(members))
            if not results:  # the first one also refuses, and records, what was not asked for
                of_group |= set(replies) - set(models)
            handed_in = {name: reply for name, reply in replies.items() if name in of_group}
            results.append(run_round(_HandedIn(self, self._training.replies, handed_in), setup, members))
        lost = bool(models) and not any(result.participants.size for result in results)
        self._lost_in_a_row = self._lost_in_a_row + 1 if lost else 0
        if self._lost_in_a_row >= LOST_IN_A_ROW:
            why = [f"{refused.client}: {refused.reason}" for result in results for refused in result.rejections]
            raise NoClientResponseError(
                f"{self._lost_in_a_row} rounds in a row were lost, no client's training could be used "
                f"({listed(why) or 'no replies were handed in'}): every round is saved; see to the clients and start "
                "the server loop again to continue"
            )
        return results

    def loses(self, position: Position, active: ClientIndices, participants: ClientIndices) -> bool:
        """Whether a round was lost: nothing could be used although clients were drawn."""
        setup = RoundSetup(np.zeros(0), position, active)
        return not participants.size and draw(self.facts.participation, self.participation_key, setup).size > 0

    def local_updates(
        self, model: Vector, position: Position, clients: ClientIndices, steps: int
    ) -> NDArray[np.floating]:
        """Refused: how many local steps its clients do is known to the operator's program alone."""
        raise InputError(
            f"this method asks clients for {steps} local steps of their own, which a server loop cannot: use another"
        )

    def evaluate(self, model: Vector, clients: ClientIndices) -> Evaluation:
        """How `model` does on those that answer; the others count zero samples."""
        there = [int(client) for client in clients if int(client) not in self.left_out] if self.evaluates else []
        models = dict.fromkeys(self._names(there), self._arrays(self.layout.own_copy(model)))
        replies = self._ask("evaluate", Position(0, 0), models)
        scores = {client: self._score(client, replies.get(self.clients[client].name)) for client in there}
        rows = [scores.get(int(client), (0, 0, 0.0)) for client in clients]
        samples, correct, losses = np.array(rows, dtype=np.float64).reshape(-1, 3).T
        return Evaluation(np.array(clients, dtype=np.int64), samples.astype(int), correct.astype(int), losses)

    def _score(self, client: int, reply: Any) -> tuple[int, int, float]:
        samples = self.clients[client].samples
        try:
            correct, loss = int(reply[0]), float(reply[1])
        except (TypeError, ValueError, IndexError, KeyError, OverflowError):
            correct, loss = -1, math.nan
        if 0 <= correct <= samples and math.isfinite(loss):
            return samples, correct, loss
        if reply is not None:
            self._note(Position(0, 0), self.clients[client].name, "its evaluation cannot be used")
        return 0, 0, 0.0

    def _ask(
        self, kind: Literal["train", "evaluate"], position: Position, models: Mapping[str, Arrays]
    ) -> Mapping[str, Any]:
        if not models:
            return {}
        replies = self._exchange(Task(kind, position.branch, position.round, models))
        for name in models:
            if name not in replies:
                self._note(position, name, f"{'evaluation: ' if kind == 'evaluate' else ''}no reply was handed in")
        return replies

    def _note(self, position: Position, name: str, what: str) -> None:
        self._incidents.append(Incident(position.branch, position.round, name, what))

    def _names(self, clients: Iterable[int] | ClientIndices) -> list[str]:
        return [self.clients[int(client)].name for client in clients]

    def _arrays(self, model: Vector) -> Arrays:
        """A model as clients get it; its arrays cannot be written to, since all of them share it."""
        arrays: dict[str, NDArray[Any]] = {**self.layout.unflatten(model), **self._training.carried}
        for array in arrays.values():
            array.flags.writeable = False
        return arrays


class _HandedIn:
    """The steps of a round whose replies were handed in."""

    def __init__(self, engine: OutsideFederation, rules: ReplyRules, replies: Mapping[str, Any]) -> None:
        self._rules, self._forgotten, self._replies = rules, engine.left_out, replies
        self.layout, self.clients, self.facts = engine.layout, engine.clients, engine.facts
        self.samples, self.participation_key = engine.samples, engine.participation_key

    def collect(self, setup: RoundSetup, drawn: ClientIndices) -> list[Reply]:
        """Each reply with its client's count of samples, copied: its sender may still hold the arrays."""
        samples = {client.name: client.samples for client in self.clients}
        collected = []
        for name, reply in self._replies.items():
            # What is not a mapping of arrays is refused as it is.
            arrays = isinstance(reply, Mapping) and all(type(array) is np.ndarray for array in reply.values())
            vector = np.asarray(model_pieces(reply, self.layout)) if arrays else reply
            collected.append(Reply(name, setup.position, samples.get(name, 0), vector, owned=True))
        return collected

    def gate(
        self, setup: RoundSetup, drawn: ClientIndices, collected: list[Reply]
    ) -> tuple[AcceptedModels | None, tuple[Rejection, ...]]:
        """Check every reply."""
        return gate_replies(self, setup, drawn, collected, self._rules, self._forgotten)

    def average(self, setup: RoundSetup, accepted: AcceptedModels) -> Average:
        """One walk over the replies gives their mean and every drift."""
        samples = self.samples[accepted.participants]
        average = average_replies(accepted.models, setup.start, samples, setup.want_gram)
        return replace(average, updates=np.stack(accepted.models) - setup.start) if setup.want_updates else average
