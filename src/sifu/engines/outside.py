"""Engine whose clients are reached by the operator's own program, over any transport.

The engine passes a `Task` to the program and receives a reply for each client. It trusts the program to return the
clients' replies to this task unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sifu.core.engine import Evaluation, Incident, Position, RoundResult
from sifu.core.layout import Vector, model_pieces
from sifu.core.replies import Reply
from sifu.core.round import RoundSetup, run_round
from sifu.engines.plans import Instruction
from sifu.engines.remote import NO_ROUND, NO_SCORE, Blueprint, OpenRound, RemoteFederation, Score, evaluation_of
from sifu.theory.participation import ClientIndices

Arrays = Mapping[str, NDArray[Any]]
Kind = Literal["train", "evaluate", "statistics", "prepare", "masked"]
NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Task:
    """Work for the clients; `models` maps each client to its model, which consists of named, read-only arrays.

    `kind` is "train" (each client answers with its trained arrays) or "evaluate" (each answers with its number of
    correct predictions and its summed loss). `branch` and `round` identify a round: after a request, rounds restart at
    0 on the next branch. Groups that train separately have their own models in the same task.

    Tasks of a closed-form head also have `instructions`, plain values for each client. Their kind may also be
    "statistics", or, with masks, "prepare" and then "masked". A `sifu.LoopClient` answers every kind.
    """

    kind: Kind
    branch: int
    round: int
    models: Mapping[str, Arrays]
    instructions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


Exchange = Callable[[Task], Mapping[str, Any]]
"""Function that passes a task to the clients and returns their replies by name; a missing client did not reply."""


class OutsideFederation(RemoteFederation):
    """Engine of clients that only `exchange` can reach."""

    def __init__(self, blueprint: Blueprint, exchange: Exchange) -> None:
        super().__init__(blueprint, blueprint.facts)
        self._exchange = exchange

    def run_together(self, setups: Sequence[RoundSetup], *, separate: bool) -> list[RoundResult]:
        """Run the rounds of all setups in one task; a model without any usable reply is unchanged."""
        position, models, drawn = setups[0].position, dict[str, Arrays](), list[ClientIndices]()
        for setup in setups:
            drawn.append(np.array(self.may_ask(self.draw(setup)), dtype=np.int64))
            models |= dict.fromkeys(self._names(drawn[-1].tolist()), self._arrays(setup.start))
        replies = self._ask("train", position, models)
        results: list[RoundResult] = []
        for setup, members in zip(setups, drawn, strict=True):
            of_group = set(self._names(members.tolist()))
            if not results:  # the first round also refuses and records replies that were not requested
                of_group |= set(replies) - set(models)
            handed_in = [self._reply(position, name, replies[name]) for name in replies if name in of_group]
            results.append(run_round(OpenRound(self, handed_in), setup, members))
        self._check_lost(results, asked=bool(models))
        return results

    def _check_lost(self, results: Sequence[RoundResult], *, asked: bool) -> None:
        """Raise `NoClientResponseError` after several consecutive rounds with messages but without a usable reply."""
        lost = asked and not any(result.participants.size for result in results)
        why = [f"{refused.client}: {refused.reason}" for result in results for refused in result.rejections]
        self._count_lost(lost, why, "the server loop")

    def _reply(self, position: Position, name: str, arrays: Any) -> Reply:
        """Return a client's arrays as a reply; the arrays are copied, because the sender may change them."""
        client = self.index_of.get(name)
        samples = 0 if client is None else self.clients[client].samples
        # Anything but a mapping of arrays is passed on and refused later.
        if isinstance(arrays, Mapping) and all(type(array) is np.ndarray for array in arrays.values()):
            arrays = np.asarray(model_pieces(arrays, self.layout))
        return Reply(name if client is None else client, position, samples, arrays, owned=True)

    def evaluate(self, model: Vector, clients: ClientIndices) -> Evaluation:
        """Evaluate `model` on the clients that reply; others count with zero samples."""
        if not self.evaluates:
            return evaluation_of(clients, [NO_SCORE] * len(clients))
        there = self.may_ask(clients)
        models = dict.fromkeys(self._names(there), self._arrays(self.layout.own_copy(model)))
        replies = self._ask("evaluate", NO_ROUND, models)
        scores = {client: self._score(client, replies.get(name)) for client, name in zip(there, models, strict=True)}
        return evaluation_of(clients, [scores.get(client, NO_SCORE) for client in clients.tolist()])

    def _score(self, client: int, reply: Any) -> Score:
        samples = self.clients[client].samples
        try:
            correct, loss = int(reply[0]), float(reply[1])
        except (TypeError, ValueError, IndexError, KeyError, OverflowError):
            correct, loss = -1, math.nan
        if 0 <= correct <= samples and math.isfinite(loss):
            return samples, correct, loss
        if reply is not None:
            self.note(NO_ROUND, client, "its evaluation cannot be used")
        return NO_SCORE

    def _ask(
        self, kind: Kind, position: Position, models: Mapping[str, Arrays], more: Mapping[str, Any] = NOTHING
    ) -> Mapping[str, Any]:
        """Send a task to the clients in `models` and return their replies; every instruction includes `more`."""
        if not models:
            return {}
        instructions, plan = {}, self.blueprint.plan
        if plan:
            for name in models:
                number = self.index_of[name]
                told = Instruction(position, number, self.clients[number].local_steps, plan).to_values()
                instructions[name] = {"kind": kind, **told, **more}
        replies = self._exchange(Task(kind, position.branch, position.round, models, instructions))
        doing = "evaluation: " if kind == "evaluate" else ""
        self.incidents += [
            Incident(position.branch, position.round, name, f"{doing}no reply was submitted")
            for name in models
            if name not in replies
        ]
        return replies

    def _names(self, clients: Iterable[int]) -> list[str]:
        return [self.clients[client].name for client in clients]

    def _arrays(self, model: Vector) -> Arrays:
        """Return a model as named arrays, read-only because all clients share them."""
        arrays: dict[str, NDArray[Any]] = {**self.layout.unflatten(model), **self.blueprint.carried}
        for array in arrays.values():
            array.flags.writeable = False
        return arrays
