"""Method `closed_form`: a head solved again from the sum without the client's statistics (docs/theory.md, section 14).

Integer sums have no rounding error, so the sum equals, bit for bit, the sum of a federation that never had the client.
The head depends only on the sum, so the result is exact without noise. A request needs no round if the statistics of
every remaining client are kept, and one round otherwise.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from sifu.core.method_info import METHOD_INFOS, MethodInfo
from sifu.core.premises import Premise, closed_form_premises, noise_premise, record_premises
from sifu.core.request_terms import Terms
from sifu.methods.base import Claim
from sifu.methods.scratch import Scratch
from sifu.planning.plan import Plan
from sifu.run.kept_statistics import own_statistics
from sifu.run.run_view import RunView


class ClosedForm(Scratch):
    """Scratch for a closed-form head, which is solved again from the sum without the leaving clients."""

    info: ClassVar[MethodInfo] = METHOD_INFOS["closed_form"]

    def plan(self, view: RunView, terms: Terms) -> Plan:
        """Plan a fresh head from the sum over the remaining clients, with no charges."""
        folder = view.spec.features.cache
        rounds = 0 if set(view.active.tolist()) <= own_statistics(view).rows.keys() else 1
        cached = f"{folder} (features.cache) keeps features of clients that leave: no request erases it, so delete it"
        return replace(
            super().plan(view, terms),
            rounds=rounds,
            notes=(
                self._note(view, 0 if terms.records else len(terms.clients), rounds),
                *((cached,) if folder else ()),
            ),
        )

    def _note(self, view: RunView, leaving: int, rounds: int) -> str:
        staying = len(view.clients) - len(view.forgotten) - leaving
        if rounds == 0:
            return (
                f"the statistics of the {staying} clients that stay are kept, so no client that stays is asked; "
                'keep.statistics = "sum" keeps only their sum, and asks all of them at every request'
            )
        return f"the {staying} clients that stay send their statistics again: one round, no training"

    def premises(self, claim: Claim) -> tuple[Premise, ...]:
        """Return the premises about the record, the features and the statistics, and about noise on releases."""
        view = claim.view
        noise = (noise_premise(view.noise_source),) if view.spec.release.noise != 0.0 else ()
        return (*record_premises(view.record_history), *closed_form_premises(view.facts), *noise)
