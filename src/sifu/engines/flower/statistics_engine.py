"""Flower engines for closed-form heads, whose statistics are computed on the clients' nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sifu.core.engine import Position, Reason
from sifu.core.operator_words import FLOWER, unmasked_setting
from sifu.engines.flower.exchange import Patience, Roster
from sifu.engines.flower.flower_engine import FlowerFederation
from sifu.engines.flower.wire import (
    PREPARE_STATISTICS,
    SEND_MASKED_STATISTICS,
    STATISTICS,
    read_masked,
    read_prepared,
    read_statistics_sent,
)
from sifu.engines.plans import Origin, Sent
from sifu.engines.remote import Blueprint
from sifu.engines.remote_statistics import MaskedRemoteStatistics, RemoteStatistics
from sifu.theory.arrays import Words

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.serverapp import Grid


class FlowerStatistics(RemoteStatistics, FlowerFederation):
    """`RemoteStatistics` for Flower nodes."""

    def reachable(self, clients: Sequence[int]) -> list[int]:
        """Return the clients that may be asked and whose node is online."""
        return sorted(self._messenger.nodes(clients)) if clients else []

    def _ask_statistics(self, clients: Sequence[int], position: Position) -> dict[int, tuple[Origin, Sent] | Reason]:
        messages = self._messages(clients, position, STATISTICS)
        return dict(self._messenger.ask(messages, read_statistics_sent, position, "statistics: "))

    def _messages(
        self, clients: Sequence[int], position: Position, kind: str, more: dict[str, Any] | None = None
    ) -> dict[int, Message]:
        nodes = self._messenger.online(position, clients, everybody=True)
        return self._messenger.messages(nodes, None, position, kind, more=more or {})


class MaskedFlowerStatistics(MaskedRemoteStatistics, FlowerStatistics):
    """`MaskedRemoteStatistics` for Flower nodes."""

    unmasked = unmasked_setting(FLOWER)

    def _ask_keys(self, clients: Sequence[int], position: Position) -> Mapping[int, tuple[Origin, bytes]]:
        messages = self._messages(clients, position, PREPARE_STATISTICS)
        return self._messenger.ask(messages, read_prepared, position, "statistics: ")

    def _ask_masked(self, keys: Mapping[int, bytes], position: Position, total: Words) -> list[int]:
        def add(reply: Message) -> None:
            # Keep only the sum: the statistics of many clients would not fit in memory.
            np.add(total, read_masked(reply, total.size), out=total)

        order = sorted(keys)
        more = {"clients": order, "keys": [keys[client] for client in order]}
        messages = self._messages(order, position, SEND_MASKED_STATISTICS, more)
        return list(self._messenger.ask(messages, add, position, "statistics: "))


def make_federation(
    grid: Grid,
    roster: Roster,
    blueprint: Blueprint,
    patience: Patience,
    *,
    masked_updates: bool = False,
    masked_statistics: bool = True,
) -> FlowerFederation:
    """Return the Flower engine for a blueprint."""
    if blueprint.head is None:
        return FlowerFederation(grid, roster, blueprint, patience, masked=masked_updates)
    statistics = MaskedFlowerStatistics if masked_statistics else FlowerStatistics
    return statistics(grid, roster, blueprint, patience)
