"""Rounds of masked updates over any transport: the number format, and the computations of client and server.

The server learns the participants and the mean of their updates (docs/theory.md, section 11). A client that is not
ready in time counts as absent. From then on every ready client is needed, because the masks cancel only in the sum over
all of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sifu.core.engine import Rejection
from sifu.core.layout import ModelLayout, Vector
from sifu.core.round import Average, RoundSetup
from sifu.engines.masks import in_order, refused_keys
from sifu.engines.plans import Arrays
from sifu.engines.remote import Blueprint, RemoteFederation, RemoteRound
from sifu.errors import InputError
from sifu.theory.arrays import Floats, Words
from sifu.theory.facts import DROPPED_MASKED_ROUND, TrainingFacts
from sifu.theory.participation import ClientIndices
from sifu.theory.rounding import norm_up, up

HEADROOM_BITS = 10
"""Headroom in doublings: an update's entries may reach 2^10 times max(1, largest parameter of the starting model)."""
SUM_BITS = 61
"""Number of bits for the sum of all participants' scaled updates, without its sign."""


@dataclass(frozen=True)
class FixedPoint:
    """Fixed-point format of updates: absolute values up to 2^`reach_bits`, in units of 2^-`scale_bits`."""

    reach_bits: int
    scale_bits: int

    @staticmethod
    def of(start: Vector, total_samples: int) -> FixedPoint:
        """Return the format of a round, given its starting model and the number of samples of all participants.

        >>> FixedPoint.of(np.array([0.5, -3.0]), 1000)
        FixedPoint(reach_bits=12, scale_bits=39)
        """
        largest = float(np.max(np.abs(start), initial=1.0))
        if not math.isfinite(largest) or total_samples < 1:
            raise InputError(f"no range fits a model with the value {largest} and {total_samples} samples")
        reach = math.ceil(math.log2(max(1.0, largest))) + HEADROOM_BITS
        return FixedPoint(reach, SUM_BITS - reach - math.ceil(math.log2(total_samples)))

    def words(self, update: Vector, samples: int) -> Words | None:
        """Return round(2^`scale_bits` `samples` update) modulo 2^64, followed by a 1 that counts the summands.

        An update with an entry that is NaN or out of range gives None.
        """
        if not np.max(np.abs(update), initial=0.0) <= 2.0**self.reach_bits:  # NaN fails every comparison
            return None
        scaled = np.rint(np.ldexp(samples * update.astype(np.float64), self.scale_bits))
        return np.append(scaled.astype(np.int64).view(np.uint64), np.uint64(1))

    def mean(self, total: Words, total_samples: int, participants: int) -> Floats | None:
        """Return the mean update from a sum of masked words, or None if these participants' updates cannot have it."""
        signed = total.view(np.int64)
        entries = signed[:-1]
        limit = 2 ** (self.reach_bits + self.scale_bits) * total_samples + participants
        if signed[-1] != participants or not (-limit <= entries.min(initial=0) and entries.max(initial=0) <= limit):
            return None
        return np.ldexp(entries.astype(np.float64), -self.scale_bits) / total_samples

    def error(self, size: int, total_samples: int, participants: int) -> float:
        """Return a bound on the norm of the mean's error: each participant rounds an entry by at most half a unit."""
        return math.sqrt(size) * participants * 2.0 ** (-self.scale_bits - 1) / total_samples


@dataclass(frozen=True)
class Ready:
    """Reply of a client ready for a masked round: number of samples, whether its update fits the range, and key."""

    samples: int
    fits: bool
    key: bytes


def prepared_update(
    start: Arrays, trained: Arrays, samples: int, numbers: Mapping[str, Any]
) -> tuple[Vector, Words | None]:
    """Return a client's trained parameters in the order of their names, and the words of its update.

    The words are None if the update does not fit the range. `numbers` is the server's format (`MaskedRound.numbers`).

    Raises:
        InputError: If training changed the number of parameters.
    """
    fixed = FixedPoint(int(numbers["reach-bits"]), int(numbers["scale-bits"]))
    before, local = in_order(start), in_order(trained)
    if local.shape != before.shape:
        raise InputError(f"training returned {local.size} parameters, but the model has {before.size}")
    update = local.astype(np.float64) - before.astype(np.float64)
    return local, fixed.words(update, samples)


def masked_facts(blueprint: Blueprint, facts: TrainingFacts, unmasked: str) -> TrainingFacts:
    """Return the facts of training with masked updates.

    Raises:
        InputError: If the training needs the updates of individual clients, or has parameters that cannot be masked.
    """
    if blueprint.carried:
        raise InputError(
            f"{', '.join(blueprint.carried)} hold integers, which cannot be masked: leave them out of the exchanged "
            f"parameters, or set {unmasked}"
        )
    if blueprint.replies.update_bound:
        raise InputError(f"server.update_bound needs the update of each client: set {unmasked}")
    # The fixed-point range may differ in the counterfactual, so no rounding allowance is claimed as proven.
    return replace(facts, outside=(*facts.outside, DROPPED_MASKED_ROUND), rounding_bounded=False)


class MaskedRound(RemoteRound):
    """Round of masked updates, of which the server sees only the sum."""

    def __init__(self, engine: RemoteFederation, setup: RoundSetup, asked: Collection[int]) -> None:
        super().__init__(engine)
        self._setup, self._asked = setup, asked
        self._fixed = FixedPoint.of(setup.start, max(1, sum(int(self.samples[client]) for client in asked)))
        self.numbers = {"reach-bits": self._fixed.reach_bits, "scale-bits": self._fixed.scale_bits}
        self._ready: dict[int, bytes] = {}
        self._total: Words | None = None

    @property
    def participants(self) -> ClientIndices:
        """Indices of the clients that are ready, sorted."""
        return np.array(sorted(self._ready), dtype=np.int64)

    def settle(self, answers: Mapping[int, Ready]) -> dict[int, bytes]:
        """Determine the participants and return their keys by client; return no keys if the round is dropped.

        A client takes part if its number of samples matches its profile and its key is valid and unique. The round is
        dropped if an update does not fit the range or if there are too few participants.
        """
        note, position, least = self._engine.note, self._setup.position, self._engine.least
        ready: dict[int, Ready] = {}
        for client in sorted(client for client in self._asked if client in answers):
            said = answers[client]
            # Weights and certificates rely on the number of samples in the profile.
            if said.samples == self.samples[client]:
                ready[client] = said
            else:
                note(position, client, f"it trained on {said.samples} samples, not on {self.samples[client]}")
        for client in refused_keys({client: said.key for client, said in ready.items()}):
            note(position, client, "its key is invalid or repeated")
            del ready[client]
        too_large = [client for client, said in ready.items() if not said.fits]
        for client in too_large:
            note(position, client, f"its update has entries beyond 2^{self._fixed.reach_bits}, or NaN")
        if too_large or len(ready) < least:
            reason = "one update does not fit the range" if too_large else f"{least} are needed"
            note(position, None, f"{len(ready)} of {len(self._asked)} were ready, {reason}: the round was dropped")
            return {}
        self._ready = {client: said.key for client, said in ready.items()}
        return self._ready

    def add_up(self, answers: Mapping[int, Words]) -> None:
        """Sum the masked updates of all ready clients; drop the round if one is missing."""
        sent = [answers[client] for client in self._ready if client in answers]
        if len(sent) < len(self._ready):
            dropped = f"{len(sent)} of {len(self._ready)} masked updates arrived: the round was dropped"
            self._engine.note(self._setup.position, None, dropped)
        elif sent:
            self._total = np.zeros(self.layout.size + 1, dtype=np.uint64)
            for words in sent:
                self._total += words

    def collect(self, setup: RoundSetup, drawn: ClientIndices) -> Words | None:
        """Return the sum of the masked updates, or None if the round was dropped."""
        return self._total

    def gate(
        self, setup: RoundSetup, drawn: ClientIndices, collected: Words | None
    ) -> tuple[MaskedRound | None, tuple[Rejection, ...]]:
        """Accept the sum, if there is one; `settle` has checked the participants."""
        return (None if collected is None else self), ()

    def average(self, setup: RoundSetup, accepted: MaskedRound) -> Average | None:
        """Return the mean of the masked updates and each participant's drift, or None if the round is dropped."""
        assert self._total is not None  # `gate` guarantees this
        participants, fixed = self.participants, self._fixed
        samples = self.samples[participants]
        mean = fixed.mean(self._total, int(samples.sum()), participants.size)
        if mean is None:
            dropped = "the masks do not cancel, or the sum is out of range: the round was dropped"
            self._engine.note(setup.position, None, dropped)
            return None
        step = _in_layout(mean, self.layout)
        drifts = self._drifts(setup.start.astype(np.float64) + step)
        error = fixed.error(self.layout.size, int(samples.sum()), participants.size)
        # Both models have rounding errors; the counterfactual has fewer samples, and its range may be twice as wide.
        others = samples.sum() / (samples.sum() - samples.max())
        rounding = up(error * (1.0 + 2.0 * float(others)))
        return Average(step, drifts, up(norm_up(step) + error), (), rounding)

    def _drifts(self, mean: Floats) -> Floats:
        """Return an infinite drift for each participant, because this class does not ask clients for their drifts."""
        return np.full(len(self._ready), np.inf)


def _in_layout(vector: Floats, layout: ModelLayout) -> Floats:
    """Reorder a vector from the order of sorted names to the order of the layout."""
    sizes = {name: int(np.prod(shape)) for name, shape in zip(layout.names, layout.shapes, strict=True)}
    ends = np.cumsum([sizes[name] for name in sorted(sizes)])
    parts = dict(zip(sorted(sizes), np.split(vector, ends[:-1]), strict=True))
    return np.concatenate([parts[name] for name in layout.names])
