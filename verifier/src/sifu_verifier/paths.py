"""Paths of nodes, from a fresh model to a given one (docs/store.md, section 1)."""

from __future__ import annotations

from sifu_verifier.run_folder import RunFolder


def path_to(run: RunFolder, node: int | None) -> list[int]:
    """Return the nodes on the path to a node, from its fresh model on."""
    chain: list[int] = []
    while node is not None:
        chain.append(node)
        node = run.nodes[node]["parent"]
    return chain[::-1]


def parents_come_first(run: RunFolder) -> bool:
    """Return whether every parent precedes its child, so that every path ends."""
    pairs = [(row["parent"], row["node"]) for row in run.nodes.values() if row["parent"] is not None]
    return all(isinstance(parent, int) and isinstance(node, int) and parent < node for parent, node in pairs)
