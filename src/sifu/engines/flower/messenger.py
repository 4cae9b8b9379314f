"""Speaks with the clients: finds their nodes, sends, waits for answers, and notes what went wrong.

A client that is offline, late or fails is recorded as an `Incident` and has no answer. Clients that are left out are
never sent anything.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from sifu.core.engine import Incident, Position
from sifu.core.layout import ModelPieces, Vector
from sifu.core.replies import LATE
from sifu.engines.flower.blueprint import Blueprint, Patience
from sifu.engines.flower.checkpoints_of_nodes import ShownCheckpoint
from sifu.engines.flower.exchange import Exchange, Roster
from sifu.engines.flower.wire import (
    SEND_MASKED_STATISTICS,
    SHOW_EVENT,
    TRAIN,
    Instruction,
    model_message,
    read_model,
    with_config,
)
from sifu.theory.arrays import Integers
from sifu.theory.participation import ClientIndices

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, Message

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")
Answers = tuple[dict[int, Answer], dict[int, str]]
"""Answers by client, and for everybody else why there is none."""
NOWHERE = Position(0, 0)
"""The position of what belongs to no round, such as an evaluation."""
EVALUATION = "evaluation: "
ATTEMPTS = 3
"""How often clients are asked for what cannot be done without."""


class Messenger:
    """Messages to the clients of a blueprint by their indices, and the answers of those who give one."""

    def __init__(self, exchange: Exchange, roster: Roster, blueprint: Blueprint, patience: Patience) -> None:
        self._exchange, self._roster, self.patience = exchange, roster, patience
        self.left_out: frozenset[int] = frozenset()
        self.incidents: list[Incident] = []
        self.shown: ShownCheckpoint | None = None
        """What every message shows of the run's ledger."""
        self.networks: Mapping[int, ArrayRecord] = {}
        """What groups tuned, in every message of statistics or evaluation."""
        self.renew(blueprint)

    def renew(self, blueprint: Blueprint) -> None:
        """From now on speak with the clients of this blueprint."""
        self.blueprint = blueprint
        self.samples: Integers = np.array([client.samples for client in blueprint.clients], dtype=np.int64)

    def note(self, position: Position, client: int | None, what: str) -> None:
        """Record an incident of a client, or of a whole round."""
        name = "" if client is None else self.blueprint.clients[client].name
        self.incidents.append(Incident(position.branch, position.round, name, what))

    def reasons(self, position: Position) -> list[str]:
        """Why clients had no part in a round, as noted."""
        noted = [incident for incident in self.incidents if Position(incident.branch, incident.round) == position]
        return [f"{incident.client}: {incident.what}" for incident in noted if incident.client]

    def take_incidents(self) -> list[Incident]:
        """What went otherwise than asked since this was last called."""
        taken, self.incidents = self.incidents, []
        return taken

    def may_ask(self, clients: Iterable[int] | ClientIndices) -> list[int]:
        """Those of `clients` that are not left out."""
        return [int(client) for client in clients if int(client) not in self.left_out]

    def nodes(self, clients: Iterable[int] | ClientIndices) -> dict[int, int]:
        """The nodes of those of `clients` that may be asked and are there."""
        names = {client: self.blueprint.clients[client].name for client in self.may_ask(clients)}
        nodes = self._roster.nodes(list(names.values()))
        return {client: nodes[name] for client, name in names.items() if name in nodes}

    def _nodes_if_any_come(self, clients: Sequence[int]) -> dict[int, int]:
        """As `nodes`; if there is none, one is waited for."""
        nodes, end = self.nodes(clients), time.monotonic() + self.patience.absence
        if clients and not nodes and self.patience.absence:
            log.warning("no client's node is there: waiting up to %g s for one", self.patience.absence)
        while clients and not nodes and time.monotonic() < end:
            time.sleep(min(self.patience.pause, max(0.0, end - time.monotonic())))
            nodes = self.nodes(clients)
        return nodes

    def online(
        self, position: Position, clients: Iterable[int] | ClientIndices, everybody: bool = False
    ) -> dict[int, int]:
        """As `nodes`, sorted by client; who is not there, busy with an earlier round, or late with one, is noted.

        With `everybody` the busy are asked, too.
        """
        for client, seconds in self._exchange.late():
            self.note(position, client, f"{LATE}its answer to an earlier round came {seconds:.1f} s too late, refused")
        reachable, busy = self.may_ask(clients), frozenset() if everybody else self._exchange.busy()
        nodes = self._nodes_if_any_come(reachable)
        for client in reachable:
            if client not in nodes:
                self.note(position, client, "its node is not there")
            elif client in busy:
                self.note(position, client, f"{LATE}still busy with an earlier round, not asked")
        return {client: node for client, node in sorted(nodes.items()) if client not in busy}

    def message(
        self,
        record: ArrayRecord | Sequence[ArrayRecord] | None,
        position: Position,
        client: int,
        node: int,
        kind: str,
        steps: int | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> Message:
        """A message of a kind to a client, mostly with a model; `more` goes into its configuration."""
        instruction = Instruction(
            position, client, steps or self.blueprint.clients[client].local_steps, self.blueprint.plan
        )
        shown = self.shown(self.shown.kept.get(client)) if self.shown is not None else {}
        config = {**self.blueprint.config, **shown, **(more or {})}
        networks = {} if kind == SEND_MASKED_STATISTICS else self.networks  # prepared before
        return model_message(record, instruction, node, kind, self.patience.timeout, config, networks)

    def _exchange_links(
        self, messages: Mapping[int, Message], send: Callable[[Mapping[int, Message]], Answers[Answer]]
    ) -> Answers[Answer]:
        """Send messages; a client that kept an event the server did not know of is sent the links from it, once."""
        answers, failed = send(messages)
        if self.shown is None:
            return answers, failed
        again: dict[int, Message] = {}
        for client, why in failed.items():
            wanted = SHOW_EVENT.search(why)
            if wanted:
                again[client] = with_config(messages[client], self.shown(int(wanted[1])), self.patience.timeout)
        if again:
            more, failed_again = send(again)
            answers = {**answers, **more}
            failed = {client: why for client, why in failed.items() if client not in again} | failed_again
        self.shown.kept |= dict.fromkeys(answers, self.shown.seq)
        return answers, failed

    def ask(
        self,
        messages: Mapping[int, Message],
        read: Callable[[Message], Answer],
        position: Position = NOWHERE,
        doing: str = "",
        closing: bool = False,
        groups: Sequence[Collection[int]] | None = None,
    ) -> dict[int, Answer]:
        """The answers by client, as `read` makes them out; a client without one is noted, with what it was `doing`.

        With `closing` the spec's `server.wait` says when enough have answered; without, everybody is waited for. Each
        of `groups` closes independently, so that no group decides whose answers count in another.
        """
        if closing:
            patience = self.patience
            together = [list(messages)] if groups is None else [[*group] for group in groups]
            answers, failed = self._exchange_links(
                messages,
                lambda sent: self._exchange.ask(
                    sent,
                    min(patience.timeout, math.inf if patience.wait.seconds is None else patience.wait.seconds),
                    read,
                    expires=patience.timeout,
                    enough=[
                        (group, patience.wait.enough(len(group)))
                        for group in ([client for client in clients if client in sent] for clients in together)
                        if group
                    ],
                ),
            )
        else:
            answers, failed = self.try_to_ask(messages, read)
        for client, why in sorted(failed.items()):
            self.note(position, client, f"{doing}{why}")
        return answers

    def try_to_ask(
        self, messages: Mapping[int, Message], read: Callable[[Message], Answer]
    ) -> tuple[dict[int, Answer], dict[int, str]]:
        """As `ask`; why a client gave no answer is handed back instead of noted."""
        return self._exchange_links(messages, lambda sent: self._exchange.ask(sent, self.patience.timeout, read))

    def train(
        self, start: Vector, position: Position, clients: Iterable[int] | ClientIndices, steps: int | None = None
    ) -> dict[int, tuple[ModelPieces, int]]:
        """The models and counts of samples that clients answer with, not yet checked.

        With `steps` it is no round: everybody is needed and waited for.
        """
        everybody = steps is not None
        record, layout = self.blueprint.record(start), self.blueprint.layout
        messages = {
            client: self.message(record, position, client, node, TRAIN, steps)
            for client, node in self.online(position, clients, everybody).items()
        }
        return self.ask(messages, lambda reply: read_model(reply, layout), position, closing=not everybody)
