"""Scratch: a fresh initial model, trained without the client. Exact, and as slow as training was.

Noisy Scratch: a fresh initial model plus the noise that sifu would have used.

A control: what sifu gains over it comes from the history, what it gains over Scratch comes from a larger initial
scale. No one's data touched the model it starts from, so with noise of a given size it is exact like Scratch. With
sigma auto the forgotten clients' influence decides the size, which shows in the model: then it is conditional.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from sifu.core.engine import Engine
from sifu.core.method_info import METHOD_INFOS, MethodInfo
from sifu.core.premises import Premise, before_training_premises, chosen_noise_premise, level_of, record_premises
from sifu.core.request_terms import RequestTerms
from sifu.methods.base import Claim, Method, Start, noised_model, plan_from
from sifu.methods.sifu import Sifu
from sifu.planning.forecast import Forecast
from sifu.planning.plan import Plan, PlannedCharge
from sifu.run.run_view import RunView
from sifu.theory.calibration import hidden_sensitivity


class Scratch(Method):
    """Start again from a model that no one's data has touched."""

    info: ClassVar[MethodInfo] = METHOD_INFOS["scratch"]

    def plan(self, view: RunView, terms: RequestTerms) -> Plan:
        """No node, no noise, nothing charged to anyone."""
        plan, forecast = plan_from(self, view, terms, None), Forecast(view, terms)
        predicted = forecast.scratch()
        return replace(
            plan,
            psi_star=0.0 if terms.sigma == "auto" else hidden_sensitivity(terms.sigma, terms.multiplier),
            charges=tuple(PlannedCharge(subject, 0.0, 0.0) for subject in plan.subjects),
            level=level_of(plan.premises, exact=True, fresh=True),
            predicted_rounds=plan.scratch_rounds,
            predicted_interval=predicted.interval if predicted else None,
            expected_rounds=forecast.expected(0, 0.0),
            untouched=True,
        )

    def premises(self, claim: Claim) -> tuple[Premise, ...]:
        """No one's data touched the fresh model, so only what came before training matters to its level.

        An automatic rate is found anew for those who stay, whichever client leaves, so it tells nothing of who left.
        """
        view = claim.view
        source = "anew" if view.finds_rate_anew(claim.terms) else view.rate_source(claim.clients)
        return (*record_premises(view.record_history), *before_training_premises(view.facts, source))

    def starting_model(self, view: RunView, plan: Plan, engine: Engine) -> Start:
        """A fresh model of this branch."""
        return Start(engine.initial_model(plan.order))


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
        return (chosen_noise_premise(claim.terms.sigma == "auto"), *super().premises(claim))

    def starting_model(self, view: RunView, plan: Plan, engine: Engine) -> Start:
        """A fresh model of this branch plus N(0, sigma^2 I)."""
        return Start(noised_model(view, plan, engine.initial_model(plan.order)))
