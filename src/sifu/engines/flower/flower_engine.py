"""The Flower engine: our own round loop over a `Grid`, behind the same protocol as the embedded simulator.

A round draws its participants by the same keys as every engine, asks those whose node is there, and averages who
answered in time (`sifu.core.round`; its steps are in `server_rounds`). A client that is offline, late or
fails was absent from the round, and that is recorded (`take_incidents`). Every reply is checked before it touches the
model; refusals are recorded, and `server.rejected` says what happens then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sifu.core.engine import Evaluation, Position, RoundResult
from sifu.core.layout import ModelPieces, Vector
from sifu.core.replies import vector_refusal
from sifu.core.round import RoundSetup, listed
from sifu.core.round_stream import RoundsWanted, StreamedRound, rounds_one_by_one
from sifu.engines.flower.checkpoints_of_nodes import ShownCheckpoint
from sifu.engines.flower.exchange import Exchange, Roster
from sifu.engines.flower.messenger import ATTEMPTS, EVALUATION, NOWHERE, Answer, Messenger, Patience
from sifu.engines.flower.server_rounds import run_together
from sifu.engines.flower.wire import EVALUATE, EVALUATE_SEVERAL, TRAIN, read_model, read_score, read_scores
from sifu.engines.remote import NO_SCORE, Blueprint, RemoteFederation, evaluation_of
from sifu.errors import InputError, NoClientResponseError
from sifu.theory.facts import CLOSED_EARLY, DROPPED_MASKED_ROUND, LEAST_MASKED, MINIMUM_OF_ANSWERS
from sifu.theory.participation import ClientIndices

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, Message
    from flwr.serverapp import Grid

MOST_AT_ONCE = 1 << 24
"""Parameters of all models in one message together; larger models travel one by one."""


class FlowerFederation(RemoteFederation):
    """An `Engine` of clients on Flower's nodes; `masked`: it learns the mean of their updates and no single one."""

    def __init__(
        self,
        grid: Grid,
        roster: Roster,
        blueprint: Blueprint,
        patience: Patience | None = None,
        *,
        masked: bool = False,
        exchange: Exchange | None = None,
    ) -> None:
        self._patience, self._masked = patience or Patience(), masked
        self._exchange = exchange or Exchange(grid, self._patience.poll)
        self._messenger = Messenger(self, self._exchange, roster, self._patience)
        self.after_round: Callable[[Position, ArrayRecord], None] | None = None
        self.least = max(self._patience.min_replies, LEAST_MASKED if masked else 1)
        facts = blueprint.facts
        # Without one client such a round might not have counted, or another client's answer would have: clients are
        # coupled, which certificates name as assumed.
        coupled = []
        if self._patience.min_replies > 1:
            coupled.append(f"{MINIMUM_OF_ANSWERS} {self._patience.min_replies} answers a round")
        if self._patience.wait.closes_early:
            coupled.append(CLOSED_EARLY)
        if masked:
            if blueprint.carried:
                raise InputError(
                    f"{', '.join(blueprint.carried)} hold whole numbers, which cannot be masked: leave them out of "
                    "what travels, or do without masked-updates"
                )
            if blueprint.clipping or blueprint.replies.update_bound:
                raise InputError("server.clip and server.update_bound need every client's update: not with masked ones")
            coupled.append(DROPPED_MASKED_ROUND)
            # The other world's fixed-point numbers may have another range, so no allowance is claimed to be proven.
            facts = replace(facts, rounding_bounded=False)
        super().__init__(blueprint, replace(facts, outside=(*facts.outside, *coupled)))

    def record(self, model: Vector) -> ArrayRecord:
        """A model as it travels to the clients."""
        return self._messenger.record(self.layout.own_copy(model))

    def show_checkpoints(self, shown: ShownCheckpoint) -> None:
        """From now on every message carries the latest signed head of the run's ledger."""
        self._messenger.shown = shown

    def run_together(self, setups: Sequence[RoundSetup], *, apart: bool) -> list[RoundResult]:
        """The round of each setup, all in the same messages."""
        return run_together(self, self._messenger, setups, masked=self._masked, drifts=not apart)

    def run_rounds(
        self, model: Vector, position: Position, active: ClientIndices, wanted: RoundsWanted
    ) -> Iterator[StreamedRound]:
        """Rounds one after another; several lost in a row end it with the clients' own errors."""
        lost_in_a_row = 0
        rounds = rounds_one_by_one(self, model, position, active, wanted, self._evaluation_if_any)
        for number, done in enumerate(rounds, position.round):
            here = Position(position.branch, number)
            noted = [incident for incident in self.incidents if Position(incident.branch, incident.round) == here]
            reasons = [f"{incident.client}: {incident.what}" for incident in noted if incident.client]
            reasons += [f"{rejection.client}: {rejection.reason}" for rejection in done.rejections]
            if self.after_round is not None:
                self.after_round(here, self.record(done.fetch_model()))
            yield done  # what was noted is taken away with it
            lost_in_a_row = lost_in_a_row + 1 if done.lost else 0
            if lost_in_a_row >= self._patience.rounds_without_answer:
                raise NoClientResponseError(
                    f"{lost_in_a_row} rounds in a row were lost, no client's training could be used "
                    f"({listed(reasons)}): every round is saved; see to the clients and start the run again to go on"
                )
            if done.lost:
                time.sleep(self._patience.pause)

    def _evaluation_if_any(self, model: Vector, clients: ClientIndices) -> Evaluation | None:
        evaluation = self._evaluate(model, clients)
        return evaluation if evaluation.samples.any() else None

    def local_updates(
        self, model: Vector, position: Position, clients: ClientIndices, steps: int
    ) -> NDArray[np.floating]:
        """theta_i - model of each of `clients`; all of them are needed, so each is asked up to three times."""
        if self._masked:
            raise InputError("this method needs single updates, which the server of a masked run never sees")
        start = self.layout.own_copy(model)
        models: dict[int, ModelPieces] = {}
        for attempt in range(ATTEMPTS):
            missing = [int(client) for client in clients if int(client) not in models]
            if missing:
                if attempt:
                    time.sleep(self._patience.pause)
                nodes = self._messenger.online(position, missing, everybody=True)
                messages = self._messenger.messages(nodes, self._messenger.record(start), position, TRAIN, steps)
                answers = self._messenger.ask(messages, lambda reply: read_model(reply, self.layout), position)
                for client, (vector, samples) in answers.items():
                    if self._usable(position, client, start, vector, samples):
                        models[client] = vector
        names = [self.clients[int(client)].name for client in clients if int(client) not in models]
        if names:
            raise NoClientResponseError(
                f"{', '.join(names[:5])} did not answer and are needed here: nothing was changed, try again later"
            )
        rows = [np.asarray(models[int(client)]) - start for client in clients]
        return np.stack(rows) if rows else np.zeros((0, start.size), dtype=self.layout.dtype)

    def _usable(self, position: Position, client: int, start: Vector, vector: ModelPieces, samples: int) -> bool:
        """Whether a reply may be used; if not, why is noted."""
        mine = self.clients[client].samples
        why = "wrong samples" if samples != mine else vector_refusal(vector, start, self.layout)
        if why is not None:
            self.note(position, client, f"its reply was refused: {why}")
        return why is None

    def evaluate(self, model: Vector, clients: ClientIndices) -> Evaluation:
        """How `model` does on the clients that answer; of those left out nothing is known, and they count zero samples.

        At least one client has to answer, unless none may be asked.
        """
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(self._patience.pause)
            evaluation = self._evaluate(model, clients)
            if evaluation.samples.any() or not (self.evaluates and self.may_ask(clients)):
                return evaluation
        raise NoClientResponseError(
            "no client answered an evaluation: nothing was lost; see that the nodes are connected and start again"
        )

    def evaluate_several(self, models: Iterable[Vector], clients: ClientIndices) -> list[Evaluation]:
        """As `evaluate` of each, in few messages where the clients can; a client without an answer has no samples."""
        count = max(1, MOST_AT_ONCE // self.layout.size) if self.blueprint.several else 1
        evaluations: list[Evaluation] = []
        waiting = iter(models)
        while batch := list(islice(waiting, count)):
            evaluations += self._evaluate_batch(batch, clients) if count > 1 else [self._evaluate(batch[0], clients)]
        return evaluations

    def _evaluate_batch(self, models: Sequence[Vector], clients: ClientIndices) -> list[Evaluation]:
        records = [self.record(model) for model in models]
        answers = self._scores(records, clients, EVALUATE_SEVERAL, lambda reply: read_scores(reply, len(models)))
        nothing = [NO_SCORE] * len(models)
        return [
            evaluation_of(clients, [answers.get(int(client), nothing)[number] for client in clients])
            for number in range(len(models))
        ]

    def _evaluate(self, model: Vector, clients: ClientIndices) -> Evaluation:
        metrics = self.blueprint.metrics
        answers = self._scores(self.record(model), clients, EVALUATE, lambda reply: read_score(reply, metrics))
        return evaluation_of(clients, [answers.get(int(client), NO_SCORE) for client in clients])

    def _scores(
        self,
        record: ArrayRecord | Sequence[ArrayRecord],
        clients: ClientIndices,
        kind: str,
        read: Callable[[Message], Answer],
    ) -> dict[int, Answer]:
        if not self.evaluates:
            return {}
        busy = self._exchange.busy()  # with a round: a node answers one message after another
        nodes = {client: node for client, node in self._messenger.nodes(clients).items() if client not in busy}
        messages = self._messenger.messages(nodes, record, NOWHERE, kind)
        return self._messenger.ask(messages, read, doing=EVALUATION, closing=True)
