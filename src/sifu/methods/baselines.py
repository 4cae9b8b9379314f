"""The baselines of the paper's comparison: Scratch, Fine-tuning, Last and DP.

Scratch: a fresh initial model, trained without the client. Exact, and as slow as training was.

Noisy Scratch: a fresh initial model plus the noise that sifu would have used.

A control: what sifu gains over it comes from the history, what it gains over Scratch comes from a larger initial
scale. No one's data touched the model it starts from, so with noise of a given size it is exact like Scratch. With
sigma auto the forgotten clients' influence decides the size, which shows in the model: then it is conditional.

Fine-tuning: go on from the current model without the client, and hope. A heuristic: it proves nothing.

Last: noise on the current model, sized by the clients' Psi there; SIFU without the rollback.

The paper adapts Descent-to-Delete (Neel, Roth & Sharifi-Malvajerdi 2021) this way. It is the Gaussian mechanism at
the current model, so it is charged and certified as sifu is; it mostly drowns what was learned.

`sigma = "auto"` takes the least noise that the budgets of the new clients, and of everyone forgotten earlier,
allow at the current model, whatever it destroys. That figure says what Psi is, and a public certificate
states sigma; so where something is certified it is raised to the next power of 1.1, and where nothing is (the paper's
own accounting, seeded noise) it is exactly the least. A number is used as given, and refused if it is too small.

DP: training itself clips every update and adds noise to it, so a request just continues without the client.

The run must have been trained that way (`server.clip`, `server.noise`). Two accountings are stated. The paper's looks
at one update in one round. The honest one composes every round the client really took part in, over the whole
recorded history (`sifu.theory.calibration` derives it and says why sampling is not counted); it alone decides the
level, so a budget that it exceeds certifies nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from sifu.core.method_info import METHOD_INFOS, MethodInfo
from sifu.core.premises import (
    Premise,
    before_training_premises,
    level_of,
    record_premises,
    training_noise_premises,
)
from sifu.core.request_terms import RequestTerms
from sifu.errors import InputError, NotCertifiableError
from sifu.methods.base import Claim, Method, plan_from, premises_of
from sifu.methods.sifu import Sifu
from sifu.planning.plan import Plan, on_ladder
from sifu.run.run_view import RunView
from sifu.theory.calibration import TrainingNoise, composed_ratio, hidden_sensitivity, promise_of
from sifu.theory.rollback import Subject, least_noise


class Scratch(Method):
    """Start again from a model that no one's data has touched."""

    info: ClassVar[MethodInfo] = METHOD_INFOS["scratch"]

    def plan(self, view: RunView, terms: RequestTerms) -> Plan:
        """No node, no noise, nothing charged to anyone."""
        psi_star = 0.0 if terms.sigma == "auto" else hidden_sensitivity(terms.sigma, terms.multiplier)
        return replace(plan_from(self, view, terms, None), psi_star=psi_star)

    def premises(self, claim: Claim) -> tuple[Premise, ...]:
        """No one's data touched the fresh model, so only what came before training matters to its level.

        An automatic rate is found anew for those who stay, whichever client leaves, so it tells nothing of who left.
        """
        view = claim.view
        source = "anew" if view.finds_rate_anew(claim.terms) else view.rate_source(claim.gone)
        return (*record_premises(view.record_history), *before_training_premises(view.facts, source))


class NoisyScratch(Scratch):
    """Scratch from a noised initial model."""

    info: ClassVar[MethodInfo] = METHOD_INFOS["noisy_scratch"]

    def plan(self, view: RunView, terms: RequestTerms) -> Plan:
        """Scratch with the noise asked for; with auto, the noise sifu would really add (none if it would add none)."""
        noise_std = Sifu().plan(view, terms).noise_std if terms.sigma == "auto" else terms.sigma
        star = hidden_sensitivity(noise_std, terms.multiplier)
        return replace(super().plan(view, terms), noise_std=noise_std, psi_star=star)

    def premises(self, claim: Claim) -> tuple[Premise, ...]:
        """Those of Scratch, and who decided the size of the noise."""
        size = Premise("noise size", "assumed" if claim.terms.sigma == "auto" else "trusted")
        return (size, *super().premises(claim))


class FineTuning(Method):
    """The current model, trained on without the client."""

    info: ClassVar[MethodInfo] = METHOD_INFOS["fine_tuning"]

    def plan(self, view: RunView, terms: RequestTerms) -> Plan:
        """Nothing is undone, nothing is added."""
        return plan_from(self, view, terms, view.path.tip)


NOT_ENOUGH = (
    "no noise on the current model is enough: the budget of a client forgotten earlier is used up there, or a client's "
    "influence is not bounded"
)


class Last(Method):
    """Calibrated Gaussian noise on the current model."""

    info: ClassVar[MethodInfo] = METHOD_INFOS["last"]

    def plan(self, view: RunView, terms: RequestTerms) -> Plan:
        """The current model, with the least noise that every budget allows there, or the larger one asked for."""
        subjects = view.new_subjects(terms, view.next_order)
        exposures = view.exposures([*subjects, *view.earlier_subjects()])
        tip = view.path.tip
        needed = least_noise(exposures, tip, view.next_order)
        if math.isinf(needed):
            raise NotCertifiableError(
                f"{view.erased_note or NOT_ENOUGH}. Nothing was changed. Use method sifu, which goes back, or "
                "scratch; where the earlier requests have scope latest, their budgets are not used up"
            )
        premises = premises_of(self, Claim(view, view.leaving(terms.clients), exposures, tip, terms, view.forgotten))
        untouched = needed == 0.0 and not view.were_refused(terms.clients, tip)
        certified = level_of(premises, exact=untouched) != "none"
        noise_std = on_ladder(needed) if certified else needed
        if needed > 0.0 and terms.sigma != "auto":
            noise_std = terms.sigma
            if noise_std < needed:
                raise NotCertifiableError(
                    f"sigma = {terms.sigma:g} is not enough on the current model, {needed:.6g} is: nothing was "
                    "changed. Use sigma auto or a larger one, or method sifu, which goes back to where it is enough"
                )
        return plan_from(self, view, terms, tip, noise_std)


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
        plan = plan_from(self, view, terms, view.path.tip)
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
            rate_source=view.rate_source(claim.gone),
            replayed=view.path.unbounded_from <= claim.depth,
            left_out=view.replies_left_out(claim.depth),
            history=view.record_history,
        )
