"""One round of several groups in the same messages: each member is sent its own group's model.

No client is in two groups, so the members of all groups are asked at once and the answers sorted by group; what a group
makes of its answers is what it would make of them alone, bit for bit. S groups thus cost the time of one. In masked
rounds no drift is requested: rounds of a group are recorded by its model, and Psi begins after the merge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from sifu.core.engine import Rejection, RoundResult
from sifu.core.layout import ModelPieces
from sifu.core.replies import Reply
from sifu.core.round import RoundSetup, draw, run_round
from sifu.engines.flower.messenger import Messenger
from sifu.engines.flower.server_rounds import MaskedRound, OpenRound, Prepared
from sifu.engines.flower.wire import TRAIN, read_masked, read_model, read_ready
from sifu.theory.arrays import Floats, Words
from sifu.theory.facts import TrainingFacts
from sifu.theory.participation import ClientIndices

if TYPE_CHECKING:
    from flwr.app import Message


def run_groups_together(
    steps: OpenRound | MaskedRound, messenger: Messenger, setups: Sequence[RoundSetup]
) -> list[RoundResult]:
    """The round that each setup asks for, all of them at one place and of different clients."""
    if not setups:
        return []
    drawn = [draw(steps.facts.participation, steps.participation_key, setup) for setup in setups]
    nodes = messenger.online(setups[0].position, sorted(int(client) for members in drawn for client in members))
    members_there = [
        {int(client): nodes[int(client)] for client in members if int(client) in nodes} for members in drawn
    ]
    if isinstance(steps, MaskedRound):
        return _masked(steps, messenger, setups, drawn, members_there)
    return _open(steps, messenger, setups, members_there)


def _open(
    steps: OpenRound, messenger: Messenger, setups: Sequence[RoundSetup], members_there: Sequence[Mapping[int, int]]
) -> list[RoundResult]:
    messages: dict[int, Message] = {}
    for setup, nodes in zip(setups, members_there, strict=True):
        model = messenger.blueprint.record(setup.start)
        messages |= {
            client: messenger.message(model, setup.position, client, node, TRAIN) for client, node in nodes.items()
        }
    answers = messenger.ask(
        messages, lambda reply: read_model(reply, steps.layout), setups[0].position, closing=True, groups=members_there
    )
    return [run_round(_AnsweredRound(messenger, steps.facts, answers), setup) for setup in setups]


class _AnsweredRound(OpenRound):
    """A round whose answers have already been received."""

    def __init__(
        self, messenger: Messenger, facts: TrainingFacts, answers: Mapping[int, tuple[ModelPieces, int]]
    ) -> None:
        super().__init__(messenger, facts)
        self._answers = answers

    def collect(self, setup: RoundSetup, drawn: ClientIndices) -> list[Reply]:
        """The answers of those who were drawn."""
        answered = [client for client in drawn.tolist() if client in self._answers]
        return [
            Reply(client, setup.position, self._answers[client][1], self._answers[client][0], owned=True)
            for client in answered
        ]


def _masked(
    steps: MaskedRound,
    messenger: Messenger,
    setups: Sequence[RoundSetup],
    drawn: Sequence[ClientIndices],
    members_there: Sequence[Mapping[int, int]],
) -> list[RoundResult]:
    position = setups[0].position
    begun = [steps.preparation(setup, nodes) for setup, nodes in zip(setups, members_there, strict=True)]
    ready = messenger.ask(
        _together([messages for _, messages in begun]), read_ready, position, closing=True, groups=members_there
    )
    accepted: list[Prepared | None] = []
    for setup, members, (prepared, messages) in zip(setups, drawn, begun, strict=True):
        own = {client: ready[client] for client in messages if client in ready}
        passed = steps.gate(setup, members, replace(prepared, ready=own))[0] if members.size else None
        accepted.append(passed)
    messages = _together(
        [
            steps.masked_messages(setup, passed)
            for setup, passed in zip(setups, accepted, strict=True)
            if passed is not None
        ]
    )
    size = steps.layout.size + 1
    words = messenger.ask(messages, lambda reply: read_masked(reply, size), position)
    results = []
    for setup, passed in zip(setups, accepted, strict=True):
        total = None if passed is None else steps.total(setup, passed, words)
        results.append(run_round(_SummedRound(messenger, steps.facts, passed, total), setup))
    return results


class _SummedRound(MaskedRound):
    """A masked round whose sum has already been received, or that was dropped."""

    def __init__(
        self, messenger: Messenger, facts: TrainingFacts, accepted: Prepared | None, total: Words | None
    ) -> None:
        super().__init__(messenger, facts)
        self._accepted, self._total = accepted, total

    def collect(self, setup: RoundSetup, drawn: ClientIndices) -> Prepared:
        """The answers already received; no client is asked again."""
        return self._accepted or Prepared({}, self.preparation(setup, {})[0].fixed, {})

    def gate(
        self, setup: RoundSetup, drawn: ClientIndices, collected: Prepared
    ) -> tuple[Prepared | None, tuple[Rejection, ...]]:
        """What passed already."""
        return self._accepted, ()

    def _sum(self, setup: RoundSetup, accepted: Prepared) -> Words | None:
        return self._total

    def _drifts(self, setup: RoundSetup, accepted: Prepared, mean: Floats) -> Floats:
        return np.full(accepted.participants.size, np.inf)


def _together(messages: Sequence[Mapping[int, Message]]) -> dict[int, Message]:
    return {client: message for of_group in messages for client, message in of_group.items()}
