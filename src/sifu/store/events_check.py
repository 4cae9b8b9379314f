"""Check that sifu could have written every event of the ledger.

The chain of hashes shows that no event was changed, but an operator with the key can sign anything. Without the check,
somebody who can write to the folder could add an event that changes the training facts, brings back an erased model,
or makes a discarded model the current one; the tables would still agree with the ledger.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sifu.core.ledger import Event
from sifu.core.request_terms import is_request_id
from sifu.store.files import FORMS, STORED
from sifu.store.projection import ENDINGS, LISTED
from sifu.store.reader import GROUP_KEY, JOINED, NOISE_GIVEN, PURGED, RELEASED, RESTORED, RunReader
from sifu.store.replayed_ledger import ReplayedLedger, ReplayedTables
from sifu.theory.history import PathNode

_CREATED_WITH = (
    "run", "asked", "spec", "layout", "facts", "versions", "public_key", "client_count", "clients_digest", "tip",
    "phase", GROUP_KEY, NOISE_GIVEN,
)  # fmt: skip
EFFECTS = (
    "rows",
    *LISTED,
    *(f"dropped_{kind}" for kind in STORED),
    "certificates",
)
"""Payload keys that change something other than the table `run`."""


GROUP_ROUNDS = "group rounds"
"""Kind of the event that records groups' models. It leaves the current model unchanged."""
CHECKED = "events that were checked"
"""Key, in the cache that connections share, of the events that passed the check."""


@dataclass(frozen=True)
class AllowedChanges:
    """Changes that one kind of event may make: keys of the table `run`, other effects, and the `phase` it may set."""

    run: tuple[str, ...] = ()
    effects: tuple[str, ...] = ()
    phase: str | None = None


KINDS: Mapping[str, AllowedChanges] = {
    "run created": AllowedChanges(_CREATED_WITH, ("rows", "models"), "training"),
    "rounds": AllowedChanges(
        ("tip",), ("rows", *STORED, "dropped_models", "dropped_statistics", "evaluations", "rejections")
    ),
    GROUP_ROUNDS: AllowedChanges((), ("rows", "models", "dropped_models", "group_models")),
    "merged": AllowedChanges(("tip",), ("rows", "models", "merges")),
    "evaluation": AllowedChanges((), ("models", "dropped_models", "evaluations")),
    "training done": AllowedChanges(("phase",), (), "ready"),
    "request received": AllowedChanges(),
    "request verified": AllowedChanges(),
    "request approved": AllowedChanges(),
    "request planned": AllowedChanges(),
    "request refused": AllowedChanges(),
    "request withdrawn": AllowedChanges(),
    "rolled back": AllowedChanges(
        ("tip", "phase"),
        ("rows", *STORED, *(f"dropped_{kind}" for kind in STORED), "merges", "evaluations"),
        "retraining",
    ),
    "request done": AllowedChanges(("phase",), ("evaluations", "certificates"), "ready"),
    RELEASED: AllowedChanges(),
    "key rotated": AllowedChanges(("public_key",)),
    "backup made": AllowedChanges(),
    RESTORED: AllowedChanges(),
    PURGED: AllowedChanges((), ("dropped_models",)),
    JOINED: AllowedChanges(("reported", "client_count", "clients_digest")),
    "client refused": AllowedChanges(("admitted",)),
    "clients admitted": AllowedChanges(("admitted", "reported")),
    "clients changed": AllowedChanges(("admitted",)),
    "incidents": AllowedChanges(),
    "letter refused": AllowedChanges(),
}
"""Changes that each kind of event may make."""


@dataclass
class _EarlierFacts:
    """Facts about earlier events that the tables do not hold.

    Attributes:
        executed: Number of executed requests.
        erased: Nodes of erased models, and names of other erased files.
        rejoined: Index of the client that rejoined with its remaining records, by request.
    """

    executed: int = 0
    erased: set[int | str] = field(default_factory=set)
    rejoined: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Checked:
    """Events that passed the check, and the state after them, so that later checks can continue there."""

    events: list[Event]
    tables: ReplayedTables
    past: _EarlierFacts


def check_events(reader: RunReader) -> Iterator[str]:
    """Yield a problem for each event that has an unknown kind, makes a forbidden change, or restores erased data.

    Events that this process has already checked are skipped if none of them has changed.
    """
    ledger = ReplayedLedger.of(reader)
    checked: _Checked | None = reader.shared.earlier(CHECKED)
    if checked is None or ledger.events[: len(checked.events)] != checked.events:
        checked = _Checked([], ReplayedTables(), _EarlierFacts())
    past = copy.deepcopy(checked.past)
    tables, problems = checked.tables.copy(), 0
    for event, before in ledger.moments(len(checked.events), tables):
        content = event.content
        for problem in (
            *_beyond_its_kind(event, content),
            *_badly_named(event, content),
            *_misplaced(event, content, before, past),
        ):
            problems += 1
            yield _named(event, problem)
    if not problems:
        reader.shared.answer(CHECKED, object(), lambda _: _Checked(ledger.events, tables, past))


def _named(event: Event, problem: str) -> str:
    return f"events: event {event.seq} ({event.kind[:40]}) {problem}"


def _beyond_its_kind(event: Event, content: dict[str, Any]) -> Iterator[str]:
    may = KINDS.get(event.kind)
    if may is None:
        yield "is of a kind that sifu does not write"
        return
    if (event.kind == "run created") != (event.seq == 1):
        yield "creates the run, which only the first event does"
    values = content.get("run", {})
    wrong = sorted(set(values) - set(may.run)) + sorted(set(content) & set(EFFECTS) - set(may.effects))
    if wrong:
        yield f"changes {', '.join(wrong)[:200]}, which such an event never does"
    if values.get("phase") != may.phase:
        yield f"sets the phase to {str(values.get('phase'))[:40]!r}"


def _badly_named(event: Event, content: dict[str, Any]) -> Iterator[str]:
    """Yield a problem for each invalid id or file name, and for a completed request without its two certificates."""
    if event.kind == "request received" and not is_request_id(content["request"]["request"]):
        yield f"names the request {str(content['request']['request'])[:80]!r}, which is not a usable id"
    for row in content.get("statistics", []):
        named = STORED["statistics"].fullmatch(str(row["file"]))
        if named is None or int(named[1]) != row["node"] or (named[2] != "sum" and [int(named[2])] != row["clients"]):
            yield f"names the file of statistics {str(row['file'])[:80]!r}, which is not that of its node and client"
    if event.kind == "request done" and sorted(content.get("certificates", {})) != sorted(FORMS):
        yield f"issues the certificates {sorted(content.get('certificates', {}))}, not those of {sorted(FORMS)}"


def _misplaced(event: Event, content: dict[str, Any], before: ReplayedTables, past: _EarlierFacts) -> Iterator[str]:
    """Yield each way in which an event does not fit the state before it.

    The current model must be the last one recorded, clients must join one by one, and erased files must not return.
    """
    values, rows = content.get("run", {}), content.get("rows")
    tip, clients = values.get("tip"), int(values.get("client_count", before.client_count))
    if event.kind == JOINED and clients != before.client_count + 1:
        yield f"says that there are {clients} clients, after {before.client_count}"
    if event.kind == JOINED and "request" in content:
        past.rejoined[str(content["request"])] = clients - 1
    ended = before.rows["requests"].get((str(content["request"]),), {}) if event.kind in ENDINGS else {}
    if ended.get("status") == "running":
        yield f"ends request {str(content['request'])[:80]}, which was running"
    tip_before = before.tip
    if event.kind in (RELEASED, "training done") and content.get("node") != tip_before:
        yield f"names node {content.get('node')!r}, but node {tip_before} was the current model"
    first, last = (int(rows["first"]), int(rows["last"])) if rows else (tip_before + 1, tip_before)
    moves = rows is not None and event.kind != GROUP_ROUNDS
    tip_after = last if moves else tip_before
    if moves != (tip is not None) or (moves and str(last) != tip):
        yield f"makes node {tip} the current model, which is not the last one it recorded"
    if event.kind == "rolled back":
        past.executed += 1
        choice = content["choice"]
        if (choice["request_order"], choice["noise_node"]) != (past.executed, tip_after):
            yield (
                f"names order {choice['request_order']} and node {choice['noise_node']}, but it is request number "
                f"{past.executed} that was executed, and made node {tip_after}"
            )
    if any(not tip_before <= row["node"] <= tip_after for row in content.get("evaluations", [])):
        yield "records an evaluation of another model than the current one"
    dropped: list[int | str] = [file for what in STORED for file in content.get(f"dropped_{what}", [])]
    models_before = before.rows["models"]
    never = [file for file in dropped if not any((file,) in before.rows[what] for what in STORED)]
    if never or len(set(dropped)) < len(dropped):
        yield f"erases {(never or dropped)[:5]}, which did not exist or is named twice"
    past.erased.update(dropped)
    models = {int(row["node"]): str(row["digest"]) for row in content.get("models", [])}
    written = {str(row["file"]) for row in content.get("statistics", [])}
    back = sorted(map(str, (models.keys() | written) & past.erased))
    if back:
        yield f"records {', '.join(back[:5])} again, which had been erased"
    if any(node > last for node in models):
        yield "records a model of a node that does not exist"
    # A model is recorded with its node. It may be recorded again unchanged, to mark it as kept.
    changed = [
        node
        for node, digest in models.items()
        if node < first and models_before.get((node,), {}).get("digest") != digest
    ]
    if changed:
        yield f"records other models of nodes {changed[:5]} than there were"
    if any((file,) in before.rows["statistics"] for file in written):
        yield "records a file of statistics twice"
    if any(row["node"] != tip_after for row in content.get("statistics", [])):
        yield "records statistics that do not belong to its last node"


def check_recorded_nodes(reader: RunReader) -> Iterator[str]:
    """Yield a problem for each event whose nodes do not fit the current model, or whose participants had not joined."""
    tip, clients = -1, 0
    by_number, everyone = reader.nodes_by_number(), reader.everyone()
    for event in reader.events():
        content = event.content
        clients = int(content.get("run", {}).get("client_count", clients))
        rows = content.get("rows")
        if rows is None:
            continue
        for problem in _out_of_line(event.kind, rows, tip, by_number):
            yield _named(event, problem)
        last = int(rows["last"])
        tip = tip if event.kind == GROUP_ROUNDS else last
        if np.any(everyone.between(int(rows["first"]), last).clients >= clients):
            yield _named(event, f"records a participant beyond the {clients} clients there were")


def _out_of_line(kind: str, rows: dict[str, Any], tip: int, by_number: Mapping[int, PathNode]) -> Iterator[str]:
    """Yield a problem if nodes do not fit the kind of their event.

    Rounds continue from the current model, one after the other. A request makes one node of a suitable kind.
    """
    nodes = [by_number[node] for node in range(int(rows["first"]), int(rows["last"]) + 1) if node in by_number]
    if kind == "rounds":
        parents = [tip, *(node.node for node in nodes[:-1])]  # models of groups may have been recorded in between
        if any(node.kind != "round" or node.parent != parent for node, parent in zip(nodes, parents, strict=True)):
            yield "records rounds that do not continue from the current model"
        if any(node.noise_std != 0.0 or node.order != 0 for node in nodes):
            yield "records noise in a round"
    elif kind == GROUP_ROUNDS:
        if any(node.kind != "group" or node.noise_std != 0.0 or node.order != 0 for node in nodes):
            yield "records nodes that are not models of groups"
    elif (
        len(nodes) != 1
        or nodes[0].kind in ("round", "group")
        or (nodes[0].parent is None) != (nodes[0].kind == "initial")
    ):
        yield "records more or other nodes than the one model it makes"
    elif kind == "merged" and (nodes[0].kind, nodes[0].order, nodes[0].branch) != ("merge", 0, 0):
        yield "does not merge the groups of the first training"
    elif kind == "run created" and (nodes[0].kind, nodes[0].order, nodes[0].noise_std) != ("initial", 0, 0.0):
        yield "does not begin with an initial model"
