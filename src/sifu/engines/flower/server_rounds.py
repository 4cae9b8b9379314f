"""The steps of a round on the server of a federation on Flower.

`OpenRound`: the server sees every client's model, checks each reply, and averages those that may be used. A round with
fewer than `min_replies` answers is dropped whole: it has no participants and leaves the model as it was.

`MaskedRound`: it learns who took part, the mean, and one number of each client. A client that is not ready in time was
absent from the round. From then on all are needed: the masks of those who are ready cancel only in the sum over all of
them, so a round in which one masked update is missing is dropped whole, and so is one in which an update does not fit
the range. A client whose drift does not arrive keeps its part of the round, and its drift is recorded as infinite: Psi
unbounded, never zero.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from sifu.core.engine import Rejection, RoundResult
from sifu.core.layout import ModelLayout
from sifu.core.replies import Reply
from sifu.core.round import AcceptedModels, Average, RoundSetup, gate_replies, run_round
from sifu.engines.flower.averaging import average_replies
from sifu.engines.flower.masking import FixedPoint
from sifu.engines.flower.messenger import ATTEMPTS, Messenger
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
from sifu.errors import InputError
from sifu.theory.arrays import Floats, Integers, Words
from sifu.theory.facts import DROPPED_MASKED_ROUND, LEAST_MASKED, ClientProfile, TrainingFacts
from sifu.theory.participation import ClientIndices, base_key
from sifu.theory.rounding import norm_up, up

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, Message

OUTSIDE = DROPPED_MASKED_ROUND
"""Without that client the round would have counted, so clients are coupled: certificates name it as assumed."""


class FlowerRound:
    """What every round on Flower knows: whom it speaks with and how participants are drawn."""

    def __init__(self, messenger: Messenger, facts: TrainingFacts) -> None:
        self._messenger, self.facts = messenger, facts
        self.participation_key = base_key(messenger.blueprint.seed, "participation")

    def run(self, setup: RoundSetup) -> RoundResult:
        """The whole round, by the steps of the class."""
        steps: Any = self
        return run_round(steps, setup)

    @property
    def layout(self) -> ModelLayout:
        """Names and shapes of the parameters."""
        return self._messenger.blueprint.layout

    @property
    def clients(self) -> tuple[ClientProfile, ...]:
        """Every known client."""
        return self._messenger.blueprint.clients

    @property
    def samples(self) -> Integers:
        """|D_i| of every known client."""
        return self._messenger.samples

    @property
    def least(self) -> int:
        """How many answers a round needs to count."""
        return max(self._messenger.patience.min_replies, 1)


class OpenRound(FlowerRound):
    """A round of models that the server sees one by one."""

    def collect(self, setup: RoundSetup, drawn: ClientIndices) -> list[Reply]:
        """What those answered whose node is there."""
        answers = self._messenger.train(setup.start, setup.position, drawn)
        return [Reply(client, setup.position, count, vector, owned=True) for client, (vector, count) in answers.items()]

    def gate(
        self, setup: RoundSetup, drawn: ClientIndices, collected: list[Reply]
    ) -> tuple[AcceptedModels | None, tuple[Rejection, ...]]:
        """Check every reply; too few that can be used drop the round."""
        messenger, rules = self._messenger, self._messenger.blueprint.replies
        look_together = messenger.blueprint.clipping is None and not rules.update_bound
        accepted, rejections = gate_replies(
            self,
            setup,
            drawn,
            collected,
            rules,
            messenger.left_out,
            partial(self._average_models, setup) if look_together else None,
        )
        count = 0 if accepted is None else accepted.participants.size
        if count < self.least:
            messenger.note(setup.position, None, f"{count} of {drawn.size} answered: the round was dropped")
            return None, rejections
        return accepted, rejections

    def average(self, setup: RoundSetup, accepted: AcceptedModels) -> Average:
        """One walk over the replies gives their mean and every drift."""
        blueprint, participants = self._messenger.blueprint, accepted.participants
        samples, start = self.samples[participants], setup.start
        rounding = blueprint.rounding(norm_up(start), participants) if blueprint.rounding else 0.0
        if blueprint.clipping:
            updates = np.stack(accepted.models) - start
            average = blueprint.clipping.average(updates, setup.position, participants, samples, setup.want_gram)
        else:
            average = accepted.average or self._average_models(setup, accepted)
            if setup.want_updates:
                average = replace(average, updates=np.stack(accepted.models) - start)
        return replace(average, rounding=rounding)

    def _average_models(self, setup: RoundSetup, accepted: AcceptedModels) -> Average:
        return average_replies(accepted.models, setup.start, self.samples[accepted.participants], setup.want_gram)


@dataclass(frozen=True)
class Prepared:
    """Who has trained and is ready to send a masked update, at which of the nodes that were asked."""

    nodes: Mapping[int, int]
    fixed: FixedPoint
    ready: Mapping[int, Ready]

    @property
    def participants(self) -> ClientIndices:
        """The clients that are ready, sorted."""
        return np.array(sorted(self.ready), dtype=np.int64)

    @property
    def numbers(self) -> dict[str, int]:
        """The range of fixed-point numbers, as every message says it."""
        return {"reach-bits": self.fixed.reach_bits, "scale-bits": self.fixed.scale_bits}


class MaskedRound(FlowerRound):
    """A round of masked updates: the server sees their sum."""

    @property
    def least(self) -> int:
        """How many answers a round needs to count."""
        return max(super().least, LEAST_MASKED)

    def collect(self, setup: RoundSetup, drawn: ClientIndices) -> Prepared:
        """Let everybody train, who then says how many samples it has and whether its update fits the range."""
        if setup.want_gram or setup.want_updates:
            raise InputError(
                "masked updates are not seen by the server: keep.gram_clients and keep.updates_every must be 0"
            )
        prepared, messages = self.preparation(setup, self._messenger.online(setup.position, drawn))
        return replace(prepared, ready=self._messenger.ask(messages, read_ready, setup.position, closing=True))

    def preparation(self, setup: RoundSetup, nodes: Mapping[int, int]) -> tuple[Prepared, dict[int, Message]]:
        """A round of the clients at these nodes, none of them ready yet, and what each of them is sent."""
        samples = sum(int(self.samples[client]) for client in nodes)
        prepared = Prepared(nodes, FixedPoint.of(setup.start, max(1, samples)), {})
        model = arrays_record(self.layout, setup.start)
        return prepared, self._messages(nodes, model, setup, prepared, PREPARE, prepared.numbers)

    def gate(
        self, setup: RoundSetup, drawn: ClientIndices, collected: Prepared
    ) -> tuple[Prepared | None, tuple[Rejection, ...]]:
        """Only those count whose samples are those of their profile; an update that does not fit drops the round."""
        note, position = self._messenger.note, setup.position
        ready: dict[int, Ready] = {}
        for client, said in sorted(collected.ready.items()):
            # Weights and all that is certified rest on the count of the profile.
            if said.samples == self.samples[client]:
                ready[client] = said
            else:
                note(position, client, f"it trained on {said.samples} samples, not on {self.samples[client]}")
        too_large = [client for client, said in ready.items() if not said.fits]
        for client in too_large:
            note(position, client, f"its update has entries beyond 2^{collected.fixed.reach_bits}, or NaN")
        if too_large or len(ready) < self.least:
            reason = "one update does not fit the range" if too_large else f"{self.least} are needed"
            note(position, None, f"{len(ready)} of {len(collected.nodes)} were ready, {reason}: the round was dropped")
            return None, ()
        return replace(collected, ready=ready), ()

    def average(self, setup: RoundSetup, accepted: Prepared) -> Average | None:
        """The mean of the masked updates, and every participant's own word for its drift."""
        total = self._sum(setup, accepted)
        if total is None:
            return None
        participants, fixed = accepted.participants, accepted.fixed
        samples = self.samples[participants]
        mean = fixed.mean(total, int(samples.sum()), participants.size)
        if mean is None:
            dropped = "the masks do not cancel, or the sum is out of range: the round was dropped"
            self._messenger.note(setup.position, None, dropped)
            return None
        step = _in_layout(mean, self.layout)
        drifts = self._drifts(setup, accepted, setup.start.astype(np.float64) + step)
        error = fixed.error(self.layout.size, int(samples.sum()), participants.size)
        # Both worlds round to fixed point; the other one has fewer samples, and its range may be twice as wide.
        others = samples.sum() / (samples.sum() - samples.max())
        rounding = up(self.facts.server_rate * error * (1.0 + 2.0 * float(others)))
        return Average(step, drifts, up(norm_up(step) + error), None, (), rounding)

    def _sum(self, setup: RoundSetup, accepted: Prepared) -> Words | None:
        """The sum of everybody's masked update; None if one is missing."""
        messages, size = self.masked_messages(setup, accepted), self.layout.size + 1
        answers = self._messenger.ask(messages, lambda reply: read_masked(reply, size), setup.position)
        return self.total(setup, accepted, answers)

    def masked_messages(self, setup: RoundSetup, accepted: Prepared) -> dict[int, Message]:
        """What those who are ready are sent: everybody's keys."""
        clients = sorted(accepted.ready)
        more = {**accepted.numbers, "clients": clients, "keys": [accepted.ready[client].key for client in clients]}
        return self._messages(clients, None, setup, accepted, MASKED_TRAIN, more)

    def total(self, setup: RoundSetup, accepted: Prepared, answers: Mapping[int, Words]) -> Words | None:
        """The sum of the masked updates that came from those who were ready; None if one is missing."""
        clients = sorted(accepted.ready)
        sent = [answers[client] for client in clients if client in answers]
        if len(sent) < len(clients):
            dropped = f"{len(sent)} of {len(clients)} masked updates came: the round was dropped"
            self._messenger.note(setup.position, None, dropped)
            return None
        total = np.zeros(self.layout.size + 1, dtype=np.uint64)
        for words in sent:
            total += words
        return total

    def _drifts(self, setup: RoundSetup, accepted: Prepared, mean: Floats) -> Floats:
        """Each participant's reported distance to the mean; infinite for those who report none."""
        # In float64 whatever the model is: rounded to float32 it would be another mean than the one that was added.
        record = arrays_record(ModelLayout(self.layout.names, self.layout.shapes, "float64"), mean)
        clients, position = sorted(accepted.ready), setup.position
        drifts: dict[int, float] = {}
        why: dict[int, str] = {}
        for attempt in range(ATTEMPTS):
            missing = [client for client in clients if client not in drifts]
            if missing:
                if attempt:
                    time.sleep(self._messenger.patience.pause)
                messages = self._messages(missing, record, setup, accepted, DRIFT_QUERY, {})
                answers, why = self._messenger.try_to_ask(messages, lambda reply: read_drift(reply, position))
                drifts |= answers
        for client in clients:
            if client not in drifts:
                unknown = f"its drift is unknown ({why.get(client, 'no answer')}): its Psi is unbounded from here on"
                self._messenger.note(position, client, unknown)
        return np.array([drifts.get(client, np.inf) for client in clients], dtype=np.float64)

    def _messages(
        self,
        clients: Iterable[int],
        record: ArrayRecord | None,
        setup: RoundSetup,
        prepared: Prepared,
        kind: str,
        more: Mapping[str, Any],
    ) -> dict[int, Message]:
        return {
            client: self._messenger.message(record, setup.position, client, prepared.nodes[client], kind, more=more)
            for client in clients
        }


def _in_layout(vector: Floats, layout: ModelLayout) -> Floats:
    """A vector in the order of names, put into the order of the layout."""
    sizes = {name: int(np.prod(shape)) for name, shape in zip(layout.names, layout.shapes, strict=True)}
    parts, first = {}, 0
    for name in sorted(sizes):
        parts[name] = vector[first : first + sizes[name]]
        first += sizes[name]
    return np.concatenate([parts[name] for name in layout.names])
