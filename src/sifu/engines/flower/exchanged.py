"""Records of exchanges with clients for Flower strategies, and the sample of clients that evaluates a model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import Message

from sifu.core.engine import Incident, Position, Rejection
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

    @staticmethod
    def of(
        kind: str,
        position: Position,
        nodes: Mapping[int, int],
        received: Mapping[int, Message],
        taken: Iterable[int],
        incidents: Iterable[Incident],
        rejections: Iterable[Rejection] = (),
    ) -> Exchanged:
        """Make the record of one exchange.

        Args:
            kind: Training or evaluation.
            position: Branch and round.
            nodes: Node of each client that was asked.
            received: Replies by node.
            taken: Clients whose replies count.
            incidents: Incidents of the exchange.
            rejections: Rejected replies.
        """
        counting = list(taken)
        notes = [f"{incident.client}: {incident.what}".removeprefix(": ") for incident in incidents]
        notes += [f"{rejection.client}: refused, {rejection.reason}" for rejection in rejections]
        counted = tuple(received[nodes[client]] for client in counting if nodes[client] in received)
        errors = tuple(reply for reply in received.values() if reply.has_error())
        return Exchanged(kind, position, len(nodes), len(counting), counted, errors, tuple(notes))


class Reporter:
    """Listener to a federation's exchanges; both functions are called in every round.

    `before` receives the kind, the position, the number of clients asked and the number of known clients; `after`
    receives the replies.
    """

    def __init__(self, before: Callable[[str, Position, int, int], None], after: Callable[[Exchanged], None]) -> None:
        self.before, self.after = before, after


@dataclass(frozen=True)
class EvaluationSample:
    """Choice of the clients that evaluate a model: a `fraction` of the online clients, but at least `least`."""

    fraction: float = 1.0
    least: int = 0

    def size(self, clients: int) -> int:
        """Return how many of `clients` clients evaluate."""
        return min(clients, max(int(clients * self.fraction), self.least))

    def draw(self, clients: Sequence[int], seed: int, model: Vector) -> list[int]:
        """Return the evaluating clients, sorted; the same model is always evaluated by the same clients."""
        count = self.size(len(clients))
        if count == len(clients):
            return sorted(clients)
        digest = hashlib.sha256(np.ascontiguousarray(model).tobytes()).digest()
        key = place_key(base_key(seed, "evaluation"), int.from_bytes(digest[:7], "little"))
        return [int(client) for client in Participation("fixed", count=count).draw(np.array(clients), key)]
