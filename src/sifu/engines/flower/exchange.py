"""Messages out, replies in: each reply belongs to the client whose message it answers, and silence has an end.

A lost node's error reply names another sender, and a straggler's never comes, so replies are told apart by
`reply_to_message_id` alone, and whoever has not answered when the exchange closes is recorded as absent. A reply that
comes later is never used; it only tells that its client is done with what it was asked (`late`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from flwr.app import Message

from sifu.core.waiting import LATE
from sifu.errors import InputError

if TYPE_CHECKING:
    from flwr.serverapp import Grid

Reply = TypeVar("Reply")
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
        read: Callable[[Message], Reply],
        *,
        expires: float = 0.0,
        enough: int | None = None,
    ) -> tuple[dict[int, Reply], dict[int, str]]:
        """Replies by client, as `read` makes them out, and for everybody else the reason why there is none.

        With `enough` replies that could be read, or after `timeout` seconds, the exchange closes. Messages `expires`
        seconds after they are sent; until then whoever has not answered is busy with it.
        """
        answers: dict[int, Reply] = {}
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
            left = end - time.monotonic()
            closed = enough is not None and len(answers) >= enough
            if not waiting or closed or left <= 0.0:
                break
            time.sleep(min(self._poll, left))
        now = time.monotonic()
        why = f"no answer within {timeout:g} s"
        if now < end:
            why = f"{LATE}the answers of {len(answers)} others were enough after {now - began:.1f} s"
        failed |= dict.fromkeys(waiting.values(), why)
        if now < began + expires:
            self._overdue |= {number: _Overdue(client, now, began + expires) for number, client in waiting.items()}
        return answers, failed
