"""What a request cost, counted from what is recorded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sifu.core.method_info import CLOSED_FORM
from sifu.requests.certification import payload_of_request, solves
from sifu.store.reader import RunReader
from sifu.store.table_rows import RequestRow
from sifu.theory.arrays import Integers


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
    rounds, replies, steps = reader.remembered("costs", lambda: _sums_until_each_node(reader))[
        :, [first, last]
    ].tolist()
    if row.method == CLOSED_FORM:
        return _cost_of_solve(reader, row)
    layout, extra = reader.layout, payload_of_request(reader, row.request, "rolled back")["extra"]
    return Cost(
        rounds=rounds[1] - rounds[0] + extra["rounds"],
        starting_rounds=extra["rounds"],
        local_steps=steps[1] - steps[0] + extra["local_steps"],
        bytes_sent=2 * layout.size * np.dtype(layout.dtype).itemsize * (replies[1] - replies[0]) + extra["bytes_sent"],
        bytes_kept=int(payload_of_request(reader, row.request, "request done")["bytes_kept"]),
    )


def _cost_of_solve(reader: RunReader, row: RequestRow) -> Cost:
    """What a closed-form head took: a round only if clients were asked for their statistics, and no descent."""
    solve = solves(reader)[row.final_node or 0]
    return Cost(
        rounds=int(solve["asked"] > (1 if row.records else 0)),  # a client that stays with less sends one message
        starting_rounds=0,
        local_steps=0,
        bytes_sent=int(solve["bytes_sent"]),
        bytes_kept=int(payload_of_request(reader, row.request, "request done")["bytes_kept"]),
    )


def _sums_until_each_node(reader: RunReader) -> Integers:
    """Rounds, replies and local steps in all nodes up to each, one row each."""
    nodes, everyone = reader.nodes_by_number(), reader.everyone()
    sums = np.zeros((3, 1 + max(nodes)), dtype=np.int64)
    sums[0, [number for number, row in nodes.items() if row.node.kind == "round"]] = 1
    steps = np.array([client.local_steps for client in reader.clients()], dtype=np.int64)
    np.add.at(sums[1], everyone.nodes, 1)
    np.add.at(sums[2], everyone.nodes, steps[everyone.clients])
    result: Integers = np.cumsum(sums, axis=1)
    return result
