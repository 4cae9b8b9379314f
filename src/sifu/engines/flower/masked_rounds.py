"""The server's side of a masked round: it learns who took part, the mean, and one number of each client.

Whoever is not ready in time was absent from the round. From then on everybody is needed: the masks of those who are
ready cancel only in the sum over all of them, so a round in which one masked update is missing is dropped whole, and so
is one in which an update does not fit the range. A client whose drift does not arrive keeps its part of the round, and
its drift is recorded as infinite: Psi unbounded, never zero.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sifu.core.engine import Position
from sifu.core.layout import ModelLayout, Vector
from sifu.engines.flower.exchange import Exchange
from sifu.engines.flower.masking import LEAST_PARTICIPANTS, FixedPoint
from sifu.engines.flower.wire import (
    DRIFT_QUERY,
    MASKED_TRAIN,
    PREPARE,
    Ready,
    arrays_record,
    read_drift,
    read_masked,
    read_ready,
)
from sifu.theory.arrays import Floats, Integers, Words

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, Message

OUTSIDE = "dropping a masked round in which one client fails"
"""Without that client the round would have counted, so clients are coupled: certificates name it as assumed."""
ATTEMPTS = 3
"""How often a client is asked for its drift."""

Compose = Callable[["ArrayRecord | None", int, str, Mapping[str, Any]], "Message"]
"""Makes the message of a kind for a client: model, client, kind, more of its config."""
Note = Callable[[int | None, str], None]
"""Records what went wrong with a client, or with the round."""


@dataclass(frozen=True)
class MaskedRound:
    """What came of a round: the mean update, and every participant's drift (infinite where unknown)."""

    participants: Integers
    step: Floats
    drifts: Floats
    error: float


def masked_round(
    exchange: Exchange,
    layout: ModelLayout,
    start: Vector,
    position: Position,
    clients: Mapping[int, int],
    compose: Compose,
    note: Note,
    *,
    timeout: float,
    pause: float,
    least: int,
) -> MaskedRound | None:
    """One masked round among `clients` (their samples by number); None if it was dropped."""
    fixed = FixedPoint.of(start, max(1, sum(clients.values())))
    numbers = {"reach-bits": fixed.reach_bits, "scale-bits": fixed.scale_bits}
    model = arrays_record(layout, start)
    asked = {one: compose(model, one, PREPARE, numbers) for one in sorted(clients)}
    ready, failed = exchange.ask(asked, timeout, read_ready)
    for client, why in sorted(failed.items()):
        note(client, why)
    for client, one in sorted(ready.items()):
        if one.samples != clients[client]:  # weights and all that is certified rest on the count of the profile
            note(client, f"it trained on {one.samples} samples, not on {clients[client]}")
    ready = {client: one for client, one in ready.items() if one.samples == clients[client]}
    too_large = sorted(client for client, one in ready.items() if not one.fits)
    for client in too_large:
        note(client, f"its update has entries beyond 2^{fixed.reach_bits}, or NaN")
    needed = max(least, LEAST_PARTICIPANTS)
    if too_large or len(ready) < needed:
        reason = "one update does not fit the range" if too_large else f"{needed} are needed"
        note(None, f"{len(ready)} of {len(clients)} were ready, {reason}: the round was dropped")
        return None
    total = _sum(exchange, layout, ready, compose, note, numbers, timeout)
    if total is None:
        return None
    participants = np.array(sorted(ready), dtype=np.int64)
    samples = sum(ready[int(one)].samples for one in participants)
    mean = fixed.mean(total, samples, participants.size)
    if mean is None:
        note(None, "the masks do not cancel, or the sum is out of range: the round was dropped")
        return None
    step = _in_layout(mean, layout)
    drifts = _drifts(exchange, layout, start.astype(np.float64) + step, position, participants, compose, note, timeout,
                     pause)  # fmt: skip
    return MaskedRound(participants, step, drifts, fixed.error(layout.size, samples, participants.size))


def _sum(
    exchange: Exchange,
    layout: ModelLayout,
    ready: Mapping[int, Ready],
    compose: Compose,
    note: Note,
    numbers: Mapping[str, Any],
    timeout: float,
) -> Words | None:
    """The sum of everybody's masked update; None if one is missing."""
    order = sorted(ready)
    more = {**numbers, "clients": order, "keys": [ready[one].key for one in order]}
    messages = {one: compose(None, one, MASKED_TRAIN, more) for one in order}
    answers, failed = exchange.ask(messages, timeout, lambda reply: read_masked(reply, layout.size + 1))
    for client, why in sorted(failed.items()):
        note(client, why)
    if failed:
        note(None, f"{len(answers)} of {len(order)} masked updates came: the round was dropped")
        return None
    total = np.zeros(layout.size + 1, dtype=np.uint64)
    for words in answers.values():
        total += words
    return total


def _drifts(
    exchange: Exchange,
    layout: ModelLayout,
    mean: Floats,
    position: Position,
    participants: Integers,
    compose: Compose,
    note: Note,
    timeout: float,
    pause: float,
) -> Floats:
    """What each participant says of its distance to the mean; infinite for whoever does not say."""
    # In float64 whatever the model is: rounded to float32 it would be another mean than the one that was added.
    record = arrays_record(ModelLayout(layout.names, layout.shapes, "float64"), mean)
    found: dict[int, float] = {}
    why: dict[int, str] = {}
    for attempt in range(ATTEMPTS):
        missing = [int(one) for one in participants if int(one) not in found]
        if missing:
            if attempt:
                time.sleep(pause)
            messages = {one: compose(record, one, DRIFT_QUERY, {}) for one in missing}
            answers, why = exchange.ask(messages, timeout, lambda reply: read_drift(reply, position))
            found |= answers
    for client in (int(one) for one in participants if int(one) not in found):
        note(client, f"its drift is unknown ({why.get(client, 'no answer')}): its Psi is unbounded from here on")
    return np.array([found.get(int(one), np.inf) for one in participants], dtype=np.float64)


def _in_layout(vector: Floats, layout: ModelLayout) -> Floats:
    """A vector in the order of names, put into the order of the layout."""
    sizes = {name: int(np.prod(shape)) for name, shape in zip(layout.names, layout.shapes, strict=True)}
    parts, first = {}, 0
    for name in sorted(sizes):
        parts[name] = vector[first : first + sizes[name]]
        first += sizes[name]
    return np.concatenate([parts[name] for name in layout.names])
