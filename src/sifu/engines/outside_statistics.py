"""Engines for closed-form heads whose messages are passed on by the operator's own program.

Clients answer tasks with `sifu.engines.loop_client.LoopClient`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sifu.core.engine import Position, Reason
from sifu.core.layout import Vector
from sifu.core.operator_words import LOOP, unmasked_setting
from sifu.engines.outside import NOTHING, Arrays, Exchange, Kind, OutsideFederation
from sifu.engines.outside_masked import MaskedOutsideFederation, masked_words, named_keys, read_key
from sifu.engines.plans import FEATURES, NETWORK, NUMBERS, ROW_FEATURES, ROW_TARGETS, WORDS, Origin, Sent
from sifu.engines.remote import Blueprint
from sifu.engines.remote_statistics import MaskedRemoteStatistics, RemoteStatistics, TunedRemoteStatistics
from sifu.errors import InputError
from sifu.theory.arrays import Words


class OutsideStatistics(RemoteStatistics, OutsideFederation):
    """`RemoteStatistics` for clients that only the operator's program can reach."""

    _networks: Arrays = NOTHING
    """Parameters tuned by the groups; tasks for statistics or an evaluation include them."""

    def __init__(self, blueprint: Blueprint, exchange: Exchange) -> None:
        super().__init__(blueprint, exchange)
        self._silent: set[int] = set()

    def reachable(self, clients: Sequence[int]) -> list[int]:
        """Return the clients that may be asked, except clients that did not reply when they were last asked."""
        return [client for client in self.may_ask(clients) if client not in self._silent]

    def _ask_statistics(self, clients: Sequence[int], position: Position) -> dict[int, tuple[Origin, Sent] | Reason]:
        return {client: _read(reply) for client, reply in self._request("statistics", clients, position).items()}

    def _request(
        self, kind: Kind, clients: Sequence[int], position: Position, more: Mapping[str, Any] = NOTHING
    ) -> dict[int, Any]:
        """Return the replies of `clients`, and record which clients did not reply."""
        asked = self.may_ask(clients)
        arrays = NOTHING if kind == "masked" else self._networks  # clients received the networks with "prepare"
        replies = self._replies(kind, position, dict.fromkeys(asked, arrays), dict.fromkeys(asked, more))
        self._silent = (self._silent - set(asked)) | (set(asked) - replies.keys())
        return replies

    def _arrays(self, model: Vector) -> Arrays:
        return {**super()._arrays(model), **self._networks}


class MaskedOutsideStatistics(MaskedRemoteStatistics, OutsideStatistics):
    """`MaskedRemoteStatistics` for clients that only the operator's program can reach."""

    unmasked = unmasked_setting(LOOP)

    def _ask_keys(self, clients: Sequence[int], position: Position) -> dict[int, tuple[Origin, bytes] | Reason]:
        return {client: _read_key(reply) for client, reply in self._request("prepare", clients, position).items()}

    def _ask_masked(self, keys: Mapping[int, bytes], position: Position, total: Words) -> list[int]:
        came = []
        replies = self._request("masked", list(keys), position, named_keys(keys))
        for client, words in masked_words(self, position, replies, total.size):
            total += words
            came.append(client)
        self._silent |= keys.keys() - set(came)
        return came


class TunedOutsideStatistics(TunedRemoteStatistics, OutsideStatistics):
    """`TunedRemoteStatistics` for clients that only the operator's program can reach."""

    tuning: OutsideFederation

    def __init__(self, blueprint: Blueprint, exchange: Exchange, *, masked_updates: bool = False) -> None:
        super().__init__(blueprint, exchange)
        tuning = MaskedOutsideFederation if masked_updates else OutsideFederation
        self.tuning = tuning(self.tuning_blueprint(), exchange)

    def _send_networks(self, networks: Mapping[int, Vector]) -> None:
        self._networks = {
            f"{NETWORK}{group}.{name}": array
            for group, network in networks.items()
            for name, array in self.tuning._arrays(self.tuning.layout.own_copy(network)).items()
        }


class MaskedTunedOutsideStatistics(TunedOutsideStatistics, MaskedOutsideStatistics):
    """Variant of `TunedOutsideStatistics` in which the server learns only the sum of statistics."""


def outside_federation(
    blueprint: Blueprint, exchange: Exchange, *, masked_statistics: bool, masked_updates: bool
) -> OutsideFederation:
    """Return the engine for a blueprint.

    Args:
        blueprint: Description of the training.
        exchange: Function that passes a task to the clients.
        masked_statistics: True to hide the statistics of individual clients from the server.
        masked_updates: True to hide the updates of individual clients from the server while groups tune a network.

    Raises:
        InputError: If `masked_updates` is true but no network is tuned.
    """
    if blueprint.head is not None and blueprint.head.tuning is not None:
        tuned = MaskedTunedOutsideStatistics if masked_statistics else TunedOutsideStatistics
        return tuned(blueprint, exchange, masked_updates=masked_updates)
    if masked_updates:
        raise InputError(
            "masked_updates=True needs clients that tune a network with sifu.LoopClient (features.tune): leave it out"
        )
    if blueprint.head is None:
        return OutsideFederation(blueprint, exchange)
    return (MaskedOutsideStatistics if masked_statistics else OutsideStatistics)(blueprint, exchange)


def _array(reply: Any, name: str) -> NDArray[Any] | None:
    """Return a copy of an array in a reply, whose sender may change the original, or None if the array is missing."""
    array = reply.get(name) if isinstance(reply, Mapping) else None
    return np.array(array) if type(array) is np.ndarray else None


def _origin(reply: Any) -> Origin | None:
    """Return the origin of the statistics in a reply, or None if it cannot be read."""
    if not isinstance(reply, Mapping):
        return None
    samples, features, numbers = reply.get("samples"), reply.get(FEATURES), reply.get(NUMBERS)
    readable = type(samples) is int and isinstance(features, str) and isinstance(numbers, str)
    return Origin(samples, features, numbers) if readable else None  # type: ignore[arg-type]


def _read(reply: Any) -> tuple[Origin, Sent] | Reason:
    """Return the statistics or rows in a reply, or the reason why they are unreadable; values are not checked."""
    origin = _origin(reply)
    words, rows, targets = (_array(reply, name) for name in (WORDS, ROW_FEATURES, ROW_TARGETS))
    if origin is not None and words is not None:
        return origin, words
    if origin is not None and rows is not None and targets is not None:
        return origin, (rows, targets)
    return "not an array"


def _read_key(reply: Any) -> tuple[Origin, bytes] | Reason:
    """Return the origin of prepared statistics and the key of the round, or the reason why they are unreadable."""
    origin, key = _origin(reply), read_key(reply)
    return "not an array" if origin is None or key is None else (origin, key)
