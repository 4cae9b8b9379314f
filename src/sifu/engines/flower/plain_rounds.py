"""The steps of a round whose server sees every client's model: ask, check each reply, average those that may be used.

A round with fewer than `min_replies` answers is dropped whole: it has no participants and leaves the model as it was.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from sifu.core.engine import Rejection, RoundResult
from sifu.core.layout import ModelLayout
from sifu.core.replies import Reply
from sifu.core.round import AcceptedModels, Average, RoundSetup, gate_replies, run_round
from sifu.engines.flower.averaging import average_replies
from sifu.engines.flower.messenger import Messenger
from sifu.theory.arrays import Integers
from sifu.theory.facts import ClientProfile, TrainingFacts
from sifu.theory.participation import ClientIndices, base_key
from sifu.theory.rounding import norm_up


class FlowerRound:
    """What every round on Flower knows: whom it speaks with and how participants are drawn."""

    def __init__(self, messenger: Messenger, facts: TrainingFacts) -> None:
        self._messenger, self.facts = messenger, facts
        self.participation_key = base_key(messenger.blueprint.seed, "participation")

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

    def run(self, setup: RoundSetup) -> RoundResult:
        """The whole round."""
        return run_round(self, setup)

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
