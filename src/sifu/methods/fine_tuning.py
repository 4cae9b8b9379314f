"""Fine-tuning: go on from the current model without the client, and hope. A heuristic: it proves nothing."""

from __future__ import annotations

from typing import ClassVar

from sifu.core.engine import Engine
from sifu.core.method_info import METHOD_INFOS, MethodInfo
from sifu.core.request_terms import RequestTerms
from sifu.methods.base import Method, Start, plan_in_place
from sifu.planning.plan import Plan
from sifu.run.run_view import RunView


class FineTuning(Method):
    """The current model, trained on without the client."""

    info: ClassVar[MethodInfo] = METHOD_INFOS["fine_tuning"]

    def plan(self, view: RunView, terms: RequestTerms) -> Plan:
        """Nothing is undone, nothing is added."""
        return plan_in_place(self, view, terms)

    def starting_model(self, view: RunView, plan: Plan, engine: Engine) -> Start:
        """The current model as it is."""
        return Start(view.reader.load_model(view.reader.tip))
