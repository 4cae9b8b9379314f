"""Whether the recorded nodes are one history, in which nobody forgotten takes part again."""

from __future__ import annotations

from collections.abc import Iterator

from sifu.record.run_view import RunView
from sifu.store.reader import RunReader


def check_history(reader: RunReader) -> Iterator[str]:
    """One path, positions in order, and no forgotten client ever in a later round."""
    rows = {row.node.node: row.node for row in reader.node_rows()}
    for one in rows.values():
        parent = rows.get(one.parent) if one.parent is not None else None
        if one.kind == "round" and (
            parent is None
            or one.parent is None
            or one.parent >= one.node
            or (one.branch, one.position) != (parent.branch, parent.position + 1)
        ):
            yield f"history: round node {one.node} does not follow its parent {one.parent}"
        if one.kind == "noise" and (parent is None or one.position != 0 or one.branch != one.order):
            yield f"history: noise node {one.node} is misplaced"
        if one.kind == "heuristic" and (
            parent is None or parent.kind != "initial" or one.branch != one.order or one.noise_std != 0.0
        ):
            yield f"history: heuristic node {one.node} is misplaced"
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
