"""Messages out, replies in: which node is which client, and each reply belongs to the client asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from flwr.app import Message

from sifu.core.identity import key_fingerprint
from sifu.core.replies import LATE
from sifu.errors import InputError

if TYPE_CHECKING:
    from flwr.serverapp import Grid


class Roster(Protocol):
    """Finds the nodes of clients."""

    def nodes(self, names: Sequence[str]) -> dict[str, int]:
        """The node of each of `names` that is there now; the others are left out."""
        ...


class KeyRoster:
    """Clients by the fingerprint of their node's public key; strangers are remembered and never spoken to."""

    def __init__(self, grid: Grid, keys: Mapping[str, str]) -> None:
        self._grid = grid
        self.names: dict[str, str] = {fingerprint: name for name, fingerprint in keys.items()}
        self.strangers: set[str] = set()

    def nodes(self, names: Sequence[str]) -> dict[str, int]:
        """The node of each of `names` that is online; a key that two nodes hold is not trusted."""
        nodes_of: dict[str, list[int]] = {}
        for node in self._grid.get_nodes():
            fingerprint = _fingerprint(bytes(node.public_key or b""))
            name = self.names.get(fingerprint)
            if name is None:
                self.strangers.add(fingerprint)
            else:
                nodes_of.setdefault(name, []).append(int(node.node_id))
        return {name: nodes_of[name][0] for name in names if len(nodes_of.get(name, ())) == 1}


def _fingerprint(public_key: bytes) -> str:
    """The fingerprint of a node's key; SuperLink lets nodes register whatever it can read as one."""
    try:
        return key_fingerprint(public_key)
    except InputError:
        return f"not a key: {public_key[:30]!r}"


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
