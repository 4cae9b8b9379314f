"""Method `closed_form`: a head solved again from the sum without the client's statistics (docs/theory.md, section 14).

Integer sums have no rounding error, so the sum equals, bit for bit, the sum of a federation that never had the client.
The head depends only on the sum, so the result is exact without noise. A request needs no round if the statistics of
every remaining client are kept, and one round otherwise. If groups tune the network under the head, the networks of
groups that the client belonged to are erased (section 15.5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from sifu.core.method_info import METHOD_INFOS, MethodInfo
from sifu.core.premises import Premise, closed_form_premises, group_premises, record_premises
from sifu.core.request_terms import RequestTerms
from sifu.methods.base import Claim
from sifu.methods.scratch import Scratch
from sifu.planning.forecast import rebuild_client_rounds
from sifu.planning.plan import Plan
from sifu.run.group_state import (
    REBUILT,
    available_group_models,
    contains_any,
    current_networks,
    has_groups,
    own_statistics,
)
from sifu.run.run_view import RunView


class ClosedForm(Scratch):
    """Scratch for a closed-form head, which is solved again from the sum without the leaving clients."""

    info: ClassVar[MethodInfo] = METHOD_INFOS["closed_form"]

    def plan(self, view: RunView, terms: RequestTerms) -> Plan:
        """Plan a fresh head from the sum over the remaining clients, with no charges."""
        leaving, folder = set(view.indices(terms.clients)), view.spec.features.cache
        backbones = current_networks(view)
        hit = [row.grp for row in backbones if contains_any(row, leaving)]
        rounds = self._rounds(view, len(hit))
        cached = f"{folder} (features.cache) keeps features of clients that leave: no request erases it, so delete it"
        return replace(
            super().plan(view, terms),
            predicted_rounds=rounds,
            scratch_rounds=view.regime.rounds_from_scratch,
            rebuild_client_rounds=rebuild_client_rounds(view, hit, leaving),
            notes=(
                *self._network_notes(view, hit),
                self._note(view, 0 if terms.records else len(terms.clients), rounds),
                *((cached,) if folder else ()),
            ),
        )

    def _rounds(self, view: RunView, networks_hit: int) -> int:
        """Return the number of communication rounds: 0 if all necessary statistics are stored, 1 otherwise."""
        if networks_hit and view.spec.features.tune == "merge":
            return 1
        return 0 if set(view.active.tolist()) <= own_statistics(view).complete else 1

    def _network_notes(self, view: RunView, hit: Sequence[int]) -> tuple[str, ...]:
        if not has_groups(view):
            return ()
        left = len(current_networks(view)) - len(hit)
        done = "dropped from everyone's statistics" if view.spec.features.tune == "blocks" else "left out of the merge"
        said = [f"the networks that {left} of {view.spec.groups.count} groups tuned never included a forgotten client"]
        if hit:
            named = ", ".join(map(str, hit))
            said.append(f"the network of group {named} is erased and {done}; {REBUILT[view.spec.groups.rebuild]}")
        if not left:
            said.append("every group held a client that is forgotten: the public network's own features are left")
        return tuple(said)

    def _note(self, view: RunView, leaving: int, rounds: int) -> str:
        staying = len(view.clients) - len(view.forgotten) - leaving
        if rounds == 0:
            return (
                f"the statistics of the {staying} clients that stay are kept, so no client that stays is asked; "
                'keep.statistics = "sum" keeps only their sum, and asks all of them at every request'
            )
        return f"the {staying} clients that stay send their statistics again: one round, no training"

    def premises(self, claim: Claim) -> tuple[Premise, ...]:
        """Return the premises about the run's record, the features, the statistics and, if any, the grouping."""
        view = claim.view
        tuned = group_premises(view.spec, depends=view.groups_depend_on(claim.gone)) if has_groups(view) else ()
        return (*record_premises(view.record_history), *closed_form_premises(view.facts), *tuned)

    def bytes_kept(self, view: RunView) -> int:
        """Return the size in bytes of the kept statistics and of the networks that groups tuned."""
        on_disk = view.reader.models()
        networks = [on_disk[row.node].bytes for row in available_group_models(view.reader).values()]
        return sum(row.bytes for row in view.reader.statistics().values()) + sum(networks)
