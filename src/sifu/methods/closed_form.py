"""Closed form: the client's statistics are taken out of the sum, and the head is solved again (docs/theory.md,
section 14).

Whole numbers have no rounding, so the sum is bit for bit that of a federation that never had the client, and the head
is a function of it: exact, without noise, in no round where every client's statistics are kept and in one otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from sifu.core.method_info import METHOD_INFOS, MethodInfo
from sifu.core.premises import Premise, closed_form_premises, record_premises
from sifu.core.request_terms import RequestTerms
from sifu.methods.scratch import Scratch
from sifu.planning.plan import Plan
from sifu.record.run_view import RunView
from sifu.theory.rollback import Exposure


class ClosedForm(Scratch):
    """Subtract, and solve again: Scratch, from a sum that is at hand."""

    info: ClassVar[MethodInfo] = METHOD_INFOS["closed_form"]

    def plan(self, view: RunView, terms: RequestTerms) -> Plan:
        """A fresh head from the sum over those who stay; nothing is charged to anyone."""
        return replace(
            super().plan(view, terms),
            predicted_rounds=self._rounds(view),
            scratch_rounds=1,
            notes=(self._note(view, 0 if terms.records else len(terms.clients)), *self._cache_note(view)),
        )

    def _rounds(self, view: RunView) -> int:
        """Rounds of communication: none where everyone's statistics are at hand."""
        own = {row.clients[0] for row in view.reader.statistics().values() if not row.is_sum}
        return 0 if set(view.active.tolist()) <= own else 1

    def _cache_note(self, view: RunView) -> tuple[str, ...]:
        folder = view.spec.features.cache
        if not folder:
            return ()
        return (f"{folder} (features.cache) keeps features of whoever leaves: no request erases it, so delete it, too",)

    def _note(self, view: RunView, leaving: int) -> str:
        size, staying = self.bytes_kept(view), len(view.clients) - len(view.forgotten) - leaving
        if self._rounds(view) == 0:
            return (
                f"the statistics of the {staying} clients that stay are kept, {size / 1e6:.1f} MB on disk; "
                'keep.statistics = "sum" keeps one file, and asks everyone who stays again'
            )
        return f"the {staying} clients that stay send their statistics again: one round, no training"

    def premises(
        self,
        view: RunView,
        clients: Sequence[int],
        exposures: Sequence[Exposure],
        depth: int,
        terms: RequestTerms,
    ) -> tuple[Premise, ...]:
        """What came before the sum, and that clients sent what they had."""
        return (*record_premises(view.record_history), *closed_form_premises(view.facts))

    def bytes_kept(self, view: RunView) -> int:
        """The kept statistics."""
        return sum(row.bytes for row in view.reader.statistics().values())
