"""Messages out, replies in: which node is which client, each reply belongs to the client asked, who gave none is noted.

A client that is offline, late or fails is recorded as an `Incident` and has no answer. Clients that are left out are
never sent anything.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from flwr.app import Message

from sifu.core.engine import Position
from sifu.core.identity import key_fingerprint
from sifu.core.layout import Vector
from sifu.core.replies import LATE, Wait
from sifu.engines.flower.checkpoints_of_nodes import ShownCheckpoint
from sifu.engines.flower.wire import (
    EVALUATE,
    SEND_MASKED_STATISTICS,
    SHOW_EVENT,
    Instruction,
    arrays_record,
    model_message,
    with_config,
)
from sifu.engines.remote import RemoteFederation
from sifu.errors import InputError
from sifu.theory.participation import ClientIndices

if TYPE_CHECKING:
    from flwr.app import ArrayRecord
    from flwr.serverapp import Grid


class KeyRoster:
    """Clients by the fingerprint of their node's public key; strangers are never spoken to."""

    def __init__(self, grid: Grid, keys: Mapping[str, str]) -> None:
        self._grid = grid
        self.names: dict[str, str] = {fingerprint: name for name, fingerprint in keys.items()}

    def nodes(self, names: Sequence[str]) -> dict[str, int]:
        """The node of each of `names` that is online; a key that two nodes hold is not trusted."""
        nodes_of: dict[str, list[int]] = {}
        for node in self._grid.get_nodes():
            try:
                name = self.names.get(key_fingerprint(bytes(node.public_key or b"")))
            except InputError:  # SuperLink lets nodes register whatever it can read as a key
                name = None
            if name is not None:
                nodes_of.setdefault(name, []).append(int(node.node_id))
        return {name: nodes_of[name][0] for name in names if len(nodes_of.get(name, ())) == 1}


class ClaimedRoster:
    """Clients by the name they claim: for demos and simulation, never certified above `conditional`.

    `claims` maps nodes to the names they gave; nodes that come later are asked by `ask`.
    """

    def __init__(
        self, grid: Grid, claims: dict[int, str], ask: Callable[[list[int]], dict[int, str]] = lambda nodes: {}
    ) -> None:
        self._grid, self.claims, self._ask = grid, claims, ask

    def nodes(self, names: Sequence[str]) -> dict[str, int]:
        """The node of each of `names` that is online."""
        online = {int(node) for node in self._grid.get_node_ids()}
        new = sorted(online - set(self.claims))
        self.claims |= self._ask(new) if new else {}
        holders = {name: node for node, name in self.claims.items() if node in online}
        return {name: holders[name] for name in names if name in holders}


Roster = KeyRoster | ClaimedRoster
"""Finds the nodes of clients."""

Answer = TypeVar("Answer")
LONGEST_REASON = 200


@dataclass(frozen=True)
class _Overdue:
    """A message that was not answered when its exchange closed."""

    client: int
    closed: float
    expires: float


class Exchange:
    """Sends messages over a grid and sorts the replies by client."""

    def __init__(self, grid: Grid, poll: float = 0.5) -> None:
        self._grid, self._poll = grid, poll
        self._overdue: dict[str, _Overdue] = {}
        self.received: dict[int, Message] | None = None
        """The last reply of each node, errors included, if somebody wants them."""

    def busy(self) -> frozenset[int]:
        """Clients that still owe an answer to a message that has not expired."""
        return frozenset(overdue.client for overdue in self._overdue.values())

    def late(self) -> list[tuple[int, float]]:
        """Answers that came too late since this was last called: whose, and how many seconds after the closing."""
        replies = list(self._grid.pull_messages(list(self._overdue))) if self._overdue else []
        now = time.monotonic()
        owed = [self._overdue.pop(reply.metadata.reply_to_message_id, None) for reply in replies]
        self._overdue = {number: overdue for number, overdue in self._overdue.items() if now < overdue.expires}
        return [(overdue.client, now - overdue.closed) for overdue in owed if overdue is not None]

    def ask(
        self,
        messages: Mapping[int, Message],
        timeout: float,
        read: Callable[[Message], Answer],
        *,
        expires: float = 0.0,
        enough: Sequence[tuple[Collection[int], int]] = (),
    ) -> tuple[dict[int, Answer], dict[int, str]]:
        """Replies by client, as `read` makes them out, and for everybody else the reason why there is none.

        After `timeout` seconds the exchange closes. For each set of clients in `enough` it closes earlier, once the
        given number of them have sent readable answers: the rest of that set are late, whatever other sets do.
        Messages expire `expires` seconds after they are sent; until then a client without an answer counts as busy.
        """
        answers: dict[int, Answer] = {}
        failed: dict[int, str] = {}
        pushed = set(self._grid.push_messages(list(messages.values()))) if messages else set()
        waiting: dict[str, int] = {}
        for client, message in messages.items():
            number = message.metadata.message_id
            if number in pushed:
                waiting[number] = client
            else:
                failed[client] = "the message could not be sent"
        began = time.monotonic()
        end = began + timeout
        while waiting:
            for reply in self._grid.pull_messages(list(waiting)):
                client_of = waiting.pop(reply.metadata.reply_to_message_id, None)
                if client_of is None:
                    continue
                if self.received is not None:
                    self.received[int(reply.metadata.src_node_id)] = reply
                if reply.has_error():
                    reason = str(reply.error.reason or "")[:LONGEST_REASON]
                    failed[client_of] = f"error {reply.error.code}: {reason}"
                    continue
                try:
                    answers[client_of] = read(reply)
                except (InputError, ValueError, OverflowError) as error:  # NaN is no number of samples, nor is inf
                    failed[client_of] = str(error)[:LONGEST_REASON]
            now = time.monotonic()
            for clients, count in enough:
                answered = sum(client in answers for client in clients)
                late = {number: client for number, client in waiting.items() if client in clients}
                if answered >= count and late:
                    why = f"{LATE}the answers of {answered} others were enough after {now - began:.1f} s"
                    failed |= dict.fromkeys(late.values(), why)
                    self._are_overdue(late, now, began + expires)
                    waiting = {number: client for number, client in waiting.items() if number not in late}
            if not waiting or now >= end:
                break
            time.sleep(min(self._poll, end - now))
        failed |= dict.fromkeys(waiting.values(), f"no answer within {timeout:g} s")
        self._are_overdue(waiting, time.monotonic(), began + expires)
        return answers, failed

    def _are_overdue(self, waiting: Mapping[str, int], now: float, expires: float) -> None:
        """From now on an answer to one of these messages is late; its client is busy until the message expires."""
        if now < expires:
            self._overdue |= {number: _Overdue(client, now, expires) for number, client in waiting.items()}


log = logging.getLogger(__name__)
Answers = tuple[dict[int, Answer], dict[int, str]]
"""Answers by client, and for everybody else why there is none."""
NOWHERE = Position(0, 0)
"""The position of what belongs to no round, such as an evaluation."""
EVALUATION = "evaluation: "
ATTEMPTS = 3
"""How often clients are asked for what cannot be done without."""


@dataclass(frozen=True)
class Patience:
    """How long the server waits, and how few answers are enough.

    `timeout` seconds for the answers of a round or an evaluation; `min_replies` answers make a round (more than one
    couples clients to each other, which certificates then name as assumed harmless); after `rounds_without_answer`
    empty rounds in a row training stops, to be continued later; `pause` seconds pass before the next try; replies are
    looked for every `poll` seconds. `wait` says when a round closes before that (`server.wait`). Where not a single
    node is there, a round waits `absence` seconds for one: after SuperLink was started again, nodes need a minute. It
    waits as long for `nodes` of them, or for all clients of the round if they are fewer.
    """

    timeout: float = 600.0
    min_replies: int = 1
    rounds_without_answer: int = 5
    pause: float = 5.0
    poll: float = 0.5
    wait: Wait = Wait()
    absence: float = 0.0
    nodes: int = 1


class Messenger:
    """Messages to the clients of a federation by their indices, and the answers of those who give one."""

    def __init__(self, federation: RemoteFederation, exchange: Exchange, roster: Roster, patience: Patience) -> None:
        self._federation, self._exchange, self._roster, self.patience = federation, exchange, roster, patience
        self.shown: ShownCheckpoint | None = None
        """What every message shows of the run's ledger."""
        self.networks: Mapping[int, ArrayRecord] = {}
        """What groups tuned, in every message of statistics or evaluation."""

    def record(self, model: Vector) -> ArrayRecord:
        """A model as it travels."""
        return arrays_record(self._federation.layout, model, self._federation.blueprint.carried)

    def nodes(self, clients: Iterable[int] | ClientIndices) -> dict[int, int]:
        """The nodes of those of `clients` that may be asked and are there."""
        names = {client: self._federation.clients[client].name for client in self._federation.may_ask(clients)}
        nodes = self._roster.nodes(list(names.values()))
        return {client: nodes[name] for client, name in names.items() if name in nodes}

    def _nodes_if_any_come(self, clients: Sequence[int]) -> dict[int, int]:
        """Return `nodes` after waiting for the least number of them."""
        nodes, end = self.nodes(clients), time.monotonic() + self.patience.absence
        least = min(self.patience.nodes, len(clients))
        if len(nodes) < least and self.patience.absence:
            there, absence = len(nodes), self.patience.absence
            log.warning("%d clients' nodes are connected: waiting up to %g s for %d", there, absence, least)
        while len(nodes) < least and time.monotonic() < end:
            time.sleep(min(self.patience.pause, max(0.0, end - time.monotonic())))
            nodes = self.nodes(clients)
        return nodes

    def online(
        self, position: Position, clients: Iterable[int] | ClientIndices, everybody: bool = False
    ) -> dict[int, int]:
        """As `nodes`, sorted by client; who is not there, busy with an earlier round, or late with one, is noted.

        With `everybody` the busy are asked, too.
        """
        note = self._federation.note
        for client, seconds in self._exchange.late():
            note(position, client, f"{LATE}its answer to an earlier round came {seconds:.1f} s too late, refused")
        reachable, busy = self._federation.may_ask(clients), frozenset() if everybody else self._exchange.busy()
        nodes = self._nodes_if_any_come(reachable)
        for client in reachable:
            if client not in nodes:
                note(position, client, "its node is not there")
            elif client in busy:
                note(position, client, f"{LATE}still busy with an earlier round, not asked")
        return {client: node for client, node in sorted(nodes.items()) if client not in busy}

    def messages(
        self,
        nodes: Mapping[int, int],
        record: ArrayRecord | Sequence[ArrayRecord] | None,
        position: Position,
        kind: str,
        steps: int | None = None,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> dict[int, Message]:
        """A message of a kind to each client, mostly with a model; `more` goes into its configuration."""
        blueprint, shown = self._federation.blueprint, self.shown
        networks = {} if kind == SEND_MASKED_STATISTICS else self.networks  # prepared before
        own = blueprint.evaluate_config if kind == EVALUATE else None
        messages = {}
        for client, node in nodes.items():
            instruction = Instruction(position, client, steps or blueprint.clients[client].local_steps, blueprint.plan)
            config = {
                **(blueprint.config if own is None else own),
                **(shown(shown.kept.get(client)) if shown else {}),
                **more,
            }
            timeout = self.patience.timeout
            messages[client] = model_message(record, instruction, node, kind, timeout, config, networks)
        return messages

    def try_to_ask(
        self,
        messages: Mapping[int, Message],
        read: Callable[[Message], Answer],
        together: Sequence[Collection[int]] = (),
    ) -> Answers[Answer]:
        """The answers by client, as `read` makes them out, and why the others gave none.

        Everybody is waited for, unless they are in one of the groups `together`: the spec's `server.wait` says when
        enough of a group have answered, and no group decides whose answers count in another. A client that kept an
        event the server did not know of is sent the links from it, once.
        """
        patience, shown = self.patience, self.shown
        seconds = patience.wait.seconds if together else None
        timeout = patience.timeout if seconds is None else min(patience.timeout, seconds)

        def send(sent: Mapping[int, Message]) -> Answers[Answer]:
            groups = [[client for client in group if client in sent] for group in together]
            enough = [(group, patience.wait.enough(len(group))) for group in groups if group]
            expires = patience.timeout if together else 0.0
            return self._exchange.ask(sent, timeout, read, expires=expires, enough=enough)

        answers, failed = send(messages)
        if shown is None:
            return answers, failed
        events = {client: SHOW_EVENT.search(why) for client, why in failed.items()}
        again = {
            client: with_config(messages[client], shown(int(event[1])), patience.timeout)
            for client, event in events.items()
            if event
        }
        if again:
            more, failed_again = send(again)
            answers |= more
            failed = {client: why for client, why in failed.items() if client not in again} | failed_again
        shown.kept |= dict.fromkeys(answers, shown.seq)
        return answers, failed

    def ask(
        self,
        messages: Mapping[int, Message],
        read: Callable[[Message], Answer],
        position: Position = NOWHERE,
        doing: str = "",
        together: Sequence[Collection[int]] = (),
    ) -> dict[int, Answer]:
        """As `try_to_ask`; a client without an answer is noted, with what it was `doing`."""
        answers, failed = self.try_to_ask(messages, read, together)
        for client, why in sorted(failed.items()):
            self._federation.note(position, client, f"{doing}{why}")
        return answers
