"""What a request cost, counted from what is recorded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sifu.api.certification import payload_of_request
from sifu.store.reader import RequestRow, RunReader


@dataclass(frozen=True)
class Cost:
    """What a request took.

    `rounds` it took, `starting_rounds` of them to make the model that retraining started from (FedEraser's
    calibration); `local_steps` of gradient descent in them, over all participants; `bytes_sent`: the model to every
    participant of every round and its update back; `bytes_kept`: what lay on disk afterwards, beyond the current
    model, for the method to answer the next request.
    """

    rounds: int
    starting_rounds: int
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
    layout, extra = reader.layout, payload_of_request(reader, row.request, "rolled back")["extra"]
    return Cost(
        rounds=int(rounds[0][0]) + extra["rounds"],
        starting_rounds=extra["rounds"],
        local_steps=sum(count * steps[client] for client, count in each.items()) + extra["local_steps"],
        bytes_sent=2 * layout.size * np.dtype(layout.dtype).itemsize * sum(each.values()) + extra["bytes_sent"],
        bytes_kept=int(payload_of_request(reader, row.request, "request done")["bytes_kept"]),
    )
