"""Scratch: a fresh initial model, trained without the client. Exact, and as slow as training was."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from sifu.core.method_info import METHOD_INFOS, MethodInfo
from sifu.core.premises import Premise, before_training_premises, record_premises
from sifu.core.request_terms import RequestTerms
from sifu.methods.base import Claim, Method, plan_from
from sifu.planning.plan import Plan
from sifu.run.run_view import RunView
from sifu.theory.calibration import hidden_sensitivity


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
