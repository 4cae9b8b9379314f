"""Messages out, replies in: each reply belongs to the client whose message it answers, and silence has an end.

A lost node's error reply names another sender, and a straggler's never comes, so replies are told apart by
`reply_to_message_id` alone, and whoever has not answered when the exchange closes is recorded as absent. A reply that
comes later is never used; it only tells that its client is done with what it was asked (`late`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from flwr.app import Message

from sifu.core.waiting import LATE
from sifu.errors import InputError

if TYPE_CHECKING:
    from flwr.serverapp import Grid

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

        After `timeout` seconds the exchange closes. It closes earlier for clients that `enough` names together, once
        so many of them have sent what could be read: the others of them are late, whatever those of another set do.
        Messages expire `expires` seconds after they are sent; until then whoever has not answered is busy with it.
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
        """From now on an answer to one of these messages is late; whoever owes it is busy until the message expires."""
        if now < expires:
            self._overdue |= {number: _Overdue(client, now, expires) for number, client in waiting.items()}
