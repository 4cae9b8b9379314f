"""Noisy Scratch: a fresh initial model plus the noise that sifu would have used.

A control: what sifu gains over it comes from the history, what it gains over Scratch comes from a larger initial
scale. No one's data touched the model it starts from, so with noise of a given size it is exact like Scratch. With
sigma auto the forgotten clients' influence decides the size, which shows in the model: then it is conditional.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from sifu.core.engine import Engine
from sifu.core.method_info import METHOD_INFOS, MethodInfo
from sifu.core.premises import Premise, chosen_noise_premise
from sifu.core.request_terms import RequestTerms
from sifu.methods.base import Start, noised_model
from sifu.methods.scratch import Scratch
from sifu.methods.sifu import Sifu
from sifu.planning.plan import Plan
from sifu.run.run_view import RunView
from sifu.theory.calibration import hidden_sensitivity
from sifu.theory.rollback import Exposure


class NoisyScratch(Scratch):
    """Scratch from a noised initial model."""

    info: ClassVar[MethodInfo] = METHOD_INFOS["noisy_scratch"]

    def plan(self, view: RunView, terms: RequestTerms) -> Plan:
        """Scratch with the noise asked for; with auto, the noise sifu would really add (none if it would add none)."""
        noise_std = Sifu().plan(view, terms).noise_std if terms.sigma == "auto" else terms.sigma
        star = hidden_sensitivity(noise_std, terms.multiplier)
        return replace(super().plan(view, terms), noise_std=noise_std, psi_star=star)

    def premises(
        self,
        view: RunView,
        clients: Sequence[int],
        exposures: Sequence[Exposure],
        depth: int,
        terms: RequestTerms,
    ) -> tuple[Premise, ...]:
        """Those of Scratch, and who decided the size of the noise."""
        return (
            chosen_noise_premise(terms.sigma == "auto"),
            *super().premises(view, clients, exposures, depth, terms),
        )

    def starting_model(self, view: RunView, plan: Plan, engine: Engine) -> Start:
        """A fresh model of this branch plus N(0, sigma^2 I)."""
        return Start(noised_model(view, plan, engine.initial_model(plan.order)))
