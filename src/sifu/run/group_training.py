"""Separate training of groups: the members of each group train a copy of the fresh model in rounds among themselves.

The record of a group's rounds consists of its model, the number of rounds, and everyone who was a member during them.
Nothing else is needed, because a group's model is used or erased as a whole. Rounds are keyed by their position, so
rounds lost in a crash are repeated bit for bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from sifu.core.engine import Engine, Position
from sifu.core.layout import Vector
from sifu.core.round_stream import RoundsWanted, StreamedRound, stream_group_rounds
from sifu.core.spec import StopSpec
from sifu.errors import RoundRejectedError
from sifu.run.group_state import (
    available_group_models,
    groups_to_build,
    members_now,
    merge_rows,
    merged_model,
    parts_without,
    refuse_small_groups,
)
from sifu.run.run_view import RunView
from sifu.run.training import LARGEST_PSI, Progress, ProgressCallback
from sifu.store.files import uninterrupted
from sifu.store.projection import NewEvent, NewModel, NewRows
from sifu.store.writer import RunWriter
from sifu.theory.history import PathNode
from sifu.theory.participation import ClientIndices
from sifu.theory.rounding import norm

COMMIT_SECONDS = 5.0


@dataclass
class _Group:
    """A group in training: its model, the node that holds it, and the members and rounds that made it."""

    group: int
    active: ClientIndices
    fetch_model: Callable[[], Vector]
    node: int
    on_disk: bool
    branch: int
    rounds: int
    members: set[int]
    replies: int = 0


class GroupTraining:
    """Training of every group that has no finished model."""

    def __init__(self, engine: Engine, writer: RunWriter, view: RunView) -> None:
        refuse_small_groups(view)
        self.engine, self.writer, self.view = engine, writer, view
        self._rounds = view.spec.groups.rounds
        self._fresh = engine.initial_model(0)
        self._refusals: list[dict[str, Any]] = []
        self._changed: list[_Group] = []
        self._committed = time.monotonic()
        members, models = members_now(view), available_group_models(writer)
        nodes = writer.nodes_by_number()
        # Rounds of the first training are keyed by branch 0; rounds of rebuilt groups by negative branches.
        branch = 1 - view.next_order
        self._groups = []
        for group in groups_to_build(view):
            active, row = np.array(members[group], dtype=np.int64), models.get(group)
            if row is None:
                work = _Group(group, active, lambda: self._fresh, 0, False, branch, 0, set())
            else:
                begun, fetch = nodes[row.node], partial(writer.load_model, row.node)
                work = _Group(group, active, fetch, row.node, True, begun.branch, row.rounds, set(row.members))
            self._groups.append(work)

    def run(
        self, phase: str, progress: ProgressCallback | None = None, pause: Callable[[], bool] | None = None
    ) -> bool:
        """Run rounds until every group is done; return False if `pause` stopped them (see `RecordedTraining.run`)."""
        nowhere = StopSpec(0.0, 0, self._rounds, 2**62)
        try:
            while self._groups:
                first = min(self._groups, key=lambda work: (work.rounds, work.branch))
                together = [work for work in self._groups if (work.rounds, work.branch) == (first.rounds, first.branch)]
                for results in stream_group_rounds(
                    self.engine,
                    [work.fetch_model() for work in together],
                    Position(first.branch, first.rounds),
                    [work.active for work in together],
                    RoundsWanted(nowhere, self._fresh.astype(np.float64), evaluated=np.zeros(0, dtype=np.int64)),
                ):
                    self._take(together, results)
                    self._groups = [work for work in self._groups if work.rounds < self._rounds]
                    if time.monotonic() - self._committed > COMMIT_SECONDS:
                        self.commit()
                    if progress:
                        progress(Progress(phase, first.rounds, math.nan, 0.0, self._rounds))
                    if self._groups and pause and pause():
                        return False
        finally:
            self.commit()
        return True

    def _take(self, together: Sequence[_Group], results: Sequence[StreamedRound]) -> None:
        """Add one round of each of these groups."""
        for work, result in zip(together, results, strict=True):
            if not np.all(np.isin(result.participants, work.active)):
                raise RoundRejectedError(
                    f"round {work.rounds + 1} of group {work.group} has participants that are not in the group; "
                    "the last good state stays"
                )
        with uninterrupted():
            for work, result in zip(together, results, strict=True):
                work.fetch_model, work.rounds = result.fetch_model, work.rounds + 1
                work.members.update(work.active.tolist())
                work.replies += int(result.participants.size)
                self._refusals.extend(rejection.row(grp=work.group) for rejection in result.rejections)
                if work not in self._changed:
                    self._changed.append(work)

    def commit(self) -> None:
        """Store the groups' models durably; each replaces the earlier model of its group."""
        changed, self._changed = self._changed, []
        refusals, self._refusals = self._refusals, []
        if not changed:
            return
        first = 1 + max(self.writer.nodes_by_number())
        nodes, models, rows, dropped = [], [], [], []
        for node, work in enumerate(changed, start=first):
            model = work.fetch_model()
            # The distance is not recorded: it would permanently reveal something about the members' data.
            nodes.append(PathNode(node, work.node, "group", work.branch, work.rounds))
            models.append(NewModel(node, model, kept=True, psi_max=LARGEST_PSI))
            members = sorted(work.members)
            samples = sum(self.view.clients[client].samples for client in members)
            rows.append(
                {"node": node, "grp": work.group, "rounds": work.rounds, "samples": samples, "members": members}
            )
            if work.on_disk:
                dropped.append(work.node)
        payload: dict[str, Any] = {"group_models": rows, "replies": sum(work.replies for work in changed)}
        if refusals:
            payload["refusals"] = refusals
        with uninterrupted():
            self.writer.record(
                NewEvent("group rounds", payload, rows=NewRows(nodes=nodes), models=models, dropped_models=dropped)
            )
            for node, work in enumerate(changed, start=first):
                work.node, work.on_disk, work.replies = node, True, 0
            self._committed = time.monotonic()


def record_first_merge(writer: RunWriter, view: RunView) -> None:
    """Record the merge of the models that the groups trained at first; common rounds follow."""
    rounds = view.spec.groups.rounds
    merged = merged_model(writer, parts_without(available_group_models(writer), rounds, ()))
    node = 1 + max(writer.nodes_by_number())
    fresh = writer.load_model(view.nodes[0].node).astype(np.float64)
    row, taken_part = merge_rows(view, merged, node, 0, rounds, 0, norm(merged.model.astype(np.float64) - fresh))
    payload = {"run": {"tip": str(node)}, "merges": merged.rows(node)}
    rows, model = NewRows([row], taken_part), NewModel(node, merged.model, kept=True, psi_max=LARGEST_PSI)
    writer.record(NewEvent("merged", payload, rows=rows, models=[model]))
