"""Engine of a server loop whose clients send masked updates while groups tune a network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from sifu.core.engine import Position, RoundResult
from sifu.core.round import RoundSetup, run_round
from sifu.engines.masked_updates import MaskedRound, Ready, masked_facts
from sifu.engines.outside import NOTHING, Arrays, Exchange, OutsideFederation
from sifu.engines.plans import KEY, MASKED
from sifu.engines.remote import Blueprint
from sifu.theory.arrays import Words
from sifu.theory.facts import LEAST_MASKED


class MaskedOutsideFederation(OutsideFederation):
    """Variant of `OutsideFederation` that sees the mean of a group's updates but no single update."""

    least = LEAST_MASKED

    def __init__(self, blueprint: Blueprint, exchange: Exchange) -> None:
        super().__init__(blueprint, exchange, masked_facts(blueprint, blueprint.facts, "masked_updates=False"))

    def run_together(self, setups: Sequence[RoundSetup], *, separate: bool) -> list[RoundResult]:
        """Run the rounds of all setups in two tasks; a round is dropped if a ready client sends no update."""
        position, drawn = setups[0].position, [self.draw(setup) for setup in setups]
        rounds: list[MaskedRound] = []
        models: dict[int, Arrays] = {}
        numbers: dict[int, Mapping[str, Any]] = {}
        for setup, members in zip(setups, drawn, strict=True):
            asked = self.may_ask(members)
            rounds.append(MaskedRound(self, setup, asked))
            models |= dict.fromkeys(asked, self._arrays(setup.start))
            numbers |= dict.fromkeys(asked, rounds[-1].numbers)
        ready = {}
        for client, reply in self._replies("prepare_train", position, models, numbers).items():
            if (said := read_ready(reply)) is None:
                self.note(position, client, "its reply was refused: no samples, range and key")
            else:
                ready[client] = said
        keys: dict[int, Mapping[str, Any]] = {}
        for masked_round, members in zip(rounds, drawn, strict=True):
            settled = masked_round.settle(ready) if members.size else {}
            keys |= dict.fromkeys(settled, named_keys(settled))
        replies = self._replies("masked_train", position, dict.fromkeys(keys, NOTHING), keys)
        words = dict(masked_words(self, position, replies, self.layout.size + 1))
        results = []
        for masked_round, setup, members in zip(rounds, setups, drawn, strict=True):
            masked_round.add_up(words)
            results.append(run_round(masked_round, setup, members))
        self._check_lost(results, asked=bool(models))
        return results


def read_ready(reply: Any) -> Ready | None:
    """Return the reply of a client that has trained for a masked round, or None if it cannot be read."""
    if not isinstance(reply, Mapping) or type(reply.get("samples")) is not int:
        return None
    key = read_key(reply)
    return None if key is None else Ready(reply["samples"], reply.get("fits") is True, key)


def read_key(reply: Any) -> bytes | None:
    """Return the 32-byte key for a masked sum in a reply, or None if the reply has no valid key."""
    try:
        key = bytes.fromhex(reply[KEY])
    except (TypeError, KeyError, ValueError):
        return None
    return key if len(key) == 32 else None


def named_keys(keys: Mapping[int, bytes]) -> dict[str, Any]:
    """Return the participants and their keys as plain values, for the instructions of every participant."""
    return {"clients": list(keys), "keys": [key.hex() for key in keys.values()]}


def masked_words(
    engine: OutsideFederation, position: Position, replies: Mapping[int, Any], size: int
) -> Iterator[tuple[int, Words]]:
    """Yield each client with a copy of its masked words; record an incident if a reply does not hold `size` words."""
    for client, reply in replies.items():
        words = reply.get(MASKED) if isinstance(reply, Mapping) else None
        if type(words) is np.ndarray and words.dtype == np.uint64 and words.shape == (size,):
            yield client, np.array(words)
        else:
            engine.note(position, client, f"its reply was refused: not {size} masked words")
