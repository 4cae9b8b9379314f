"""Fine-tuning: go on from the current model without the client, and hope. A heuristic: it proves nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from sifu.core.certificate import Protection
from sifu.core.engine import Engine
from sifu.core.premises import Premise
from sifu.core.rollback import Exposure
from sifu.core.terms import RequestTerms
from sifu.methods.in_place import plan_in_place
from sifu.methods.method import Method, Start, StartsFrom, heuristic_premises
from sifu.methods.plan import Plan
from sifu.methods.view import RunView


class FineTuning(Method):
    """The current model, trained on without the client."""

    name: ClassVar[str] = "fine_tuning"
    summary: ClassVar[str] = "go on from the current model without the client: fast, proves nothing"
    certifies: ClassVar[bool] = False
    protection: ClassVar[Protection] = "nothing"
    starts_from: ClassVar[StartsFrom] = "current"

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
        return heuristic_premises(view, clients, self.name)

    def starting_model(self, view: RunView, plan: Plan, engine: Engine) -> Start:
        """The current model as it is."""
        return Start(view.reader.load_model(view.reader.tip))
