"""Messages out, replies in: each reply belongs to the client whose message it answers, and silence has an end.

A lost node's error reply names another sender, and a straggler's never comes, so replies are told apart by
`reply_to_message_id` alone, and whoever has not answered in time is recorded as absent. A reply that comes later is
never looked at.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from flwr.app import Message

from sifu.errors import InputError

if TYPE_CHECKING:
    from flwr.serverapp import Grid

Reply = TypeVar("Reply")
LONGEST_REASON = 200


class Exchange:
    """Sends messages over a grid and sorts the replies by client."""

    def __init__(self, grid: Grid, poll: float = 0.5) -> None:
        self._grid, self._poll = grid, poll

    def ask(
        self, messages: Mapping[int, Message], timeout: float, read: Callable[[Message], Reply]
    ) -> tuple[dict[int, Reply], dict[int, str]]:
        """Replies by client, as `read` makes them out, and for everybody else the reason why there is none."""
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
        end = time.monotonic() + timeout
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
            if not waiting or left <= 0.0:
                break
            time.sleep(min(self._poll, left))
        failed |= dict.fromkeys(waiting.values(), f"no answer within {timeout:g} s")
        return answers, failed
