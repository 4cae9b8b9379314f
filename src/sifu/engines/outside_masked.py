"""Engine of a server loop whose clients send masked updates while groups tune a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sifu.core.engine import RoundResult
from sifu.core.round import RoundSetup, run_round
from sifu.engines.masked_updates import MaskedRound, Ready, masked_facts
from sifu.engines.outside import NOTHING, Arrays, Exchange, OutsideFederation
from sifu.engines.plans import KEY, MASKED
from sifu.engines.remote import Blueprint
from sifu.theory.arrays import Words
from sifu.theory.facts import LEAST_MASKED


class MaskedOutsideFederation(OutsideFederation):
    """An `OutsideFederation` that sees the mean of a group's updates but no single update."""

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
            more = {"clients": list(settled), "keys": [key.hex() for key in settled.values()]}
            keys |= dict.fromkeys(settled, more)
        words = {}
        for client, reply in self._replies("masked_train", position, dict.fromkeys(keys, NOTHING), keys).items():
            if (sent := read_masked(reply, self.layout.size + 1)) is None:
                self.note(position, client, f"its reply was refused: not {self.layout.size + 1} masked words")
            else:
                words[client] = sent
        results = []
        for masked_round, setup, members in zip(rounds, setups, drawn, strict=True):
            masked_round.add_up(words)
            results.append(run_round(masked_round, setup, members))
        self._count_lost(results, asked=bool(models))
        return results


def read_ready(reply: Any) -> Ready | None:
    """Return the reply of a client that has trained for a masked round; None if it cannot be read."""
    if not isinstance(reply, Mapping) or type(reply.get("samples")) is not int:
        return None
    key = read_key(reply)
    return None if key is None else Ready(reply["samples"], reply.get("fits") is True, key)


def read_key(reply: Any) -> bytes | None:
    """Return the 32-byte key for a masked sum in a reply; None if it has none."""
    try:
        key = bytes.fromhex(reply[KEY])
    except (TypeError, KeyError, ValueError):
        return None
    return key if len(key) == 32 else None


def read_masked(reply: Any, size: int) -> Words | None:
    """Return a copy of the masked words in a reply; None if there are not `size` of them."""
    words = reply.get(MASKED) if isinstance(reply, Mapping) else None
    usable = type(words) is np.ndarray and words.dtype == np.uint64 and words.shape == (size,)
    return np.array(words) if usable else None
