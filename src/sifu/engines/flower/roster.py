"""Which node is which client.

A client is its node's public key: SuperLink lets a node speak only if it signs with the private one, so whoever holds
another key is somebody else, and nobody at all unless the operator put the key on the list. Without a list (demos,
simulation) a node is whoever it says it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from sifu.core.identity import key_fingerprint
from sifu.errors import InputError

if TYPE_CHECKING:
    from flwr.serverapp import Grid


class Roster(Protocol):
    """Finds the nodes of clients."""

    def nodes(self, names: Sequence[str]) -> dict[str, int]:
        """The node of each of `names` that is there now; the others are left out."""
        ...


class KeyRoster:
    """Clients by the fingerprint of their node's public key; strangers are remembered and never spoken to."""

    def __init__(self, grid: Grid, keys: Mapping[str, str]) -> None:
        self._grid = grid
        self.names: dict[str, str] = {fingerprint: name for name, fingerprint in keys.items()}
        self.strangers: set[str] = set()

    def nodes(self, names: Sequence[str]) -> dict[str, int]:
        """The node of each of `names` that is online; a key that two nodes hold is not trusted."""
        nodes_of: dict[str, list[int]] = {}
        for node in self._grid.get_nodes():
            fingerprint = _fingerprint(bytes(node.public_key or b""))
            name = self.names.get(fingerprint)
            if name is None:
                self.strangers.add(fingerprint)
            else:
                nodes_of.setdefault(name, []).append(int(node.node_id))
        return {name: nodes_of[name][0] for name in names if len(nodes_of.get(name, ())) == 1}


def _fingerprint(public_key: bytes) -> str:
    """The fingerprint of a node's key; SuperLink lets nodes register whatever it can read as one."""
    try:
        return key_fingerprint(public_key)
    except InputError:
        return f"not a key: {public_key[:30]!r}"


class ClaimedRoster:
    """Clients by the name they claim: for demos and simulation, never certified above `conditional`.

    `claims` maps nodes to the names they gave; nodes that come later are asked by `ask`.
    """

    def __init__(
        self, grid: Grid, claims: dict[int, str], ask: Callable[[list[int]], dict[int, str]] = lambda nodes: {}
    ) -> None:
        self._grid, self.claims, self._ask = grid, claims, ask

    def nodes(self, names: Sequence[str]) -> dict[str, int]:
        """The node of each of `names` that is online."""
        online = {int(node) for node in self._grid.get_node_ids()}
        new = sorted(online - set(self.claims))
        self.claims |= self._ask(new) if new else {}
        holders = {name: node for node, name in self.claims.items() if node in online}
        return {name: holders[name] for name in names if name in holders}
