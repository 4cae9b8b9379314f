"""Fine-tuning: go on from the current model without the client, and hope. A heuristic: it proves nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from sifu.core.engine import Engine
from sifu.core.method_info import METHOD_INFOS, MethodInfo
from sifu.core.premises import Premise
from sifu.core.request_terms import RequestTerms
from sifu.methods.base import Method, Start, heuristic_premises
from sifu.methods.in_place import plan_in_place
from sifu.planning.plan import Plan
from sifu.record.run_view import RunView
from sifu.theory.rollback import Exposure


class FineTuning(Method):
    """The current model, trained on without the client."""

    info: ClassVar[MethodInfo] = METHOD_INFOS["fine_tuning"]

    def plan(self, view: RunView, terms: RequestTerms) -> Plan:
        """Nothing is undone, nothing is added."""
        subjects = view.new_subjects(terms, view.next_order)
        exposures = view.exposures([*subjects, *view.earlier_subjects()])
        premises = self.premises(view, view.indices(terms.clients), exposures, view.path.tip, terms)
        return plan_in_place(self, view, terms, subjects, exposures, premises)

    def premises(
        self,
        view: RunView,
        clients: Sequence[int],
        exposures: Sequence[Exposure],
        depth: int,
        terms: RequestTerms,
    ) -> tuple[Premise, ...]:
        """That it is a heuristic decides everything."""
        return heuristic_premises(view, clients, self.info.name)

    def starting_model(self, view: RunView, plan: Plan, engine: Engine) -> Start:
        """The current model as it is."""
        return Start(view.reader.load_model(view.reader.tip))
