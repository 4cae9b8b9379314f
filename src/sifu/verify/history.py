"""Whether the recorded nodes are one history, in which nobody forgotten takes part again."""

from __future__ import annotations

from collections.abc import Iterator

from sifu.record.run_view import RunView
from sifu.store.reader import RunReader


def check_history(reader: RunReader) -> Iterator[str]:
    """One path, positions in order, and no forgotten client ever in a later round."""
    rows = {row.node.node: row.node for row in reader.node_rows()}
    for node in rows.values():
        parent = rows.get(node.parent) if node.parent is not None else None
        if node.kind == "round" and (
            parent is None
            or node.parent is None
            or node.parent >= node.node
            or (node.branch, node.position) != (parent.branch, parent.position + 1)
        ):
            yield f"history: round node {node.node} does not follow its parent {node.parent}"
        if node.kind == "noise" and (parent is None or node.position != 0 or node.branch != node.order):
            yield f"history: noise node {node.node} is misplaced"
        if node.kind == "heuristic" and (
            parent is None or parent.kind != "initial" or node.branch != node.order or node.noise_std != 0.0
        ):
            yield f"history: heuristic node {node.node} is misplaced"
    view = RunView(reader)
    for request in reader.requests():
        if request.noise_node is None:
            continue
        for name in request.clients:
            client = view.index_of.get(name)
            later = reader.query(
                "SELECT MIN(node) FROM participation WHERE client = ? AND node > ?", (client, request.noise_node)
            )[0][0]
            if later is not None:
                yield f"history: client {name} was forgotten at node {request.noise_node} but took part in node {later}"
