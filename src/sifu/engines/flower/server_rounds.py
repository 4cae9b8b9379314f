"""Rounds on the server of a federation on Flower, of the whole federation or of several groups in the same messages.

No client is in two groups, so the members of all groups are asked at once and the answers sorted by group; what a group
makes of its answers is what it would make of them alone, bit for bit. S groups thus cost the time of one.

In open rounds the server sees every client's model (`sifu.engines.remote.OpenRound`). A round with fewer than
`min_replies` answers is dropped whole: it has no participants and leaves the model as it was.

`MaskedRound`: it learns who took part, the mean, and one number of each client. A client that is not ready in time was
absent from the round. From then on all are needed: the masks of those who are ready cancel only in the sum over all of
them, so a round in which one masked update is missing is dropped whole, and so is one in which an update does not fit
the range. A client whose drift does not arrive keeps its part of the round, and its drift is recorded as infinite: Psi
unbounded, never zero. Groups are not asked for drifts: their rounds are recorded by their models, and Psi begins after
the merge.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from sifu.core.engine import Rejection, RoundResult
from sifu.core.layout import ModelLayout
from sifu.core.replies import Reply
from sifu.core.round import Average, RoundSetup, run_round
from sifu.engines.flower.masking import FixedPoint
from sifu.engines.flower.messenger import ATTEMPTS, Messenger
from sifu.engines.flower.wire import (
    DRIFT_QUERY,
    MASKED_TRAIN,
    PREPARE,
    TRAIN,
    Ready,
    arrays_record,
    read_drift,
    read_masked,
    read_model,
    read_ready,
)
from sifu.engines.remote import OpenRound, RemoteFederation, RemoteRound
from sifu.errors import InputError
from sifu.theory.arrays import Floats, Words
from sifu.theory.participation import ClientIndices
from sifu.theory.rounding import norm_up, up

if TYPE_CHECKING:
    from flwr.app import Message


def run_together(
    engine: RemoteFederation, messenger: Messenger, setups: Sequence[RoundSetup], *, masked: bool, drifts: bool
) -> list[RoundResult]:
    """The round that each setup asks for, all of them at one place and of different clients.

    In masked rounds clients are asked for their drifts if `drifts`.
    """
    drawn, position = [engine.draw(setup) for setup in setups], setups[0].position
    everyone = sorted(int(client) for members in drawn for client in members)
    online = messenger.online(position, everyone) if everyone else {}
    there = [{client: online[client] for client in members.tolist() if client in online} for members in drawn]
    messages: dict[int, Message] = {}
    if masked:
        rounds = [MaskedRound(engine, messenger, *given, drifts) for given in zip(setups, there, strict=True)]
        for masked_round in rounds:
            messages |= masked_round.preparation()
        ready = messenger.ask(messages, read_ready, position, closing=True, groups=there)
        messages = {}
        for masked_round, members in zip(rounds, drawn, strict=True):
            if members.size:
                messages |= masked_round.settle(ready)
        size = engine.layout.size + 1
        words = messenger.ask(messages, lambda reply: read_masked(reply, size), position)
        results = []
        for masked_round, setup, members in zip(rounds, setups, drawn, strict=True):
            masked_round.add_up(words)
            results.append(run_round(masked_round, setup, members))
        return results
    for setup, nodes in zip(setups, there, strict=True):
        messages |= messenger.messages(nodes, messenger.record(setup.start), position, TRAIN)
    answers = messenger.ask(
        messages, lambda reply: read_model(reply, engine.layout), position, closing=True, groups=there
    )
    results = []
    for setup, members, nodes in zip(setups, drawn, there, strict=True):
        answered = [(client, *answers.pop(client)) for client in nodes if client in answers]
        replies = [Reply(client, position, samples, model, owned=True) for client, model, samples in answered]
        results.append(run_round(OpenRound(engine, replies), setup, members))
    return results


class MaskedRound(RemoteRound):
    """A round of masked updates: the server sees their sum."""

    def __init__(
        self,
        engine: RemoteFederation,
        messenger: Messenger,
        setup: RoundSetup,
        nodes: Mapping[int, int],
        wants_drifts: bool,
    ) -> None:
        super().__init__(engine)
        if setup.want_gram or setup.want_updates:
            raise InputError(
                "masked updates are not seen by the server: keep.gram_clients and keep.updates_every must be 0"
            )
        self._messenger, self._setup, self._nodes, self._wants_drifts = messenger, setup, nodes, wants_drifts
        self._fixed = FixedPoint.of(setup.start, max(1, sum(int(self.samples[client]) for client in nodes)))
        self._ready: dict[int, Ready] = {}
        self._total: Words | None = None
        self._numbers = {"reach-bits": self._fixed.reach_bits, "scale-bits": self._fixed.scale_bits}

    @property
    def participants(self) -> ClientIndices:
        """The clients that are ready, sorted."""
        return np.array(sorted(self._ready), dtype=np.int64)

    def preparation(self) -> dict[int, Message]:
        """Let everybody train, who then says how many samples it has and whether its update fits the range."""
        model = arrays_record(self.layout, self._setup.start)
        return self._messenger.messages(self._nodes, model, self._setup.position, PREPARE, more=self._numbers)

    def settle(self, answers: Mapping[int, Ready]) -> dict[int, Message]:
        """What those are sent who count: everybody's keys; nothing where the round was dropped.

        Only those count whose samples are those of their profile; an update that does not fit drops the round.
        """
        note, position, least = self._engine.note, self._setup.position, self._engine.least
        ready: dict[int, Ready] = {}
        for client in sorted(client for client in self._nodes if client in answers):
            said = answers[client]
            # Weights and all that is certified rest on the count of the profile.
            if said.samples == self.samples[client]:
                ready[client] = said
            else:
                note(position, client, f"it trained on {said.samples} samples, not on {self.samples[client]}")
        too_large = [client for client, said in ready.items() if not said.fits]
        for client in too_large:
            note(position, client, f"its update has entries beyond 2^{self._fixed.reach_bits}, or NaN")
        if too_large or len(ready) < least:
            reason = "one update does not fit the range" if too_large else f"{least} are needed"
            note(position, None, f"{len(ready)} of {len(self._nodes)} were ready, {reason}: the round was dropped")
            return {}
        self._ready = ready
        more = {**self._numbers, "clients": list(ready), "keys": [said.key for said in ready.values()]}
        nodes = {client: self._nodes[client] for client in ready}
        return self._messenger.messages(nodes, None, position, MASKED_TRAIN, more=more)

    def add_up(self, answers: Mapping[int, Words]) -> None:
        """Add up the masked updates that came from those who were ready; with one missing, the round is dropped."""
        sent = [answers[client] for client in self._ready if client in answers]
        if len(sent) < len(self._ready):
            dropped = f"{len(sent)} of {len(self._ready)} masked updates came: the round was dropped"
            self._engine.note(self._setup.position, None, dropped)
        elif sent:
            self._total = np.zeros(self.layout.size + 1, dtype=np.uint64)
            for words in sent:
                self._total += words

    def collect(self, setup: RoundSetup, drawn: ClientIndices) -> Words | None:
        """The sum of everybody's masked update; None if the round was dropped."""
        return self._total

    def gate(
        self, setup: RoundSetup, drawn: ClientIndices, collected: Words | None
    ) -> tuple[MaskedRound | None, tuple[Rejection, ...]]:
        """Who counts was settled before anything was sent."""
        return (None if collected is None else self), ()

    def average(self, setup: RoundSetup, accepted: MaskedRound) -> Average | None:
        """The mean of the masked updates, and every participant's own word for its drift."""
        assert self._total is not None  # the gate lets nothing else through
        participants, fixed = self.participants, self._fixed
        samples = self.samples[participants]
        mean = fixed.mean(self._total, int(samples.sum()), participants.size)
        if mean is None:
            dropped = "the masks do not cancel, or the sum is out of range: the round was dropped"
            self._engine.note(setup.position, None, dropped)
            return None
        step = _in_layout(mean, self.layout)
        drifts = np.full(participants.size, np.inf)
        if self._wants_drifts:
            drifts = self._drifts(setup.start.astype(np.float64) + step)
        error = fixed.error(self.layout.size, int(samples.sum()), participants.size)
        # Both worlds round to fixed point; the other one has fewer samples, and its range may be twice as wide.
        others = samples.sum() / (samples.sum() - samples.max())
        rounding = up(self.facts.server_rate * error * (1.0 + 2.0 * float(others)))
        return Average(step, drifts, up(norm_up(step) + error), None, (), rounding)

    def _drifts(self, mean: Floats) -> Floats:
        """Each participant's reported distance to the mean; infinite for those who report none."""
        # In float64 whatever the model is: rounded to float32 it would be another mean than the one that was added.
        record = arrays_record(ModelLayout(self.layout.names, self.layout.shapes, "float64"), mean)
        position = self._setup.position
        drifts: dict[int, float] = {}
        why: dict[int, str] = {}
        for attempt in range(ATTEMPTS):
            missing = {client: self._nodes[client] for client in self._ready if client not in drifts}
            if missing:
                if attempt:
                    time.sleep(self._messenger.patience.pause)
                messages = self._messenger.messages(missing, record, position, DRIFT_QUERY)
                answers, why = self._messenger.try_to_ask(messages, lambda reply: read_drift(reply, position))
                drifts |= answers
        for client in self._ready:
            if client not in drifts:
                unknown = f"its drift is unknown ({why.get(client, 'no answer')}): its Psi is unbounded from here on"
                self._engine.note(position, client, unknown)
        return np.array([drifts.get(client, np.inf) for client in self._ready], dtype=np.float64)


def _in_layout(vector: Floats, layout: ModelLayout) -> Floats:
    """A vector in the order of names, put into the order of the layout."""
    sizes = {name: int(np.prod(shape)) for name, shape in zip(layout.names, layout.shapes, strict=True)}
    ends = np.cumsum([sizes[name] for name in sorted(sizes)])
    parts = dict(zip(sorted(sizes), np.split(vector, ends[:-1]), strict=True))
    return np.concatenate([parts[name] for name in layout.names])
