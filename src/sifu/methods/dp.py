"""DP: training itself clips every update and adds noise to it, so a request just continues without the client.

The run must have been trained that way (`server.clip`, `server.noise`). Two accountings are stated. The paper's looks
at one update in one round. The honest one composes every round the client really took part in, over the whole
recorded history (`sifu.theory.calibration` derives it and says why sampling is not counted); it alone decides the
level, so a budget that it exceeds certifies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from sifu.core.engine import Engine
from sifu.core.method_info import METHOD_INFOS, MethodInfo
from sifu.core.premises import Premise, training_noise_premises
from sifu.core.request_terms import RequestTerms
from sifu.errors import InputError
from sifu.methods.base import Claim, Method, Start, plan_in_place
from sifu.planning.plan import Plan
from sifu.run.run_view import RunView
from sifu.theory.calibration import TrainingNoise, composed_ratio, promise_of
from sifu.theory.rollback import Subject


class Dp(Method):
    """The current model of a training with clipped and noised updates."""

    info: ClassVar[MethodInfo] = METHOD_INFOS["dp"]

    def check_run(self, view: RunView) -> None:
        """Refuse a run whose training added no noise."""
        facts = view.facts
        if facts.clip == 0.0 or facts.noise == 0.0:
            raise InputError(
                f"method dp needs a run trained with clipped and noised updates; this one has server.clip = "
                f"{facts.clip:g} and server.noise = {facts.noise:g}. Train with both above 0, for example "
                "server.clip = 0.5 and server.noise = 1.0"
            )

    def plan(self, view: RunView, terms: RequestTerms) -> Plan:
        """Nothing is undone and nothing added; the noise of training has to be enough."""
        self.check_run(view)
        plan = plan_in_place(self, view, terms)
        promised = self.training_noise(view, plan.subjects, terms)
        note = (
            f"epsilon at delta {terms.delta:g}: {promised.epsilon_one_round:.4g} for one round, as the paper counts; "
            f"{promised.epsilon_composed:.4g} for the {promised.counted_rounds} rounds together, which is what holds"
        )
        return replace(plan, training_noise=promised, notes=(note,))

    def training_noise(self, view: RunView, subjects: Sequence[Subject], terms: RequestTerms) -> TrainingNoise:
        """Every recorded round of each subject composed; the largest of them counts."""
        ratios, rounds = zip(*(self._composed(view, subject.clients) for subject in subjects), strict=True)
        facts = view.facts
        return promise_of(
            max(ratios), max(rounds), facts.clip, facts.noise, terms.epsilon, terms.delta, terms.calibration
        )

    def _composed(self, view: RunView, clients: Sequence[int]) -> tuple[float, int]:
        """mu of all rounds a set took part in, cut off later or not, and how many there were."""
        own: dict[int, int] = {}
        rows = view.reader.participation(clients)
        for node, samples in zip(rows.nodes.tolist(), rows.samples.tolist(), strict=True):
            own[node] = own.get(node, 0) + samples
        sums = np.array([view.round_sums[node] for node in own], dtype=np.int64).reshape(-1, 3)
        mine = np.array(list(own.values()), dtype=np.int64)
        return composed_ratio(mine, sums[:, 0], sums[:, 1].astype(float), sums[:, 2], view.facts.noise), len(own)

    def premises(self, claim: Claim) -> tuple[Premise, ...]:
        """Those of noise in training; the loss need not be regular."""
        view, clients = claim.view, set(claim.clients)
        subjects = [exposure.subject for exposure in claim.exposures if clients.issuperset(exposure.subject.clients)]
        return training_noise_premises(
            view.facts,
            self.training_noise(view, subjects, claim.terms),
            epsilon=claim.terms.epsilon,
            rate_source=view.rate_source(claim.clients),
            replayed=view.path.unbounded_from <= claim.depth,
            left_out=view.replies_left_out(claim.depth),
            history=view.record_history,
        )

    def starting_model(self, view: RunView, plan: Plan, engine: Engine) -> Start:
        """The current model as it is."""
        return Start(view.reader.load_model(view.reader.tip))
