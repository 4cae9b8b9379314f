"""Method `groups`: an exact restart from the merged models of the groups that the client never belonged to.

Clients first train separately in groups, and the groups' models are kept (docs/theory.md, section 15). A request
averages the models of groups that no forgotten client belonged to, and stretches the mean by a fixed factor. The result
depends only on the remaining clients' data, whatever the loss and the optimiser, so training that starts from it is
exact without noise. If every group had a forgotten client, training starts from a fresh model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from sifu.core.engine import Engine
from sifu.core.method_info import METHOD_INFOS, MethodInfo
from sifu.core.premises import Premise, before_training_premises, group_premises, record_premises
from sifu.core.request_terms import Terms
from sifu.errors import InputError
from sifu.methods.base import Claim, Method, Start, plan_from
from sifu.planning.plan import Plan
from sifu.planning.rounds import FirstTraining, rounds_to_run
from sifu.run import group_state
from sifu.run.group_state import parts_without
from sifu.run.run_view import RunView
from sifu.theory.merging import STRETCH


class Groups(Method):
    """Method that merges the models of groups to which the client never belonged."""

    info: ClassVar[MethodInfo] = METHOD_INFOS["groups"]

    def check_run(self, view: RunView) -> None:
        """Refuse a run whose clients did not train in groups."""
        if not group_state.has_groups(view):
            raise InputError(
                "method groups needs groups that trained separately, and this run has none: set groups.count and "
                "groups.rounds in the spec and train again, or use scratch"
            )

    def plan(self, view: RunView, terms: Terms) -> Plan:
        """Plan the merge of the groups without a forgotten client, or a fresh model if there is no such group."""
        merged, hit = self._split(view, terms)
        stop = view.spec.stop
        after_merge = FirstTraining.of(view).rounds - (view.spec.groups.rounds if merged else 0)
        unknown = group_state.are_separate(view) and stop.target > 0
        return replace(
            plan_from(self, view, terms, 0 if merged else None),
            rounds=None if unknown else rounds_to_run(stop, after_merge),
            notes=tuple(_notes(view, merged, hit)),
        )

    def _split(self, view: RunView, terms: Terms) -> tuple[list[int], list[int]]:
        """Return the groups to merge, and the groups that a leaving client belonged to."""
        leaving = set(view.leaving(terms.clients))
        models = group_state.available_group_models(view.reader)
        if group_state.are_separate(view):  # the groups finish before the request is executed
            members = {group: set(clients) for group, clients in enumerate(group_state.members_now(view)) if clients}
            for group, row in models.items():
                members.setdefault(group, set()).update(row.members)
            hit = [group for group, clients in sorted(members.items()) if not leaving.isdisjoint(clients)]
            return [group for group in sorted(members) if group not in hit], hit
        merged = [part.grp for part in parts_without(models, view.spec.groups.rounds, leaving)]
        return merged, [group for group, row in sorted(models.items()) if group_state.contains_any(row, leaving)]

    def premises(self, claim: Claim) -> tuple[Premise, ...]:
        """Return the premises about the run's record, the grouping and the steps before training."""
        view = claim.view
        return (
            *record_premises(view.record_history, merge=True),
            *group_premises(view.spec),
            *before_training_premises(view.facts, view.rate_source),
        )

    def starting_model(self, view: RunView, plan: Plan, engine: Engine) -> Start:
        """Return the merged model of the groups that no leaving client belonged to, or a fresh model if none exists."""
        leaving = {client for subject in plan.subjects for client in subject.clients}
        parts = parts_without(group_state.available_group_models(view.reader), view.spec.groups.rounds, leaving)
        if not parts:
            return super().starting_model(view, plan, engine)
        merged = group_state.merged_model(view.reader, parts)
        return Start(merged.model, merged=merged)


def _notes(view: RunView, merged: Sequence[int], hit: Sequence[int]) -> list[str]:
    count = view.spec.groups.count
    notes = []
    if group_state.are_separate(view):
        notes.append("the groups still train separately: the request is executed when they are done")
    if merged:
        notes.append(
            f"the models of {_listed(merged)} of {count} are merged, and their mean moved on from the fresh model by "
            f"{STRETCH:g}; they never included a forgotten client"
        )
    else:
        notes.append("every group held a forgotten client: nothing is left to merge, this is Scratch")
    if hit:
        notes.append(f"the model of {_listed(hit)} is erased, and trained again afterwards")
    return notes


def _listed(groups: Sequence[int]) -> str:
    named = ", ".join(map(str, groups[:20])) + (" and more" if len(groups) > 20 else "")
    return f"group{'' if len(groups) == 1 else 's'} {named}"
