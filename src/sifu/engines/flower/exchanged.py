"""Reports of a round's messages to a Flower strategy, and the sample of clients that evaluate a model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import Message

from sifu.core.engine import Position
from sifu.core.layout import Vector
from sifu.theory.participation import Participation, base_key, place_key


@dataclass(frozen=True)
class Exchanged:
    """Replies to the messages of one round's training or evaluation (`kind`).

    `asked` is the number of clients asked, and `results` the number of them whose replies count. `counted` holds these
    replies; it is empty for masked rounds, which hide them. `errors` are Flower's error replies. `notes` name the
    clients whose replies do not count, with the reasons.
    """

    kind: str
    position: Position
    asked: int
    results: int
    counted: tuple[Message, ...] = ()
    errors: tuple[Message, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reporter:
    """Listener to a federation's exchanges; both functions are called in every round.

    `before` receives the kind, the position, the number of clients asked and the number of known clients; `after`
    receives the replies.
    """

    before: Callable[[str, Position, int, int], None]
    after: Callable[[Exchanged], None]


@dataclass(frozen=True)
class EvaluationSample:
    """Choice of the clients that evaluate a model: a `fraction` of the online clients, but at least `least`."""

    fraction: float = 1.0
    least: int = 0

    def size(self, clients: int) -> int:
        """Return how many of `clients` clients evaluate."""
        return min(clients, max(int(clients * self.fraction), self.least))

    def draw(self, clients: Sequence[int], seed: int, model: Vector) -> list[int]:
        """Return the clients that evaluate the model, sorted; equal arguments give the same clients."""
        count = self.size(len(clients))
        if count == len(clients):
            return sorted(clients)
        digest = hashlib.sha256(np.ascontiguousarray(model).tobytes()).digest()
        key = place_key(base_key(seed, "evaluation"), int.from_bytes(digest[:7], "little"))
        return [int(client) for client in Participation("fixed", count=count).draw(np.array(clients), key)]
