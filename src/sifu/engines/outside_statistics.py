"""Engines for closed-form heads whose messages are passed on by the operator's own program.

Clients answer tasks with `sifu.engines.loop_client.LoopClient`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sifu.core.engine import Incident, Position, Reason
from sifu.core.operator_words import LOOP, unmasked_setting
from sifu.core.replies import printable
from sifu.engines.outside import NOTHING, Exchange, Kind, OutsideFederation
from sifu.engines.plans import FEATURES, KEY, MASKED, NUMBERS, ROW_FEATURES, ROW_TARGETS, WORDS, Origin, Sent
from sifu.engines.remote import Blueprint
from sifu.engines.remote_statistics import MaskedRemoteStatistics, RemoteStatistics
from sifu.theory.arrays import Words


class OutsideStatistics(RemoteStatistics, OutsideFederation):
    """`RemoteStatistics` for clients that only the operator's program can reach."""

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
        """Return the replies of `clients`; record which clients did not reply, and every other reply as refused."""
        asked = {self.clients[client].name: client for client in self.may_ask(clients)}
        found = self._ask(kind, position, dict.fromkeys(asked, NOTHING), more)
        for name in found.keys() - asked.keys():
            why = f"its reply was refused: {'not asked' if name in self.index_of else 'unknown client'}"
            self.incidents.append(Incident(position.branch, position.round, printable(name), why))
        replies = {client: found[name] for name, client in asked.items() if name in found}
        self._silent = (self._silent - set(asked.values())) | (set(asked.values()) - replies.keys())
        return replies


class MaskedOutsideStatistics(MaskedRemoteStatistics, OutsideStatistics):
    """`MaskedRemoteStatistics` for clients that only the operator's program can reach."""

    unmasked = unmasked_setting(LOOP)

    def _ask_keys(self, clients: Sequence[int], position: Position) -> dict[int, tuple[Origin, bytes] | Reason]:
        return {client: _read_key(reply) for client, reply in self._request("prepare", clients, position).items()}

    def _ask_masked(self, keys: Mapping[int, bytes], position: Position, total: Words) -> list[int]:
        public = {"clients": list(keys), "keys": [key.hex() for key in keys.values()]}
        came = []
        for client, words in self._masked_words(
            position, self._request("masked", list(keys), position, public), total.size
        ):
            total += words
            came.append(client)
        self._silent |= keys.keys() - set(came)
        return came

    def _masked_words(self, position: Position, replies: Mapping[int, Any], size: int) -> Iterator[tuple[int, Words]]:
        """Yield each client with a copy of its masked words; record an incident if a reply does not hold `size`."""
        for client, reply in replies.items():
            words = reply.get(MASKED) if isinstance(reply, Mapping) else None
            if type(words) is np.ndarray and words.dtype == np.uint64 and words.shape == (size,):
                yield client, np.array(words)
            else:
                self.note(position, client, f"its reply was refused: not {size} masked words")


def outside_federation(blueprint: Blueprint, exchange: Exchange, *, masked_statistics: bool) -> OutsideFederation:
    """Return the engine for a blueprint; if `masked_statistics`, the server sees no single client's statistics."""
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
    origin = _origin(reply)
    try:
        key = bytes.fromhex(reply[KEY])
    except (TypeError, KeyError, ValueError):
        key = b""
    return (origin, key) if origin is not None and len(key) == 32 else "not an array"
