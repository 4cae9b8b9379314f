"""DP: training clips every update and adds noise to it, so a request only continues without the client.

The run must have been trained that way (`server.clip`, `server.noise`). The plan states two accountings. The paper's
considers one update in one round. Ours composes every round that the client took part in, over the whole recorded
history (`sifu.theory.calibration` derives it and explains why sampling does not count). Only ours determines the level,
so nothing is certified if it exceeds the budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from sifu import InputError, RequestTerms
from sifu.core.method_info import MethodInfo
from sifu.core.premises import (
    UNBROKEN,
    Premise,
    RateSource,
    RecordHistory,
    before_training_premises,
    counterfactual_premise,
    noise_premise,
    outside_premises,
    record_premises,
    replies_premise,
)
from sifu.methods.base import Claim, Method, plan_from
from sifu.planning.plan import Plan
from sifu.run.run_view import RunView
from sifu.theory import facts as fact
from sifu.theory.calibration import TrainingNoise, composed_ratio, promise_of
from sifu.theory.facts import TrainingFacts
from sifu.theory.rollback import Subject


def training_noise_premises(
    facts: TrainingFacts,
    promised: TrainingNoise,
    *,
    epsilon: float,
    rate_source: RateSource,
    replayed: bool = False,
    left_out: int = 0,
    history: RecordHistory = UNBROKEN,
) -> tuple[Premise, ...]:
    """Return every premise of the promise of training noise (`sifu.theory.calibration`), in a fixed order.

    `replayed` means that stored updates were replayed on the path to the model: they were summed with other weights
    than the counted ones, and calibration is neither clipped nor noised.
    """
    composed = promised.epsilon_composed
    scale = 10.0 ** (3 - math.floor(math.log10(composed))) if composed > 0.0 else 1.0
    # rounded up to four digits
    within, reached = composed <= epsilon, {"reached": f"{math.ceil(composed * scale) / scale:.6g}"}
    return (
        Premise("clipping", "met", values={"clip": facts.clip, "noise": facts.noise}),
        # Without a client the average of a round would have noise of another size (docs/theory.md, section 10).
        Premise("training noise", "failed" if promised.counted_rounds else "met"),
        Premise("history", "failed" if replayed else "met"),
        Premise("budget", "met" if within else "failed", values=reached if within else reached | {"epsilon": epsilon}),
        counterfactual_premise(facts.participation.independent, separate=facts.identity != fact.IN_PROCESS),
        *(premise for premise in outside_premises(facts) if premise.name == "schedule"),
        *replies_premise(left_out),
        *record_premises(history),
        noise_premise(facts.noise_source),
        *before_training_premises(facts, rate_source),
        Premise("honest reports", "trusted", "counts"),
    )


class Dp(Method):
    """Method that continues from the current model of a training with clipped and noised updates."""

    info: ClassVar[MethodInfo] = MethodInfo(
        "dp",
        "rely on the clipping and noise of training, go on without the client",
        certifies=True,
        protection="training noise",
        starts_from="current",
        control=True,
        preserves=20,
    )

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
        """Plan to continue from the current model without noise; the noise of training must suffice."""
        plan = plan_from(self, view, terms, view.path.tip)
        promised = self.training_noise(view, plan.subjects, terms)
        note = (
            f"epsilon at delta {terms.delta:g}: {promised.epsilon_one_round:.4g} for one round, as the paper counts; "
            f"{promised.epsilon_composed:.4g} for the {promised.counted_rounds} rounds together, which is what holds"
        )
        return replace(plan, training_noise=promised, notes=(note,))

    def training_noise(self, view: RunView, subjects: Sequence[Subject], terms: RequestTerms) -> TrainingNoise:
        """Compose every recorded round of each subject; return the largest result."""
        ratios, rounds = zip(*(self._composed(view, subject.clients) for subject in subjects), strict=True)
        facts = view.facts
        return promise_of(
            max(ratios), max(rounds), facts.clip, facts.noise, terms.epsilon, terms.delta, terms.calibration
        )

    def _composed(self, view: RunView, clients: Sequence[int]) -> tuple[float, int]:
        """Return mu of all rounds that a set took part in, including rounds rolled back later, and their number."""
        own: dict[int, int] = {}
        rows = view.reader.participation(clients)
        for node, samples in zip(rows.nodes.tolist(), rows.samples.tolist(), strict=True):
            own[node] = own.get(node, 0) + samples
        sums = np.array([view.round_sums[node] for node in own], dtype=np.int64).reshape(-1, 3)
        mine = np.array(list(own.values()), dtype=np.int64)
        return composed_ratio(mine, sums[:, 0], sums[:, 1].astype(float), sums[:, 2], view.facts.noise), len(own)

    def premises(self, claim: Claim) -> tuple[Premise, ...]:
        """Return the premises of training noise, which do not require a regular loss."""
        view, clients = claim.view, set(claim.clients)
        subjects = [exposure.subject for exposure in claim.exposures if clients.issuperset(exposure.subject.clients)]
        return training_noise_premises(
            view.facts,
            self.training_noise(view, subjects, claim.terms),
            epsilon=claim.terms.epsilon,
            rate_source=view.rate_source(claim.gone),
            replayed=view.path.unbounded_from <= claim.depth,
            left_out=view.replies_left_out(claim.depth),
            history=view.record_history,
        )
