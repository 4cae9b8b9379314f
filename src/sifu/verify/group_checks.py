"""Checks that recorded clients and rounds form one history, and that groups and merges follow the rules.

The checks recompute the group of every client and the groups' models in every merge, from names, the recorded key and
the ledger. They check that none of these models contains a forgotten client. While the models are stored, they also
recompute the merged model to the last bit (docs/theory.md, section 15; docs/store.md, section 1b).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from sifu.core.ledger import Event
from sifu.errors import InputError
from sifu.run.group_state import latest_models, merged_model, nodes_always_kept, parts_without
from sifu.run.run_view import RunView
from sifu.store.erased_figures import last_erased
from sifu.store.events_check import GROUP_ROUNDS, ReplayedLedger, ReplayedTables
from sifu.store.files import is_locked
from sifu.store.projection import GroupModelRow
from sifu.store.reader import GROUP_KEY, JOINED, RunReader, joined_remainders, next_name
from sifu.store.salts import SALTS_FILE, WITHOUT_SALTS, outlived, read_salts, recorded_digests, salts_to_erase
from sifu.theory.merging import KEY_BYTES, group_of


def check_history(reader: RunReader) -> Iterator[str]:
    """Yield a problem for each node out of place, and for each forgotten client in a later round."""
    rows = {row.node.node: row.node for row in reader.node_rows()}
    for node in rows.values():
        parent = rows.get(node.parent) if node.parent is not None else None
        if node.kind == "round" and (
            parent is None
            or node.parent is None
            or node.parent >= node.node
            or (node.branch, node.position) != (parent.branch, parent.position + 1)
        ):
            yield f"history: round node {node.node} does not follow its parent {node.parent}"
        if node.kind == "noise" and (parent is None or node.position != 0 or node.branch != node.order):
            yield f"history: noise node {node.node} is misplaced"
        if node.kind == "heuristic" and (
            parent is None or parent.kind != "initial" or node.branch != node.order or node.noise_std != 0.0
        ):
            yield f"history: heuristic node {node.node} is misplaced"
    view = RunView(reader)
    for request in reader.requests():
        if request.noise_node is None:
            continue
        for name in request.clients:
            client = view.index_of.get(name)
            later = reader.query(
                "SELECT MIN(node) FROM participation WHERE client = ? AND node > ?", (client, request.noise_node)
            )[0][0]
            if later is not None:
                yield f"history: client {name} was forgotten at node {request.noise_node} but took part in node {later}"


ERASING = ("rolled back", JOINED, "restored", "rounds", "request refused", "request withdrawn")
"""Events after which salts are erased. If the process is killed before it erases them, the next writer does."""


def check_sample_digests(reader: RunReader) -> Iterator[str]:
    """Yield a problem unless each initial client has one digest, and all salts of forgotten clients are erased."""
    founders, digests = len(reader.clients()) - len(reader.joined()), reader.payload(1).get("sample_digests")
    if digests is not None and len(digests) != founders:
        yield f"clients: {len(digests)} digests of samples for {founders} clients that the run was made with"
    try:
        salts = read_salts(reader.folder)
    except InputError as error:
        yield str(error)
        return
    left = sorted(salts_to_erase(reader) & salts.keys())
    (last,) = reader.query("SELECT kind FROM events ORDER BY seq DESC LIMIT 1")[0]
    if left and last not in ERASING:
        names = ", ".join(reader.clients()[client].name for client in left[:5])
        yield f"{SALTS_FILE} holds the salts of {names}, which were erased when they were forgotten: delete it"


def lost_salt_notes(reader: RunReader) -> list[str]:
    """Return a note if salts are missing. No claim depends on them, but the next request needs them."""
    try:
        salts = read_salts(reader.folder)
    except InputError:
        return []  # reported as a problem elsewhere
    lost = recorded_digests(reader).keys() - salts.keys() - outlived(reader)
    if not lost:
        return []
    return [
        f"{SALTS_FILE} is missing or lacks the salts of {len(lost)} clients; certificates hold. "
        f"To continue, {WITHOUT_SALTS}"
    ]


def check_remainders(reader: RunReader) -> Iterator[str]:
    """Yield a problem for each request for records whose client did not join again correctly.

    The rows must have existed, the client must join between the rollback and the next round, and its number of samples
    must be right.
    """
    clients, requests = reader.clients(), {row.request: row for row in reader.requests()}
    joined = {remainder.request: remainder for remainder in joined_remainders(reader)}
    for row in requests.values():
        if row.records and (list(row.records) != sorted(set(row.records)) or len(row.clients) != 1):
            yield f"request {row.request}: its records are not rows of one client, each named once and in order"
        if row.records and row.status == "done" and row.request not in joined:
            yield f"request {row.request}: its client did not join again"
    for remainder in joined.values():
        name, first = f"request {remainder.request}", clients[remainder.first]
        if remainder.removed[0] < 0 or remainder.removed[-1] >= first.samples:
            yield f"{name}: it names rows that {first.name} does not have"
        left = clients[remainder.before].samples - len(requests[remainder.request].records)
        if clients[remainder.client].samples != left or left != first.samples - len(remainder.removed):
            yield f"{name}: {remainder.name} has {clients[remainder.client].samples} samples, {left} were left"
        taken = [profile.name for profile in clients[: remainder.client]]
        if remainder.name != next_name(clients[remainder.before].name, taken):
            yield f"{name}: {clients[remainder.before].name} joined again as {remainder.name}"
    yield from _check_moments(reader)


def _check_moments(reader: RunReader) -> Iterator[str]:
    """Yield a problem where a client joins again at a time other than between its rollback and the next round."""
    records = {row.request: bool(row.records) for row in reader.requests()}
    expected, seen = None, set()
    for event in ReplayedLedger.of(reader).events:
        if event.kind == "rolled back" and records.get(event.content["request"]):
            expected = event.content["request"]
        elif event.kind == JOINED and "request" in event.content:
            request = event.content["request"]
            if request != expected or request in seen:
                yield f"request {request}: event {event.seq} lets its client rejoin at the wrong time"
            seen.add(request)
            expected = None
        elif event.kind in ("request refused", "request withdrawn") and event.content["request"] == expected:
            expected = None
        elif expected is not None and event.kind in ("rounds", "request done", JOINED):
            yield f"request {expected}: event {event.seq} comes before its client joined again"
            expected = None


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
        elif event.kind == "rounds" and view.regime.tunes:
            yield from _check_networks(view, event, before)
    if not is_locked(reader.folder):  # a writer may erase a model that is about to be read
        yield from _check_models(reader)


def _rows(before: ReplayedTables) -> dict[int, GroupModelRow]:
    """Return the models of groups recorded before an event, by node."""
    return {row.node: row for row in before.read("group_models")}


def _forgotten(before: ReplayedTables) -> set[int]:
    return {client for row in before.read("subjects") for client in row.clients}


def _executed(before: ReplayedTables) -> int:
    return sum(1 for row in before.rows["requests"].values() if row.get("request_order") is not None)


def _check_rounds(view: RunView, key: bytes, event: Event, before: ReplayedTables) -> Iterator[str]:
    """Yield a problem unless each model continues its group's last model, or the fresh model, with the right members.

    The hash determines the members of a group.
    """
    content, nodes = event.content, view.reader.nodes_by_number()
    earlier, gone = _rows(before), _forgotten(before)
    recorded = content.get("group_models", [])
    rows = content.get("rows", {"first": 0, "last": -1})
    if [row["node"] for row in recorded] != list(range(int(rows["first"]), int(rows["last"]) + 1)):
        yield f"groups: event {event.seq} does not name the group of each of its nodes"
        return
    if len({row["grp"] for row in recorded}) != len(recorded):
        yield f"groups: event {event.seq} records two models of one group"
    dropped = set(content.get("dropped_models", []))
    for row in recorded:
        node, name = nodes[row["node"]].node, f"groups: node {row['node']} of group {row['grp']}"
        members = row["members"]
        if members != sorted(set(members)) or not members or members[-1] >= before.client_count:
            yield f"{name}: its members are not a list of clients there were"
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
        begins = (-_executed(before), 0) if parent is None else (nodes[parent.node].node.branch, parent.rounds)
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
    node = view.reader.nodes_by_number()[int(content["rows"]["last"])].node
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
    parent = view.reader.nodes_by_number()[node.parent or 0].node
    rounded = node.rounding != 0.0 and node.node > last_erased(view.reader)[0]  # a purge overwrites this figure
    elsewhere = event.kind == "rolled back" and (node.branch, node.position) != (node.order, 0)
    if elsewhere or parent.kind != "initial" or node.noise_std != 0.0 or rounded or not np.isinf(node.mean_shift):
        yield f"{name}: node {node.node} is misplaced"
    taken_part = view.reader.everyone().between(node.node, node.node)
    members = sorted({client for part in parts for client in part.members})
    if taken_part.clients.tolist() != members or not np.all(np.isinf(taken_part.drifts)):
        yield f"{name}: its participants are not the members of the groups it is made of"


def _check_networks(view: RunView, event: Event, before: ReplayedTables) -> Iterator[str]:
    """Yield a problem unless a head uses exactly the finished networks, none of which contained a forgotten client."""
    name = f"groups: the head of event {event.seq}"
    rows = parts_without(latest_models(_rows(before).values(), before.model_nodes), view.spec.groups.rounds, ())
    expected, stated = [row.node for row in rows], event.content.get("solve", {}).get("trunks")
    if stated != expected:
        yield f"{name} uses networks of nodes {stated}, the rule requires {expected}"
    held = _forgotten(before) & {client for row in rows for client in row.members}
    if held:
        yield f"{name} uses a network trained with {view.clients[min(held)].name}, which was forgotten before"
    for row in event.content.get("statistics", []):
        is_part = row["file"].count(".") > 2 and set(row["trunks"]) <= set(expected)
        if row["trunks"] != expected and not is_part:
            yield f"{name}: {row['file']} depends on other networks than the head does"


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
