"""What a request cost, counted from what is recorded."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from sifu.store.reader import RequestRow, RunReader


@dataclass(frozen=True)
class Cost:
    """What a request took.

    `rounds` of retraining, `local_steps` of gradient descent over all participants, `bytes_sent`: the model to every
    participant of every round and its update back, `bytes_kept`: what lay on disk afterwards, beyond the current
    model, for the method to answer the next request.
    """

    rounds: int
    local_steps: int
    bytes_sent: int
    bytes_kept: int


def cost_of(reader: RunReader, row: RequestRow) -> Cost:
    """The cost of a request that is done."""
    first, last = row.noise_node or 0, row.final_node or 0
    each = dict(
        reader.query(
            "SELECT client, COUNT(*) FROM participation WHERE node > ? AND node <= ? GROUP BY client", (first, last)
        )
    )
    steps = [one.local_steps for one in reader.clients()]
    rounds = reader.query("SELECT COUNT(*) FROM nodes WHERE kind = 'round' AND node > ? AND node <= ?", (first, last))
    layout = reader.layout
    return Cost(
        rounds=int(rounds[0][0]),
        local_steps=sum(count * steps[client] for client, count in each.items()),
        bytes_sent=2 * layout.size * np.dtype(layout.dtype).itemsize * sum(each.values()),
        bytes_kept=_bytes_kept(reader, row.request),
    )


def _bytes_kept(reader: RunReader, request: str) -> int:
    """As it was measured when the request was done."""
    for (payload,) in reader.query("SELECT payload FROM events WHERE kind = 'request done' ORDER BY seq"):
        content = json.loads(payload)
        if content["request"] == request:
            return int(content["bytes_kept"])
    return 0
