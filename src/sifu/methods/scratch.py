"""Method `scratch`: it trains a fresh model without the client, which is exact and as slow as the first training."""

from __future__ import annotations

from typing import ClassVar

from sifu.core.method_info import METHOD_INFOS, MethodInfo
from sifu.core.premises import Premise, before_training_premises, record_premises
from sifu.core.request_terms import Terms
from sifu.methods.base import Claim, Method, plan_from
from sifu.planning.plan import Plan
from sifu.run.run_view import RunView


class Scratch(Method):
    """Method that restarts from a model that no client's data influenced."""

    info: ClassVar[MethodInfo] = METHOD_INFOS["scratch"]

    def plan(self, view: RunView, terms: Terms) -> Plan:
        """Plan a fresh model, without noise or charges."""
        return plan_from(self, view, terms, None)

    def premises(self, claim: Claim) -> tuple[Premise, ...]:
        """Return the premises about the steps before training; no client's data influenced the fresh model."""
        view = claim.view
        return (*record_premises(view.record_history), *before_training_premises(view.facts, view.rate_source))
