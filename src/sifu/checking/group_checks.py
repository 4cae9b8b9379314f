"""Checks that the groups of a run and their merges follow the rules.

The checks recompute the group of every client from its name and the recorded key, and the list of models in every merge
from the ledger. None of these models may contain a forgotten client. While the models are stored, the merged model is
also recomputed to the last bit (docs/theory.md, section 15; docs/store.md, section 1b).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from sifu.core.ledger import Event
from sifu.run.group_state import latest_models, merged_model, nodes_always_kept, parts_without
from sifu.run.run_view import RunView
from sifu.store.events_check import GROUP_ROUNDS
from sifu.store.files import is_locked
from sifu.store.projection import GroupModelRow
from sifu.store.reader import GROUP_KEY, RunReader
from sifu.store.replayed_ledger import ReplayedLedger, ReplayedTables
from sifu.theory.merging import KEY_BYTES, group_of


def check_groups(reader: RunReader) -> Iterator[str]:
    """Yield the problems of all events that record models of groups, or a merge of them."""
    view = RunView(reader)
    if view.spec.groups.count == 0:
        if reader.group_models() or reader.merges():
            yield "groups: there are models of groups, but the spec has no groups"
        return
    key = bytes.fromhex(reader.value(GROUP_KEY))
    if len(key) != KEY_BYTES:
        yield f"groups: the key of the hash has {len(key)} bytes, not {KEY_BYTES}"
    for event, before in ReplayedLedger.of(reader).moments():
        if event.kind == GROUP_ROUNDS:
            yield from _check_rounds(view, key, event, before)
        elif event.kind in ("merged", "rolled back"):
            yield from _check_merge(view, event, before)
    if not is_locked(reader.folder):  # a writer may erase a model that is about to be read
        yield from _check_models(reader)


def _rows(before: ReplayedTables) -> dict[int, GroupModelRow]:
    """Return the models of groups recorded before an event, by node."""
    return {row.node: row for row in before.read("group_models")}


def _executed(before: ReplayedTables) -> int:
    return sum(1 for row in before.read("requests") if row.request_order is not None)


def _check_rounds(view: RunView, key: bytes, event: Event, before: ReplayedTables) -> Iterator[str]:
    """Yield a problem for each model of a group with wrong members or a wrong predecessor.

    The keyed hash determines the members. A model must continue the group's last model, or the fresh model.
    """
    content, nodes = event.content, view.reader.nodes_by_number()
    earlier, gone = _rows(before), before.forgotten
    recorded = content.get("group_models", [])
    rows = content.get("rows", {"first": 0, "last": -1})
    if [row["node"] for row in recorded] != list(range(int(rows["first"]), int(rows["last"]) + 1)):
        yield f"groups: event {event.seq} does not name the group of each of its nodes"
        return
    if len({row["grp"] for row in recorded}) != len(recorded):
        yield f"groups: event {event.seq} records two models of one group"
    dropped = set(content.get("dropped_models", []))
    for row in recorded:
        node, name = nodes[row["node"]], f"groups: node {row['node']} of group {row['grp']}"
        members = row["members"]
        if members != sorted(set(members)) or not members or members[-1] >= before.client_count:
            yield f"{name}: its members are not existing clients in ascending order"
            continue
        strangers = [
            client
            for client in members
            if group_of(key, view.clients[client].name, view.spec.groups.count) != row["grp"]
        ]
        if strangers:
            yield f"{name}: the hash puts {view.clients[strangers[0]].name} into another group"
        if gone & set(members):
            yield f"{name}: it holds {view.clients[min(gone & set(members))].name}, who was forgotten before"
        if row["samples"] != sum(view.clients[client].samples for client in members):
            yield f"{name}: its samples are recorded as {row['samples']}, which is not the sum of its members'"
        parent = earlier.get(node.parent or 0)
        begins = (-_executed(before), 0) if parent is None else (nodes[parent.node].branch, parent.rounds)
        if (
            (parent is None and node.parent != 0)
            or (parent is not None and (parent.grp != row["grp"] or not set(parent.members) <= set(members)))
            or (parent is not None and parent.node not in dropped)
            or node.position != row["rounds"]
            or node.branch != begins[0]
            or not begins[1] < row["rounds"] <= view.spec.groups.rounds
        ):
            yield f"{name}: it does not continue the group's own model, or has rounds other than separate ones"


def _check_merge(view: RunView, event: Event, before: ReplayedTables) -> Iterator[str]:
    """Yield a problem unless a merge uses exactly the finished group models that never contained a leaving client."""
    content, groups = event.content, view.spec.groups
    node = view.reader.nodes_by_number()[int(content["rows"]["last"])]
    name = f"groups: the merge of event {event.seq}"
    stated = content.get("merges", [])
    expected: list[dict[str, Any]] = []
    parts: tuple[GroupModelRow, ...] = ()
    method = content["choice"]["method"] if event.kind == "rolled back" else None
    if method in (None, "groups"):
        leaving = {client for subject in content.get("subjects", []) for client in subject["clients"]}
        models = latest_models(_rows(before).values(), before.model_nodes)
        parts = parts_without(models, groups.rounds, leaving)
        expected = [
            {"node": node.node, "grp": part.grp, "source_node": part.node, "samples": part.samples} for part in parts
        ]
    if stated != expected:
        taken, allowed = ([(row["grp"], row["source_node"]) for row in rows] for rows in (stated, expected))
        yield f"{name} is made of (group, node) {taken}, the rule says {allowed}"
    if event.kind == "merged" and (before.rows["merges"] or _executed(before) or node.position != groups.rounds):
        yield f"{name} is not that of the first training"
    if (node.kind == "merge") != bool(expected):
        yield f"{name}: a node of kind {node.kind} is recorded, with {len(expected)} groups to merge"
    if node.kind != "merge":
        return
    parent = view.reader.nodes_by_number()[node.parent or 0]
    elsewhere = event.kind == "rolled back" and (node.branch, node.position) != (node.order, 0)
    if (
        elsewhere
        or parent.kind != "initial"
        or node.noise_std != 0.0
        or node.rounding != 0.0
        or not np.isinf(node.mean_shift)
    ):
        yield f"{name}: node {node.node} is misplaced"
    taken_part = view.reader.everyone().between(node.node, node.node)
    members = sorted({client for part in parts for client in part.members})
    if taken_part.clients.tolist() != members or not np.all(np.isinf(taken_part.drifts)):
        yield f"{name}: its participants are not the members of the groups it is made of"


def _check_models(reader: RunReader) -> Iterator[str]:
    """Yield a problem for each merged model that differs in any bit from the merge of its groups' models.

    Models that are no longer stored are skipped.
    """
    available, groups = reader.models(), reader.group_models()
    fresh = nodes_always_kept(reader)
    if not fresh <= available.keys():
        yield "groups: the fresh model, which merges are stretched from, is missing"
    by_node: dict[int, list[GroupModelRow]] = {}
    for row in reader.merges():
        by_node.setdefault(row.node, []).append(groups[row.source_node])
    for node, parts in by_node.items():
        if {node, *fresh, *(part.node for part in parts)} <= available.keys() and not np.array_equal(
            reader.load_model(node), merged_model(reader, parts).model
        ):
            yield f"groups: the model of node {node} is not the merge of the groups' models it is made of"
