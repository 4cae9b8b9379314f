"""State of a run's groups: their members, their stored models, and merges of these models (docs/theory.md, section 15).

Everything here follows from the record and the clients' names. This module neither trains nor writes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sifu.core.layout import Vector
from sifu.core.operator_words import unmasked_setting
from sifu.errors import InputError
from sifu.run.run_view import RunView
from sifu.store.history_tables import ParticipationRows
from sifu.store.projection import GroupModelRow
from sifu.store.reader import GROUP_KEY, RunReader
from sifu.theory.facts import DROPPED_MASKED_ROUND, LEAST_MASKED
from sifu.theory.history import PathNode
from sifu.theory.merging import members_by_group, merge, move_on
from sifu.theory.regularity import RoundRegularity


@dataclass(frozen=True)
class Merged:
    """A merged model and the group models it was made of, in the order of the groups."""

    model: Vector
    parts: tuple[GroupModelRow, ...]

    @property
    def members(self) -> list[int]:
        """All clients that were in one of these groups while its model was trained."""
        return sorted({client for part in self.parts for client in part.members})

    def rows(self, node: int) -> list[dict[str, int]]:
        """Return the group models of this merge as rows for its event; `node` is the merge's node."""
        return [
            {"node": node, "grp": part.grp, "source_node": part.node, "samples": part.samples} for part in self.parts
        ]


def has_groups(view: RunView) -> bool:
    """Return whether the clients of this run train in groups at first."""
    return view.spec.groups.count > 0


def are_separate(view: RunView) -> bool:
    """Return whether the groups of the first training are not merged yet."""
    return has_groups(view) and not view.reader.merges()


def members_now(view: RunView) -> list[list[int]]:
    """Return the active clients of each group."""
    names = [client.name for client in view.clients]
    key = bytes.fromhex(view.reader.value(GROUP_KEY))
    return members_by_group(key, names, view.active.tolist(), view.spec.groups.count)


def latest_models(rows: Iterable[GroupModelRow], available: Collection[int]) -> dict[int, GroupModelRow]:
    """Return each group's latest stored model, by group."""
    return {row.grp: row for row in sorted(rows, key=lambda row: row.node) if row.node in available}


def available_group_models(reader: RunReader) -> dict[int, GroupModelRow]:
    """Return each group's latest model on disk, finished or not, by group."""
    return latest_models(reader.group_models().values(), reader.models())


def contains_any(row: GroupModelRow, clients: Collection[int]) -> bool:
    """Return whether one of `clients` was in the group while its model was trained."""
    return not set(clients).isdisjoint(row.members)


def parts_without(
    models: Mapping[int, GroupModelRow], rounds: int, clients: Collection[int]
) -> tuple[GroupModelRow, ...]:
    """Return the models that finished their `rounds` in groups without any of `clients`, in the order of the groups."""
    rows = (models[group] for group in sorted(models))
    return tuple(row for row in rows if row.rounds == rounds and not contains_any(row, clients))


def least_members(view: RunView) -> int:
    """Return the number of members that a group needs to train; masking within a group needs three."""
    masked = any(what.startswith(DROPPED_MASKED_ROUND) for what in view.facts.outside)
    return LEAST_MASKED if masked else 1


def groups_to_build(view: RunView) -> list[int]:
    """Return the groups without a finished model that have enough members to train one."""
    models, rounds, least = available_group_models(view.reader), view.spec.groups.rounds, least_members(view)
    return [
        group
        for group, members in enumerate(members_now(view))
        if len(members) >= least and (group not in models or models[group].rounds < rounds)
    ]


def refuse_small_groups(view: RunView) -> None:
    """Check, before the first separate round, that every group with members has enough of them."""
    least, members = least_members(view), members_now(view)
    small = [group for group, own in enumerate(members) if 0 < len(own) < least]
    if small and not view.reader.group_models():
        raise InputError(
            f"group {small[0]} has {len(members[small[0]])} of the {len(view.active)} clients, and a masked round "
            f"needs {least}: make a new run with fewer groups (groups.count is {view.spec.groups.count}), with more "
            f"clients, or with {unmasked_setting(view.spec.data.name, 'updates')}"
        )


FRESH_NODE = 0
"""Node of the model that every group starts from. It holds no client's data and is kept while merges need it."""


def nodes_always_kept(reader: RunReader) -> frozenset[int]:
    """Return the nodes that no request erases: the fresh model if groups merge, otherwise none."""
    groups = reader.spec["groups"]
    return frozenset({FRESH_NODE} if groups["count"] else ())


def merged_model(reader: RunReader, parts: Sequence[GroupModelRow]) -> Merged:
    """Return the weighted mean of stored group models, stretched in float64, then cast to the run's number format."""
    models = [reader.load_model(part.node).astype(np.float64) for part in parts]
    mean = merge(models, [part.samples for part in parts])
    mean = move_on(mean, reader.load_model(FRESH_NODE).astype(np.float64))
    return Merged(mean.astype(reader.layout.dtype), tuple(parts))


def merge_rows(
    view: RunView, merged: Merged, node: int, branch: int, position: int, order: int, distance: float
) -> tuple[PathNode, ParticipationRows]:
    """Return the node of a merge, and its members' rows; a merge counts as a round of all members with unknown drifts.

    From here on, Psi of every member of a merged group is infinite, and Psi of all other clients stays zero.
    """
    who = np.array(merged.members, dtype=np.int64)
    samples = np.array([view.clients[client].samples for client in who.tolist()], dtype=np.int64)
    regularity = RoundRegularity.of(samples, view.regularity.factors[who])
    merge = PathNode(
        node,
        view.nodes[0].node,
        "merge",
        branch,
        position,
        regularity,
        mean_shift=np.inf,
        order=order,
        distance=distance,
    )
    taken_part = ParticipationRows(np.full(who.size, node), who, samples, np.full(who.size, np.inf))
    return merge, taken_part
