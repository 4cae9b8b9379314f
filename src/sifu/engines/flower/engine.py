"""The Flower engine: our own round loop over a `Grid`, behind the same protocol as the embedded simulator.

A round draws its participants by the same keys as every engine, asks those whose node is there, and averages who
answered in time. Whoever is offline, late or fails was absent from the round, and that is recorded (`take_incidents`).
Every reply is checked before anything of it touches the model; what is refused is recorded, and `server.rejected` says
what happens then. A round with fewer than `min_replies` answers is dropped whole: it has no participants and
leaves the model as it was. One walk over the replies gives their mean and every drift.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sifu.core.engine import Evaluation, Position, Rejection, RoundResult
from sifu.core.layout import ModelLayout, Vector
from sifu.core.replies import Reply, ReplyGate, ReplyRules, vector_refusal
from sifu.core.streaming import RoundsWanted, StreamedRound, is_evaluated
from sifu.engines.flower.averaging import average_replies
from sifu.engines.flower.exchange import Exchange, Incident
from sifu.engines.flower.masked_rounds import OUTSIDE, masked_round
from sifu.engines.flower.masking import LEAST_PARTICIPANTS
from sifu.engines.flower.roster import Roster
from sifu.engines.flower.wire import (
    EVALUATE,
    EVALUATE_SEVERAL,
    TRAIN,
    Asked,
    arrays_record,
    model_message,
    read_model,
    read_score,
    read_scores,
)
from sifu.engines.sim.clipping import Clipping
from sifu.errors import InputError, NobodyAnsweredError, RoundRejectedError
from sifu.theory.draws import base_key, place_key
from sifu.theory.facts import ClientProfile, TrainingFacts
from sifu.theory.participation import ClientIndices
from sifu.theory.rounding import norm, norm_up, up

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, Message
    from flwr.serverapp import Grid


Score = tuple[int, int, float]
"""Samples, correct predictions and the sum of losses."""
Answer = TypeVar("Answer")
NO_SCORE: Score = (0, 0, 0.0)
MOST_AT_ONCE = 1 << 24
"""Parameters of all models in one message together; larger models travel one by one."""


@dataclass(frozen=True)
class Blueprint:
    """What a server knows of the training it runs: everything of an engine but the clients' nodes.

    `rounding` bounds floating point in a round of some participants from a model of a norm (0.0: nothing is proven).
    `plan` travels in every message. `several`: all clients evaluate several models at once.
    """

    layout: ModelLayout
    clients: tuple[ClientProfile, ...]
    facts: TrainingFacts
    initial_model: Callable[[int], Vector]
    seed: int
    plan: str = ""
    rounding: Callable[[float, ClientIndices], float] = lambda norm, participants: 0.0
    clipping: Clipping | None = None
    replies: ReplyRules = ReplyRules()
    several: bool = False


@dataclass(frozen=True)
class Patience:
    """How long the server waits and how little it is content with.

    `timeout` seconds for the answers of a round or an evaluation; `min_replies` answers make a round (more than one
    couples clients to each other, which certificates then name as assumed harmless); after `rounds_without_answer`
    empty rounds in a row training stops, to be continued; `pause` seconds pass before the next try.
    """

    timeout: float = 600.0
    min_replies: int = 1
    rounds_without_answer: int = 5
    pause: float = 5.0
    poll: float = 0.5


def with_minimum(facts: TrainingFacts, patience: Patience) -> TrainingFacts:
    """The facts of a training whose rounds need several answers: without one client a round might not have counted."""
    if patience.min_replies <= 1:
        return facts
    return replace(facts, outside=(*facts.outside, f"a minimum of {patience.min_replies} answers a round"))


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
    ) -> None:
        self._patience = patience or Patience()
        self._masked = masked
        self._exchange = Exchange(grid, self._patience.poll)
        self._roster = roster
        self._blueprint = blueprint
        self._facts = with_minimum(blueprint.facts, self._patience)
        if masked:
            if blueprint.clipping or blueprint.replies.update_bound:
                raise InputError("server.clip and server.update_bound need every client's update: not with masked ones")
            # The other world's fixed-point numbers may have another range, so no allowance is claimed to be proven.
            self._facts = replace(self._facts, outside=(*self._facts.outside, OUTSIDE), rounding_bounded=False)
        self._samples = np.array([one.samples for one in blueprint.clients], dtype=np.int64)
        self._participation_key = base_key(blueprint.seed, "participation")
        self._left_out: frozenset[int] = frozenset()
        self._incidents: list[Incident] = []
        self._asked = False

    @property
    def layout(self) -> ModelLayout:
        """Names and shapes of the parameters."""
        return self._blueprint.layout

    @property
    def clients(self) -> tuple[ClientProfile, ...]:
        """Every known client; indices elsewhere point into this tuple."""
        return self._blueprint.clients

    @property
    def facts(self) -> TrainingFacts:
        """What every round does, and what is proven about it."""
        return self._facts

    def initial_model(self, branch: int) -> Vector:
        """A fresh model of a branch."""
        return self._blueprint.initial_model(branch)

    def renew(self, blueprint: Blueprint) -> None:
        """Go on with a training that knows more clients; the first ones must be those known so far."""
        old = self._blueprint
        if blueprint.clients[: len(old.clients)] != old.clients:
            raise InputError("clients join at the end of the list")
        if (blueprint.layout, blueprint.facts) != (old.layout, old.facts):
            raise InputError("the model, or what is known of the training, would be another one with this client")
        self._blueprint = blueprint
        self._samples = np.array([one.samples for one in blueprint.clients], dtype=np.int64)

    def leave_out(self, clients: Iterable[int]) -> None:
        """From now on these clients' nodes are not spoken to, whatever is asked of them."""
        self._left_out = frozenset(int(one) for one in clients)

    def take_incidents(self) -> list[Incident]:
        """What went otherwise than asked since this was last called."""
        taken, self._incidents = self._incidents, []
        return taken

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
        start = self._checked_model(model)
        drawn = self._facts.participation.draw(
            active, place_key(self._participation_key, position.branch, position.round)
        )
        self._asked = drawn.size >= max(self._patience.min_replies, LEAST_PARTICIPANTS if self._masked else 1)
        if self._masked:
            if want_gram or want_updates:
                raise InputError(
                    "masked updates are not seen by the server: keep.gram_clients and keep.updates_every must be 0"
                )
            return self._masked_round(start, position, [int(one) for one in drawn])
        nodes = self._online(position, [int(one) for one in drawn])
        gate = ReplyGate(
            start, position, list(nodes), self.layout, self.clients, self._blueprint.replies, forgotten=self._left_out
        )
        for client, (vector, count) in self._train(start, position, nodes, None).items():
            gate.take(Reply(client, position, count, vector))
        rejections = gate.finish()
        self._stop_if_told(position, rejections)
        answers = gate.accepted
        if len(answers) < self._patience.min_replies or not answers:
            if drawn.size:
                self._note(position, "", f"{len(answers)} of {drawn.size} answered: the round was dropped")
            return self._empty(start, want_gram, rejections)
        participants = np.array(sorted(answers), dtype=np.int64)
        samples = self._samples[participants]
        exact_start = start.astype(np.float64)
        rows = [answers.pop(int(one)) for one in participants]
        if self._blueprint.clipping:
            updates = np.stack(rows) - start
            clipped = self._blueprint.clipping.average(updates, position, participants, samples, want_gram)
            step, drifts, shift, gram = clipped.step, clipped.drifts, clipped.mean_shift, clipped.gram
            sent = clipped.updates.astype(self.layout.dtype) if want_updates else None
            bad = clipped.not_finite
        else:
            found = average_replies(rows, exact_start, samples, want_gram)
            step, drifts, shift, gram = found.step, found.drifts, found.mean_shift, found.gram
            sent = np.stack(rows) - start if want_updates else None
            bad = found.not_finite
        new = (exact_start + self._facts.server_rate * step).astype(self.layout.dtype)
        if bad or not bool(np.isfinite(new).all()):
            raise RoundRejectedError(
                f"round {position.round} of branch {position.branch} was rejected and changed nothing: the averaged "
                f"model overflows {self.layout.dtype}; lower the local rate ({self._facts.local_rate:g})"
            )
        rounding = self._blueprint.rounding(norm_up(exact_start), participants)
        return RoundResult(new, participants, samples, drifts, shift, rounding, gram, sent, rejections)

    def _stop_if_told(self, position: Position, rejections: tuple[Rejection, ...]) -> None:
        left_out = [f"{one.client}: {one.reason}" for one in rejections if one.left_out]
        if left_out and self._blueprint.replies.on_rejection == "stop":
            raise RoundRejectedError(
                f"round {position.round} of branch {position.branch} was rejected and changed nothing: a reply cannot "
                f"be used ({', '.join(left_out[:5])}). See server.rejected"
            )

    def _masked_round(self, start: Vector, position: Position, drawn: list[int]) -> RoundResult:
        nodes = self._online(position, drawn)

        def compose(record: ArrayRecord | None, client: int, kind: str, more: Mapping[str, Any]) -> Message:
            return self._message(record, position, client, nodes[client], kind, more=more)

        def note(client: int | None, what: str) -> None:
            self._note(position, "" if client is None else self.clients[client].name, what)

        found = masked_round(
            self._exchange,
            self.layout,
            start,
            position,
            {one: int(self._samples[one]) for one in nodes},
            compose,
            note,
            timeout=self._patience.timeout,
            pause=self._patience.pause,
            least=self._patience.min_replies,
        )
        if found is None:
            return self._empty(start, False)
        exact_start = start.astype(np.float64)
        new = (exact_start + self._facts.server_rate * found.step).astype(self.layout.dtype)
        samples = self._samples[found.participants]
        # Both worlds round to fixed point; the other one has fewer samples, and its range may be twice as wide.
        others = samples.sum() / (samples.sum() - samples.max())
        rounding = up(self._facts.server_rate * found.error * (1.0 + 2.0 * float(others)))
        shift = up(norm_up(found.step) + found.error)
        return RoundResult(new, found.participants, samples, found.drifts, shift, rounding)

    def run_rounds(
        self, model: Vector, position: Position, active: ClientIndices, wanted: RoundsWanted
    ) -> Iterator[StreamedRound]:
        """Rounds one after another; several in a row without any answer end it, to be continued later."""
        silent = 0
        for start in range(position.round, wanted.stop.max_rounds):
            done = self.run_round(
                model,
                Position(position.branch, start),
                active,
                want_gram=wanted.want_gram,
                want_updates=wanted.wants_updates(start),
            )
            model = done.model
            evaluation = None
            if is_evaluated(wanted.stop, start + 1):
                asked = self._evaluate(model, active)
                evaluation = asked if asked.samples.any() else None
            yield StreamedRound(
                done.participants,
                done.samples,
                done.drifts,
                done.mean_shift,
                done.rounding,
                norm(model.astype(np.float64) - wanted.origin),
                lambda model=model: model,  # type: ignore[misc]
                evaluation,
                done.gram,
                done.updates,
                done.rejections,
            )
            # A draw may name nobody, or too few; that is a round like any other. Nobody answering at all is not.
            dropped = self._asked and done.participants.size == 0 and evaluation is None
            silent = silent + 1 if dropped else 0
            if silent >= self._patience.rounds_without_answer:
                raise NobodyAnsweredError(
                    f"no client answered in {silent} rounds in a row: every round is saved; see that the nodes are "
                    "connected and start the run again to go on"
                )
            if dropped:
                time.sleep(self._patience.pause)

    def local_updates(
        self, model: Vector, position: Position, clients: ClientIndices, steps: int
    ) -> NDArray[np.floating]:
        """theta_i - model of each of `clients`; all of them are needed, so each is asked up to three times."""
        if self._masked:
            raise InputError("this method needs single updates, which the server of a masked run never sees")
        start = self._checked_model(model)
        found: dict[int, Vector] = {}
        for attempt in range(3):
            missing = [int(one) for one in clients if int(one) not in found]
            if missing:
                if attempt:
                    time.sleep(self._patience.pause)
                replies = self._train(start, position, self._online(position, missing), steps)
                found |= {one: self._usable(position, one, start, *reply) for one, reply in replies.items()}
                found = {one: vector for one, vector in found.items() if vector.size}
        missing = [self.clients[int(one)].name for one in clients if int(one) not in found]
        if missing:
            raise NobodyAnsweredError(
                f"{', '.join(missing[:5])} did not answer and are needed here: nothing was changed, try again later"
            )
        rows = [found[int(one)] - start for one in clients]
        return np.stack(rows) if rows else np.zeros((0, start.size), dtype=self.layout.dtype)

    def evaluate(self, model: Vector, clients: ClientIndices) -> Evaluation:
        """How `model` does on the clients that answer; of those left out nothing is known, and they count zero samples.

        Somebody has to answer, unless nobody may be asked.
        """
        for attempt in range(3):
            if attempt:
                time.sleep(self._patience.pause)
            found = self._evaluate(model, clients)
            if found.samples.any() or not self._may_ask(clients):
                return found
        raise NobodyAnsweredError(
            "no client answered an evaluation: nothing was lost; see that the nodes are connected and start again"
        )

    def evaluate_several(self, models: Iterable[Vector], clients: ClientIndices) -> list[Evaluation]:
        """As `evaluate` of each, in few messages where the clients can; whoever does not answer has no samples."""
        count = max(1, MOST_AT_ONCE // self.layout.size) if self._blueprint.several else 1
        found: list[Evaluation] = []
        waiting = iter(models)
        while batch := list(islice(waiting, count)):
            found += self._evaluate_batch(batch, clients) if count > 1 else [self._evaluate(batch[0], clients)]
        return found

    def _evaluate_batch(self, models: Sequence[Vector], clients: ClientIndices) -> list[Evaluation]:
        nodes = self._nodes(self._may_ask(clients))
        records = [arrays_record(self.layout, self._checked_model(one)) for one in models]
        messages = {
            one: self._message(records, Position(0, 0), one, node, EVALUATE_SEVERAL) for one, node in nodes.items()
        }
        answers = self._scores(messages, lambda reply: read_scores(reply, len(models)))
        nothing = [NO_SCORE] * len(models)
        return [
            _evaluation(clients, [answers.get(int(one), nothing)[number] for one in clients])
            for number in range(len(models))
        ]

    def _may_ask(self, clients: Sequence[int] | ClientIndices) -> list[int]:
        return [int(one) for one in clients if int(one) not in self._left_out]

    def _evaluate(self, model: Vector, clients: ClientIndices) -> Evaluation:
        nodes = self._nodes(self._may_ask(clients))
        record = arrays_record(self.layout, self._checked_model(model))
        messages = {one: self._message(record, Position(0, 0), one, node, EVALUATE) for one, node in nodes.items()}
        answers = self._scores(messages, read_score)
        return _evaluation(clients, [answers.get(int(one), NO_SCORE) for one in clients])

    def _scores(self, messages: Mapping[int, Message], read: Callable[[Message], Answer]) -> dict[int, Answer]:
        answers, failed = self._exchange.ask(messages, self._patience.timeout, read)
        for client, why in failed.items():
            self._note(Position(0, 0), self.clients[client].name, f"evaluation: {why}")
        return answers

    def _usable(self, position: Position, client: int, start: Vector, vector: Vector, samples: int) -> Vector:
        """The model of a reply, or an empty one if it cannot be used."""
        why = "wrong samples" if samples != self._samples[client] else vector_refusal(vector, start, self.layout)
        if why is None:
            return vector
        self._note(position, self.clients[client].name, f"its reply was refused: {why}")
        return np.zeros(0, dtype=self.layout.dtype)

    def _train(
        self, start: Vector, position: Position, nodes: Mapping[int, int], steps: int | None
    ) -> dict[int, tuple[Vector, int]]:
        """What those answered that did, not yet checked."""
        record = arrays_record(self.layout, start)
        messages = {one: self._message(record, position, one, node, TRAIN, steps) for one, node in nodes.items()}
        answers, failed = self._exchange.ask(
            messages, self._patience.timeout, lambda reply: read_model(reply, self.layout)
        )
        for client, why in sorted(failed.items()):
            self._note(position, self.clients[client].name, why)
        return answers

    def _online(self, position: Position, clients: list[int]) -> dict[int, int]:
        """The nodes of those that may be asked and are there, sorted; who is not there is noted."""
        asked = self._may_ask(clients)
        nodes = self._nodes(asked)
        for one in asked:
            if one not in nodes:
                self._note(position, self.clients[one].name, "its node is not there")
        return dict(sorted(nodes.items()))

    def _message(
        self,
        record: ArrayRecord | Sequence[ArrayRecord] | None,
        position: Position,
        client: int,
        node: int,
        kind: str,
        steps: int | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> Message:
        asked = Asked(position, client, steps or self.clients[client].local_steps, self._blueprint.plan)
        return model_message(record, asked, node, kind, self._patience.timeout, more)

    def _nodes(self, clients: list[int]) -> dict[int, int]:
        found = self._roster.nodes([self.clients[one].name for one in clients])
        return {one: found[self.clients[one].name] for one in clients if self.clients[one].name in found}

    def _note(self, position: Position, client: str, what: str) -> None:
        self._incidents.append(Incident(position.branch, position.round, client, what))

    def _empty(self, start: Vector, want_gram: bool, rejections: tuple[Rejection, ...] = ()) -> RoundResult:
        nobody, gram = np.zeros(0, dtype=np.int64), np.zeros((0, 0)) if want_gram else None
        return RoundResult(start, nobody, nobody, np.zeros(0), 0.0, 0.0, gram, rejections=rejections)

    def _checked_model(self, model: Vector) -> Vector:
        vector = np.array(model, dtype=self.layout.dtype)
        if vector.shape != (self.layout.size,):
            raise RoundRejectedError(f"a model of {self.layout.size} parameters was expected, found {vector.shape}")
        return vector


def _evaluation(clients: ClientIndices, scores: Sequence[Score]) -> Evaluation:
    return Evaluation(
        np.asarray(clients, dtype=np.int64).copy(),
        np.array([one[0] for one in scores], dtype=np.int64),
        np.array([one[1] for one in scores], dtype=np.int64),
        np.array([one[2] for one in scores], dtype=np.float64),
    )
