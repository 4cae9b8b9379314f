"""Flower engine: rounds over a `Grid`, with the same protocol as the embedded simulator.

A round draws its participants with the same keys as every engine, asks the drawn clients whose node is connected, and
averages the replies that arrive in time (`sifu.core.round`). A round with fewer than `min_replies` replies is dropped:
it has no participants and leaves the model unchanged.

No client belongs to two groups, so the members of all groups are asked at once and the replies are sorted by group.
Several groups thus take about as long as one, and each group's result is, bit for bit, the same as if it trained alone.

In an `OpenRound` the server sees every client's model. In a `MaskedRound` it learns the participants, the mean, and one
number from each client, its drift. A client whose drift does not arrive remains a participant, and its drift is
recorded as infinite: its Psi is unbounded, never zero. Members of separate groups are not asked for drifts, because Psi
begins after the groups' models are merged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from sifu.core.engine import Evaluation, Position, RoundResult
from sifu.core.layout import ModelLayout, Vector
from sifu.core.replies import Reply
from sifu.core.round import RoundSetup, run_round
from sifu.core.round_stream import RoundsWanted, RunsAhead, StreamedRound, rounds_one_by_one
from sifu.engines.flower.checkpoints_of_nodes import ShownCheckpoint
from sifu.engines.flower.exchange import Exchange, Messenger, Patience, Roster
from sifu.engines.flower.exchanged import EvaluationSample, Exchanged, Reporter
from sifu.engines.flower.wire import (
    DRIFT_QUERY,
    EVALUATE,
    MASKED_TRAIN,
    PREPARE,
    TRAIN,
    arrays_record,
    read_drift,
    read_masked,
    read_model,
    read_ready,
    read_score,
)
from sifu.engines.masked_updates import MaskedRound, Ready, masked_facts
from sifu.engines.remote import (
    ATTEMPTS,
    NO_ROUND,
    NO_SCORE,
    Blueprint,
    OpenRound,
    RemoteFederation,
    Score,
    evaluation_of,
)
from sifu.errors import NoClientResponseError
from sifu.theory.arrays import Floats
from sifu.theory.facts import CLOSED_EARLY, LEAST_MASKED, MINIMUM_OF_ANSWERS
from sifu.theory.participation import ClientIndices, Places

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, Message
    from flwr.serverapp import Grid


class FlowerFederation(RemoteFederation, RunsAhead):
    """Engine of clients on Flower's nodes; if `masked`, it sees the mean of their updates but no single update."""

    def __init__(
        self,
        grid: Grid,
        roster: Roster,
        blueprint: Blueprint,
        patience: Patience,
        *,
        masked: bool = False,
    ) -> None:
        self._masked, self.pause = masked, patience.pause
        self._exchange = Exchange(grid, patience.poll)
        self._messenger = Messenger(self, self._exchange, roster, patience)
        self.after_round: Callable[[Position, ArrayRecord], None] | None = None
        self.reporter: Reporter | None = None
        self.evaluation_sample = EvaluationSample()
        self._position = NO_ROUND
        self.least = max(patience.min_replies, LEAST_MASKED if masked else 1)
        # Without one client, a round might have been dropped, or another client's late reply might have counted.
        # Clients are therefore coupled, which certificates list as an assumption.
        coupled = []
        if patience.min_replies > 1:
            coupled.append(f"{MINIMUM_OF_ANSWERS} {patience.min_replies} answers a round")
        if patience.wait.closes_early:
            coupled.append(CLOSED_EARLY)
        facts = replace(blueprint.facts, outside=(*blueprint.facts.outside, *coupled))
        super().__init__(blueprint, masked_facts(blueprint, facts, "masked-updates = false") if masked else facts)

    def record(self, model: Vector) -> ArrayRecord:
        """Return a model as the record sent to the clients."""
        return self._messenger.record(self.layout.own_copy(model))

    def show_checkpoints(self, shown: ShownCheckpoint) -> None:
        """Include the latest signed head of the run's ledger in every message from now on."""
        self._messenger.shown = shown

    def run_together(self, setups: Sequence[RoundSetup], *, separate: bool) -> list[RoundResult]:
        """Run one round per setup at the same time; clients of separate groups are not asked for their drifts."""
        drawn, position = [self.draw(setup) for setup in setups], setups[0].position
        self._position, noted = position, len(self.incidents)
        everyone = sorted(int(client) for members in drawn for client in members)
        online = self._messenger.online(position, everyone) if everyone else {}
        there = [{client: online[client] for client in members.tolist() if client in online} for members in drawn]
        members_of = (setup.active.index if isinstance(setup.active, Places) else setup.active for setup in setups)
        self._begin_report(TRAIN, online, sum(len(members) for members in members_of))
        if self._masked:
            results = self._run_masked(setups, drawn, there, wants_drifts=not separate)
        else:
            results = self._run_open(setups, drawn, there)
        self._end_report(TRAIN, online, noted, results)
        return results

    def _run_open(
        self, setups: Sequence[RoundSetup], drawn: Sequence[ClientIndices], there: Sequence[Mapping[int, int]]
    ) -> list[RoundResult]:
        """Run rounds in which the server sees every model; `there` maps each round's connected clients to nodes."""
        position = self._position
        messages: dict[int, Message] = {}
        for setup, nodes in zip(setups, there, strict=True):
            messages |= self._messenger.messages(nodes, self._messenger.record(setup.start), position, TRAIN)
        answers = self._messenger.ask(messages, lambda reply: read_model(reply, self.layout), position, together=there)
        results = []
        for setup, members, nodes in zip(setups, drawn, there, strict=True):
            answered = [(client, *answers.pop(client)) for client in nodes if client in answers]
            replies = [Reply(client, position, samples, model, owned=True) for client, model, samples in answered]
            results.append(run_round(OpenRound(self, replies), setup, members))
        return results

    def _run_masked(
        self,
        setups: Sequence[RoundSetup],
        drawn: Sequence[ClientIndices],
        there: Sequence[Mapping[int, int]],
        *,
        wants_drifts: bool,
    ) -> list[RoundResult]:
        """Run rounds of masked updates; all clients prepare before any of them sends its update."""
        rounds = [FlowerMaskedRound(self, *pair, wants_drifts) for pair in zip(setups, there, strict=True)]
        position = self._position
        messages: dict[int, Message] = {}
        for masked_round in rounds:
            messages |= masked_round.preparation()
        ready = self._messenger.ask(messages, read_ready, position, together=there)
        messages = {}
        for masked_round, members in zip(rounds, drawn, strict=True):
            if members.size:
                messages |= masked_round.key_messages(ready)
        size = self.layout.size + 1
        words = self._messenger.ask(messages, lambda reply: read_masked(reply, size), position)
        results = []
        for masked_round, setup, members in zip(rounds, setups, drawn, strict=True):
            masked_round.add_up(words)
            results.append(run_round(masked_round, setup, members))
        return results

    def _begin_report(self, kind: str, nodes: Mapping[int, int], known: int) -> None:
        if self.reporter:
            self.reporter.before(kind, self._position, len(nodes), known)
            self._exchange.received = {}

    def _end_report(
        self,
        kind: str,
        nodes: Mapping[int, int],
        noted: int,
        results: Sequence[RoundResult] = (),
        scored: Iterable[int] = (),
    ) -> None:
        """Report the replies of `nodes`.

        Replies of the clients in `results` or `scored` count; incidents since `noted` explain why others do not.
        """
        if self.reporter:
            received = {} if self._masked and kind == TRAIN else self._exchange.received or {}
            taken = [*scored, *(int(client) for result in results for client in result.participants)]
            counted = tuple(received[nodes[client]] for client in taken if nodes[client] in received)
            errors = tuple(reply for reply in received.values() if reply.has_error())
            notes = [f"{incident.client}: {incident.what}".removeprefix(": ") for incident in self.incidents[noted:]]
            rejections = [rejection for result in results for rejection in result.rejections]
            notes += [f"{rejection.client}: refused, {rejection.reason}" for rejection in rejections]
            self.reporter.after(Exchanged(kind, self._position, len(nodes), len(taken), counted, errors, tuple(notes)))
        self._exchange.received = None

    def run_rounds(
        self, model: Vector, position: Position, active: ClientIndices, wanted: RoundsWanted
    ) -> Iterator[StreamedRound]:
        """Yield rounds one after another; after several lost rounds in a row, raise an error with the reasons."""
        self._lost_in_a_row = 0
        rounds = rounds_one_by_one(self, model, position, active, wanted, self._evaluation_if_any)
        for number, done in enumerate(rounds, position.round):
            here = Position(position.branch, number)
            noted = [incident for incident in self.incidents if Position(incident.branch, incident.round) == here]
            reasons = [f"{incident.client}: {incident.what}" for incident in noted if incident.client]
            reasons += [f"{rejection.client}: {rejection.reason}" for rejection in done.rejections]
            if self.after_round is not None:
                self.after_round(here, self.record(done.fetch_model()))
            yield done  # the consumer also clears the incidents
            self._count_lost(done.lost, reasons, "the run")
            if done.lost:
                time.sleep(self.pause)

    def _evaluation_if_any(self, model: Vector, clients: ClientIndices) -> Evaluation | None:
        evaluation = self._evaluate(model, clients, reported=True)
        return evaluation if evaluation.samples.any() else None

    def evaluate(self, model: Vector, clients: ClientIndices) -> Evaluation:
        """Evaluate `model` on the clients that reply; all other clients count with zero samples.

        At least one client must reply, unless none may be asked.
        """
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(self.pause)
            evaluation = self._evaluate(model, clients)
            if evaluation.samples.any() or not (self.evaluates and self.may_ask(clients)):
                return evaluation
        raise NoClientResponseError(
            "no client answered an evaluation: nothing was lost; check that the nodes are connected and start again"
        )

    def _evaluate(self, model: Vector, clients: ClientIndices, *, reported: bool = False) -> Evaluation:
        """Evaluate `model` on the sampled clients that reply; all other clients count with zero samples."""
        answers: dict[int, Score] = {}
        if self.evaluates:
            busy = self._exchange.busy()  # skip these: a node handles one message at a time
            nodes = {client: node for client, node in self._messenger.nodes(clients).items() if client not in busy}
            sample = self.evaluation_sample.draw(list(nodes), self.blueprint.seed, model)
            nodes, noted = {client: nodes[client] for client in sample}, len(self.incidents)
            if reported:
                self._begin_report(EVALUATE, nodes, len(clients))
            more = {"server-round": self._position.round + 1}
            messages = self._messenger.messages(nodes, self.record(model), NO_ROUND, EVALUATE, more=more)
            answers = self._messenger.ask(
                messages,
                lambda reply: read_score(reply, self.blueprint.metrics),
                doing="evaluation: ",
                together=[list(messages)],
            )
            if reported:
                self._end_report(EVALUATE, nodes, noted, scored=list(answers))
        return evaluation_of(clients, [answers.get(int(client), NO_SCORE) for client in clients])


class FlowerMaskedRound(MaskedRound):
    """`MaskedRound` of Flower's nodes. With `wants_drifts`, clients also report their distance to the mean."""

    def __init__(
        self, engine: FlowerFederation, setup: RoundSetup, nodes: Mapping[int, int], wants_drifts: bool
    ) -> None:
        super().__init__(engine, setup, nodes)
        self._messenger, self._nodes, self._wants_drifts = engine._messenger, nodes, wants_drifts

    def preparation(self) -> dict[int, Message]:
        """Return the messages that ask clients to train and to reply with a `Ready`."""
        model = arrays_record(self.layout, self._setup.start)
        return self._messenger.messages(self._nodes, model, self._setup.position, PREPARE, more=self.numbers)

    def key_messages(self, answers: Mapping[int, Ready]) -> dict[int, Message]:
        """Determine the participants, and return the messages with all keys; return none if the round is dropped."""
        keys = self.settle(answers)
        more = {**self.numbers, "clients": list(keys), "keys": list(keys.values())}
        nodes = {client: self._nodes[client] for client in keys}
        return self._messenger.messages(nodes, None, self._setup.position, MASKED_TRAIN, more=more)

    def _drifts(self, mean: Floats) -> Floats:
        """Return each participant's reported distance to the mean, or infinity if it reports none."""
        if not self._wants_drifts:
            return super()._drifts(mean)
        # Send the mean as float64: rounded to float32, it would differ from the mean that is applied.
        record = arrays_record(ModelLayout(self.layout.names, self.layout.shapes, "float64"), mean)
        position = self._setup.position
        drifts: dict[int, float] = {}
        why: dict[int, str] = {}
        for attempt in range(ATTEMPTS):
            missing = {client: self._nodes[client] for client in self._ready if client not in drifts}
            if missing:
                if attempt:
                    time.sleep(self._engine.pause)
                messages = self._messenger.messages(missing, record, position, DRIFT_QUERY)
                answers, why = self._messenger.try_to_ask(messages, lambda reply: read_drift(reply, position))
                drifts |= answers
        for client in self._ready:
            if client not in drifts:
                unknown = f"its drift is unknown ({why.get(client, 'no answer')}): its Psi is unbounded from here on"
                self._engine.note(position, client, unknown)
        return np.array([drifts.get(client, np.inf) for client in self._ready], dtype=np.float64)
