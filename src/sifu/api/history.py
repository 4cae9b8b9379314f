"""The evaluations of a run in order, for `Run.history` and a CSV file beside the report."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from sifu.run.run_view import ACTIVE
from sifu.store.reader import RunReader


@dataclass(frozen=True)
class HistoryRow:
    """An evaluation on the active clients' training data.

    `step` always increases, even across rollbacks. `round` counts within the current work: the first training if
    `request` is empty, otherwise the retraining for that request.
    """

    step: int
    request: str
    branch: int
    round: int
    accuracy: float
    loss: float
    samples: int


def history_of(reader: RunReader) -> list[HistoryRow]:
    """Return the evaluations on the active clients' training data, in order."""
    requests = {row.request_order: row.request for row in reader.requests() if row.request_order is not None}
    nodes = reader.nodes_by_number()
    # The rounds of a request are on the branch that its noise or its fresh model begins.
    of_branch = {node.branch: requests[node.order] for node in nodes.values() if node.order in requests}
    rows = []
    for row in reader.evaluations():
        if row.subset == ACTIVE:
            node = nodes[row.node]
            request = of_branch.get(node.branch, "")
            rows.append(HistoryRow(row.node, request, node.branch, node.position, row.accuracy, row.loss, row.samples))
    return rows


def csv_of(rows: Sequence[HistoryRow]) -> str:
    """Return rows as CSV, after a line with the names of the columns."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([HistoryRow.__dataclass_fields__, *map(astuple, rows)])
    return text.getvalue()
