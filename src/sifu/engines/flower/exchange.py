"""Exchange of messages with clients: lookup of their nodes, matching of replies, and records of missing replies.

A client that is offline, replies late or fails is recorded as an `Incident` and counts as a client without a reply.
Excluded clients receive no messages.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from flwr.app import Message

from sifu.core.client_names import key_fingerprint
from sifu.core.engine import Position
from sifu.core.layout import Vector
from sifu.core.replies import LATE, Wait
from sifu.engines.flower.checkpoints_of_nodes import ShownCheckpoint
from sifu.engines.flower.wire import (
    EVALUATE,
    SHOW_EVENT,
    arrays_record,
    model_message,
    with_config,
)
from sifu.engines.plans import Instruction
from sifu.engines.remote import NO_ROUND, RemoteFederation
from sifu.errors import InputError
from sifu.theory.participation import ClientIndices

if TYPE_CHECKING:
    from flwr.app import ArrayRecord
    from flwr.serverapp import Grid


class KeyRoster:
    """Clients identified by the fingerprint of their node's public key; unknown nodes receive no messages."""

    def __init__(self, grid: Grid, keys: Mapping[str, str]) -> None:
        self._grid = grid
        self.names: dict[str, str] = {fingerprint: name for name, fingerprint in keys.items()}

    def nodes(self, names: Sequence[str]) -> dict[str, int]:
        """Return the node of each online client in `names`, except clients whose key is used by several nodes."""
        nodes_of: dict[str, list[int]] = {}
        for node in self._grid.get_nodes():
            try:
                name = self.names.get(key_fingerprint(bytes(node.public_key or b"")))
            except InputError:  # SuperLink also registers nodes with keys that cannot be parsed
                name = None
            if name is not None:
                nodes_of.setdefault(name, []).append(int(node.node_id))
        return {name: nodes_of[name][0] for name in names if len(nodes_of.get(name, ())) == 1}


class ClaimedRoster:
    """Clients identified by the names they claim, for demos and simulations. Certificates are `conditional` at best.

    `claims` maps nodes to the names they claimed. `ask` returns the names claimed by nodes that connect later.
    """

    def __init__(
        self, grid: Grid, claims: dict[int, str], ask: Callable[[list[int]], dict[int, str]] = lambda nodes: {}
    ) -> None:
        self._grid, self.claims, self._ask = grid, claims, ask

    def nodes(self, names: Sequence[str]) -> dict[str, int]:
        """Return the node of each online client in `names`."""
        online = {int(node) for node in self._grid.get_node_ids()}
        new = sorted(online - set(self.claims))
        self.claims |= self._ask(new) if new else {}
        holders = {name: node for node, name in self.claims.items() if node in online}
        return {name: holders[name] for name in names if name in holders}


Roster = KeyRoster | ClaimedRoster
"""Lookup of clients' nodes by client name."""

Answer = TypeVar("Answer")
LONGEST_REASON = 200


@dataclass(frozen=True)
class _Overdue:
    """Message that had no reply when its exchange closed."""

    client: int
    closed: float
    expires: float


class Exchange:
    """Sender of messages over a grid that matches replies to clients."""

    def __init__(self, grid: Grid, poll: float) -> None:
        self._grid, self._poll = grid, poll
        self._overdue: dict[str, _Overdue] = {}
        self.received: dict[int, Message] | None = None
        """Last reply of each node, including errors, or None if replies are not collected."""

    def busy(self) -> frozenset[int]:
        """Return the clients that have not yet replied to a message that has not expired."""
        return frozenset(overdue.client for overdue in self._overdue.values())

    def late(self) -> list[tuple[int, float]]:
        """Return replies that arrived late since the last call: (client, seconds after the exchange closed)."""
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
        """Send messages and wait for the replies.

        Args:
            messages: One message per client.
            timeout: Seconds after which the exchange closes.
            read: Parser of a reply; may raise `InputError`.
            expires: Seconds after sending during which a client without a reply counts as busy.
            enough: Rules to stop early, each a set of clients and a number of replies. Once a set has sent this number
                of readable replies, its other clients are late. Sets do not influence each other.

        Returns:
            The parsed replies by client, and the failure reasons for the rest.
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
                except (InputError, ValueError, OverflowError) as error:  # a number of samples may be NaN or infinite
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
        """Record these messages as overdue; their clients are busy until the messages expire."""
        if now < expires:
            self._overdue |= {number: _Overdue(client, now, expires) for number, client in waiting.items()}


log = logging.getLogger(__name__)
Answers = tuple[dict[int, Answer], dict[int, str]]
"""Parsed replies by client, and failure reasons for the rest."""


@dataclass(frozen=True)
class Patience:
    """Waiting times of the server, and the number of replies it needs.

    `timeout` is the time in seconds for the replies of a round or an evaluation. A round needs `min_replies` replies;
    a minimum above 1 couples the clients, which certificates list as an assumption. `pause` is the time between
    attempts, and `poll` the polling interval. `wait` defines when a round closes early (`server.wait`). A round waits
    up to `absence` seconds until `nodes` nodes, or all clients of the round if they are fewer, are connected: nodes
    need about a minute to reconnect after a restart of SuperLink.
    """

    timeout: float = 600.0
    min_replies: int = 1
    pause: float = 5.0
    poll: float = 0.5
    wait: Wait = Wait()
    absence: float = 0.0
    nodes: int = 1


class Messenger:
    """Message exchange with the clients of a federation, which are addressed by index."""

    def __init__(self, federation: RemoteFederation, exchange: Exchange, roster: Roster, patience: Patience) -> None:
        self._federation, self._exchange, self._roster, self.patience = federation, exchange, roster, patience
        self.shown: ShownCheckpoint | None = None
        """Ledger checkpoint that every message includes, or None before there is one."""

    def record(self, model: Vector) -> ArrayRecord:
        """Return a model as a Flower record."""
        return arrays_record(self._federation.layout, model, self._federation.blueprint.carried)

    def nodes(self, clients: Iterable[int] | ClientIndices) -> dict[int, int]:
        """Return the nodes of the `clients` that may be asked and are online."""
        names = {client: self._federation.clients[client].name for client in self._federation.may_ask(clients)}
        nodes = self._roster.nodes(list(names.values()))
        return {client: nodes[name] for client, name in names.items() if name in nodes}

    def _awaited_nodes(self, clients: Sequence[int]) -> dict[int, int]:
        """Wait up to `absence` seconds until enough nodes are connected; return the result of `nodes`."""
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
        """Return the nodes of online clients sorted by client; record offline, busy and late clients as incidents.

        Busy clients are included only if `everybody` is true.
        """
        note = self._federation.note
        for client, seconds in self._exchange.late():
            note(position, client, f"{LATE}its answer to an earlier round came {seconds:.1f} s too late, refused")
        reachable, busy = self._federation.may_ask(clients), frozenset() if everybody else self._exchange.busy()
        nodes = self._awaited_nodes(reachable)
        for client in reachable:
            if client not in nodes:
                note(position, client, "its node is not there")
            elif client in busy:
                note(position, client, f"{LATE}still busy with an earlier round, not asked")
        return {client: node for client, node in sorted(nodes.items()) if client not in busy}

    def messages(
        self,
        nodes: Mapping[int, int],
        record: ArrayRecord | None,
        position: Position,
        kind: str,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> dict[int, Message]:
        """Return one message per client."""
        blueprint, shown = self._federation.blueprint, self.shown
        own = blueprint.evaluate_config if kind == EVALUATE else None
        messages = {}
        for client, node in nodes.items():
            instruction = Instruction(position, client, blueprint.clients[client].local_steps, blueprint.plan)
            config = {
                **(blueprint.config if own is None else own),
                **(shown(shown.kept.get(client)) if shown else {}),
                **more,
            }
            timeout = self.patience.timeout
            messages[client] = model_message(record, instruction, node, kind, timeout, config)
        return messages

    def try_to_ask(
        self,
        messages: Mapping[int, Message],
        read: Callable[[Message], Answer],
        together: Sequence[Collection[int]] = (),
    ) -> Answers[Answer]:
        """Send messages and wait for the replies.

        If a client asks for the ledger links since an event that it kept (`SHOW_EVENT`), its message is sent once more
        with these links.

        Args:
            messages: One message per client.
            read: Parser of a reply.
            together: Groups of clients that the spec's `server.wait` applies to: a group closes once enough of its
                members have replied. Groups do not influence each other. For other clients, only the timeout applies.

        Returns:
            The parsed replies by client, and the failure reasons for the rest.
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
        position: Position = NO_ROUND,
        doing: str = "",
        together: Sequence[Collection[int]] = (),
    ) -> dict[int, Answer]:
        """Return the parsed replies of `try_to_ask`; record an incident for each client without a reply.

        `doing` is a prefix of the incidents' descriptions, which names the step.
        """
        answers, failed = self.try_to_ask(messages, read, together)
        for client, why in sorted(failed.items()):
            self._federation.note(position, client, f"{doing}{why}")
        return answers
