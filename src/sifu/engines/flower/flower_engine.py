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

from sifu.core.engine import Evaluation, Incident, Position, RoundResult
from sifu.core.layout import ModelLayout, ModelPieces, Vector
from sifu.core.replies import vector_refusal
from sifu.core.round import RoundSetup, draw, listed
from sifu.core.round_stream import RoundsWanted, StreamedRound, rounds_one_by_one
from sifu.engines.flower.blueprint import Blueprint, Patience, with_minimum
from sifu.engines.flower.checkpoints_of_nodes import ShownCheckpoint
from sifu.engines.flower.exchange import Exchange, Roster
from sifu.engines.flower.group_rounds import run_groups_together
from sifu.engines.flower.messenger import ATTEMPTS, EVALUATION, NOWHERE, Answer, Messenger
from sifu.engines.flower.server_rounds import OUTSIDE, MaskedRound, OpenRound
from sifu.engines.flower.wire import EVALUATE, EVALUATE_SEVERAL, read_score, read_scores
from sifu.errors import InputError, NoClientResponseError
from sifu.theory.facts import ClientProfile, TrainingFacts
from sifu.theory.participation import ClientIndices

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, Message
    from flwr.serverapp import Grid

Score = tuple[int, int, float]
"""Samples, correct predictions and the sum of losses."""
NO_SCORE: Score = (0, 0, 0.0)
MOST_AT_ONCE = 1 << 24
"""Parameters of all models in one message together; larger models travel one by one."""


class FlowerFederation:
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
        self._patience = patience or Patience()
        self._exchange = exchange or Exchange(grid, self._patience.poll)
        self._messenger = Messenger(self._exchange, roster, blueprint, self._patience)
        facts = with_minimum(blueprint.facts, self._patience)
        self.after_round: Callable[[Position, ArrayRecord], None] | None = None
        if masked:
            if blueprint.carried:
                raise InputError(
                    f"{', '.join(blueprint.carried)} hold whole numbers, which cannot be masked: leave them out of "
                    "what travels, or do without masked-updates"
                )
            if blueprint.clipping or blueprint.replies.update_bound:
                raise InputError("server.clip and server.update_bound need every client's update: not with masked ones")
            # The other world's fixed-point numbers may have another range, so no allowance is claimed to be proven.
            facts = replace(facts, outside=(*facts.outside, OUTSIDE), rounding_bounded=False)
        self._round = (MaskedRound if masked else OpenRound)(self._messenger, facts)

    @property
    def layout(self) -> ModelLayout:
        """Names and shapes of the parameters."""
        return self._messenger.blueprint.layout

    @property
    def clients(self) -> tuple[ClientProfile, ...]:
        """Every known client; indices elsewhere point into this tuple."""
        return self._messenger.blueprint.clients

    @property
    def facts(self) -> TrainingFacts:
        """What every round does, and what is proven about it."""
        return self._round.facts

    @property
    def evaluates(self) -> bool:
        """Whether clients evaluate models at all."""
        return self._messenger.blueprint.evaluates

    def record(self, model: Vector) -> ArrayRecord:
        """A model as it travels to the clients."""
        return self._messenger.blueprint.record(self.layout.own_copy(model))

    def initial_model(self, branch: int) -> Vector:
        """A fresh model of a branch."""
        return self._messenger.blueprint.initial_model(branch)

    def renew(self, blueprint: Blueprint) -> None:
        """Go on with a training that knows more clients; the first ones must be those known so far."""
        old = self._messenger.blueprint
        if blueprint.clients[: len(old.clients)] != old.clients:
            raise InputError("clients join at the end of the list")
        if (blueprint.layout, blueprint.facts) != (old.layout, old.facts):
            raise InputError("the model, or what is known of the training, would be another one with this client")
        self._messenger.renew(blueprint)

    def show_checkpoints(self, shown: ShownCheckpoint) -> None:
        """From now on every message carries the latest signed head of the run's ledger."""
        self._messenger.shown = shown

    def leave_out(self, clients: Iterable[int]) -> None:
        """From now on these clients' nodes are not spoken to, whatever is asked of them."""
        self._messenger.left_out = frozenset(int(client) for client in clients)

    def take_incidents(self) -> list[Incident]:
        """What went otherwise than asked since this was last called."""
        return self._messenger.take_incidents()

    def run_round(
        self,
        model: Vector,
        position: Position,
        active: ClientIndices,
        *,
        want_gram: bool = False,
        want_updates: bool = False,
    ) -> RoundResult:
        """One round of FedAvg among those who answer; too few answers leave the model as it was."""
        return self._round.run(RoundSetup(self.layout.own_copy(model), position, active, want_gram, want_updates))

    def run_group_rounds(
        self, models: Sequence[Vector], position: Position, groups: Sequence[ClientIndices]
    ) -> list[RoundResult]:
        """One round of every group in the same messages: each member is sent its own group's model."""
        return run_groups_together(
            self._round,
            self._messenger,
            [
                RoundSetup(self.layout.own_copy(model), position, members)
                for model, members in zip(models, groups, strict=True)
            ],
        )

    def run_rounds(
        self, model: Vector, position: Position, active: ClientIndices, wanted: RoundsWanted
    ) -> Iterator[StreamedRound]:
        """Rounds one after another; several lost in a row end it with the clients' own errors."""
        lost_in_a_row = 0
        rounds = rounds_one_by_one(self, model, position, active, wanted, self._evaluation_if_any)
        for number, done in enumerate(rounds, position.round):
            reasons = self._messenger.reasons(Position(position.branch, number))
            reasons += [f"{rejection.client}: {rejection.reason}" for rejection in done.rejections]
            if self.after_round is not None:
                self.after_round(Position(position.branch, number), self.record(done.fetch_model()))
            yield done  # what was noted is taken away with it
            lost_in_a_row = lost_in_a_row + 1 if done.lost else 0
            if lost_in_a_row >= self._patience.rounds_without_answer:
                raise NoClientResponseError(
                    f"{lost_in_a_row} rounds in a row were lost, no client's training could be used "
                    f"({listed(reasons)}): every round is saved; see to the clients and start the run again to go on"
                )
            if done.lost:
                time.sleep(self._patience.pause)

    def loses(self, position: Position, active: ClientIndices, participants: ClientIndices) -> bool:
        """Whether a round was lost: no client took part although enough were asked; a draw of fewer is no loss."""
        if participants.size:
            return False
        setup = RoundSetup(np.zeros(0), position, active)
        drawn = draw(self.facts.participation, self._round.participation_key, setup)
        return drawn.size >= self._round.least

    def _evaluation_if_any(self, model: Vector, clients: ClientIndices) -> Evaluation | None:
        evaluation = self._evaluate(model, clients)
        return evaluation if evaluation.samples.any() else None

    def local_updates(
        self, model: Vector, position: Position, clients: ClientIndices, steps: int
    ) -> NDArray[np.floating]:
        """theta_i - model of each of `clients`; all of them are needed, so each is asked up to three times."""
        if isinstance(self._round, MaskedRound):
            raise InputError("this method needs single updates, which the server of a masked run never sees")
        start = self.layout.own_copy(model)
        models: dict[int, ModelPieces] = {}
        for attempt in range(ATTEMPTS):
            missing = [int(client) for client in clients if int(client) not in models]
            if missing:
                if attempt:
                    time.sleep(self._patience.pause)
                replies = self._messenger.train(start, position, missing, steps)
                for client, (vector, samples) in replies.items():
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
            self._messenger.note(position, client, f"its reply was refused: {why}")
        return why is None

    def evaluate(self, model: Vector, clients: ClientIndices) -> Evaluation:
        """How `model` does on the clients that answer; of those left out nothing is known, and they count zero samples.

        At least one client has to answer, unless none may be asked.
        """
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(self._patience.pause)
            evaluation = self._evaluate(model, clients)
            if evaluation.samples.any() or not (self.evaluates and self._messenger.may_ask(clients)):
                return evaluation
        raise NoClientResponseError(
            "no client answered an evaluation: nothing was lost; see that the nodes are connected and start again"
        )

    def evaluate_several(self, models: Iterable[Vector], clients: ClientIndices) -> list[Evaluation]:
        """As `evaluate` of each, in few messages where the clients can; a client without an answer has no samples."""
        count = max(1, MOST_AT_ONCE // self.layout.size) if self._messenger.blueprint.several else 1
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
            _evaluation(clients, [answers.get(int(client), nothing)[number] for client in clients])
            for number in range(len(models))
        ]

    def _evaluate(self, model: Vector, clients: ClientIndices) -> Evaluation:
        metrics = self._messenger.blueprint.metrics
        answers = self._scores(self.record(model), clients, EVALUATE, lambda reply: read_score(reply, metrics))
        return _evaluation(clients, [answers.get(int(client), NO_SCORE) for client in clients])

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
        messages = {
            client: self._messenger.message(record, NOWHERE, client, node, kind)
            for client, node in self._messenger.nodes(clients).items()
            if client not in busy
        }
        return self._messenger.ask(messages, read, doing=EVALUATION, closing=True)


def _evaluation(clients: ClientIndices, scores: Sequence[Score]) -> Evaluation:
    samples, correct, losses = np.array(scores, dtype=np.float64).reshape(-1, 3).T
    return Evaluation(np.array(clients, dtype=np.int64), samples.astype(np.int64), correct.astype(np.int64), losses)
