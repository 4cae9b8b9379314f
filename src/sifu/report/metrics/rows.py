"""One line for each evaluation of a run."""

from __future__ import annotations

import json
from dataclasses import dataclass

from sifu.record.run_view import ACTIVE
from sifu.store.reader import RunReader


@dataclass(frozen=True)
class MetricRow:
    """An evaluation on the active clients' training data.

    `step` only ever grows, also over rollbacks; `round` counts within the work at hand, which is the first training
    where `request` is empty, and otherwise the retraining for that request.
    """

    run: str
    step: int
    time: str
    request: str
    branch: int
    round: int
    accuracy: float
    loss: float
    samples: int


COLUMNS = tuple(MetricRow.__dataclass_fields__)
VALUES = ("accuracy", "loss")
"""What is drawn as a curve."""


def rows_after(reader: RunReader, step: int) -> list[MetricRow]:
    """The evaluations of later steps, in their order."""
    run = reader.value("run")
    rows = reader.query(
        "SELECT n.node, n.request_order, n.branch, n.position, e.accuracy, e.loss, e.samples "
        "FROM evaluations e JOIN nodes n ON n.node = e.node WHERE e.node > ? AND e.subset = ? ORDER BY n.node",
        (step, ACTIVE),
    )
    if not rows:
        return []
    requests = {row.request_order: row.request for row in reader.requests() if row.request_order is not None}
    times = _times_after(reader, step)
    return [
        MetricRow(
            run, int(node), times.get(int(node), ""), requests.get(order, ""), int(branch), int(position),
            float(accuracy), float(loss), int(samples),
        )
        for node, order, branch, position, accuracy, loss, samples in rows
    ]  # fmt: skip


def _times_after(reader: RunReader, step: int) -> dict[int, str]:
    """When each later step was recorded; the latest events are read first, and none that is older than needed."""
    times: dict[int, str] = {}
    for time, sealed in reader.connection.execute(
        "SELECT time, content FROM events JOIN sealed USING (seq) ORDER BY seq DESC"
    ):
        recorded = json.loads(sealed).get("evaluations")
        nodes = [int(row["node"]) for row in recorded or () if row.get("subset") == ACTIVE]
        times |= dict.fromkeys(nodes, str(time))
        if nodes and min(nodes) <= step:
            break
    return times
