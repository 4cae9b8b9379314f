"""Whether every request was carried out as the rule says: its node, noise, charges, erasure, and certificate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sifu.core.ledger import finite_or_text
from sifu.record.run_view import RunView
from sifu.requests.certification import RecordedRequest, nodes_to_erase
from sifu.store.projection import Tables, apply_change, changes, empty_tables
from sifu.store.reader import RunReader
from sifu.store.table_rows import ChargeRow, RequestRow
from sifu.theory.rollback import charge, choose_node
from sifu.verify.agreement import TOLERANCE, agree
from sifu.verify.certificates import LedgerFacts, check_statements
from sifu.verify.updates import check_updates_erased


def check_requests(reader: RunReader) -> Iterator[str]:
    """Node, noise, charges, level and certificate of every request, recomputed from the scalars of the rounds.

    One walk over the ledger: at the event that carried a request out, `tables` are what they were just before it.
    """
    carried_out = {one.request: one for one in reader.requests() if one.noise_node is not None}
    stored: dict[int, dict[tuple[int, int], ChargeRow]] = {}
    for one in reader.charges():
        stored.setdefault(one.noise_node, {})[(one.noise_node, one.subject)] = one
    ledger, tables = LedgerFacts.of(reader), empty_tables()
    for event in reader.events():
        content = event.content
        if event.kind == "rolled back":
            request = carried_out.pop(content["request"], None)
            if request is not None:
                charges = stored.get(request.noise_node or 0, {})
                yield from _check_request(reader, request, charges, tables, content, ledger)
        for change in changes(event.kind, event.time, content):
            apply_change(tables, change)
    for left in carried_out:
        yield f"request {left}: the ledger has no event that carried it out"


def _check_request(
    reader: RunReader,
    request: RequestRow,
    stored_charges: dict[tuple[int, int], ChargeRow],
    tables: Tables,
    content: dict[str, Any],
    ledger: LedgerFacts,
) -> Iterator[str]:
    recorded = RecordedRequest(reader, request)
    name, noise_node = f"request {request.request}", recorded.view.path.nodes[-1].node
    if not agree(request.multiplier, recorded.multiplier):
        yield (
            f"{name}: s is recorded as {request.multiplier!r}, ({request.epsilon}, {request.delta}) give "
            f"{recorded.multiplier!r}"
        )
    new, earlier = recorded.new_exposures(), recorded.earlier_exposures()
    yield from _check_subjects(request, recorded)
    charged = {}
    # Only noise of the request itself is charged, to its own subjects and to those forgotten earlier.
    for one in [*new, *earlier] if recorded.method.info.protection == "noise" else []:
        psi = recorded.psi(one)
        cost = charge(psi, recorded.noise_std)
        if cost > one.subject.left(recorded.order) * (1.0 + TOLERANCE):
            yield (
                f"{name}: the noise {recorded.noise_std!r} at node {request.source_node} costs subject "
                f"{one.subject.subject} {cost!r}, more than the {one.subject.left(recorded.order)!r} it has left"
            )
        if one in new or psi > 0.0:
            charged[(noise_node, one.subject.subject)] = (repr(finite_or_text(psi)), cost)
    found = {key: (row.psi, row.charge) for key, row in stored_charges.items()}
    for key in sorted(set(charged) | set(found)):
        pair, expected = found.get(key, (None, None)), charged.get(key, (None, None))
        if not (agree(_figure(pair[0]), _figure(expected[0])) and agree(pair[1], expected[1])):
            yield (
                f"{name}: the charge of subject {key[1]} is recorded as {found.get(key)}, recomputed {charged.get(key)}"
            )
    before = RunView(reader, tip=int(tables["run"][("tip",)]["value"]))
    at_hand = {int(key[0]) for key in tables["models"]}
    yield from _check_erasure(before, request, recorded, at_hand, content)
    yield from check_updates_erased(before, recorded, tables, content)
    if recorded.method.info.starts_from == "rule":
        yield from _check_choice(before, request, recorded, at_hand)
    yield from _check_start(before, request, recorded)
    if request.status == "done":
        yield from check_statements(reader, request, recorded, content, ledger)


def _check_subjects(request: RequestRow, recorded: RecordedRequest) -> Iterator[str]:
    """Who is hidden must be who asked, jointly if that was asked for; the node made must be that of the request."""
    asked = tuple(recorded.view.index_of[name] for name in request.clients)
    wanted = [asked] if request.unit == "joint" else [(one,) for one in asked]
    found = [one.subject.clients for one in recorded.new_exposures()]
    if found != wanted:
        yield f"request {request.request}: it hides the clients {found}, but was asked to forget {wanted}"
    made = recorded.view.path.nodes[-1]
    place = (made.parent, made.branch, made.order, made.noise_std)
    if place != (request.source_node, recorded.order, recorded.order, recorded.noise_std):
        yield f"request {request.request}: node {made.node} is not the one that its choice describes"


def _check_erasure(
    view: RunView, request: RequestRow, recorded: RecordedRequest, at_hand: set[int], content: dict[str, Any]
) -> Iterator[str]:
    """What had to be erased must be what was erased."""
    exposures = view.exposures([one.subject for one in recorded.new_exposures()])
    cut_after = -1 if request.source_node is None else view.path.depth_of.get(request.source_node, -1)
    wanted = nodes_to_erase(view, at_hand, exposures, cut_after, request.retention)
    erased, remaining = set(content.get("dropped_models", [])), set(content["remaining_models"])
    if erased != wanted:
        yield (
            f"request {request.request}: models of nodes {sorted(erased ^ wanted)} were erased or left against "
            f"retention {request.retention}"
        )
    if remaining != at_hand - wanted:
        yield f"request {request.request}: the models that remain are recorded as {sorted(remaining)}"
    back = {one["node"] for one in content["models"]} & wanted
    if back:
        yield f"request {request.request}: erased models {sorted(back)} were written again"


def _check_start(view: RunView, request: RequestRow, recorded: RecordedRequest) -> Iterator[str]:
    """A request must have started from the model its method starts from; noise must be promised."""
    start = recorded.method.info.starts_from
    expected = {"fresh": None, "current": view.path.nodes[-1].node, "initial": view.path.nodes[0].node}
    if recorded.replayed != (start == "initial"):
        kind = recorded.view.path.nodes[-1].kind
        yield f"request {request.request}: a node of kind {kind} is recorded, method {request.method} makes none"
    if start in expected and (request.source_node, request.wanted_node) != (expected[start],) * 2:
        yield f"request {request.request}: it started from node {request.source_node}, not from the {start} model"
    if recorded.method.info.protection != "noise" and recorded.noise_std != 0.0:
        yield f"request {request.request}: noise {recorded.noise_std!r} is recorded, method {request.method} adds none"
    asked = request.sigma
    if asked != "auto" and recorded.noise_std not in (0.0, float(asked)):
        yield f"request {request.request}: sigma {asked} was asked for, {recorded.noise_std!r} is recorded"


def _check_choice(view: RunView, request: RequestRow, recorded: RecordedRequest, at_hand: set[int]) -> Iterator[str]:
    """The node must be the latest kept one that every budget allows."""
    subjects = [one.subject for one in recorded.new_exposures()]
    exposures = view.exposures([*subjects, *view.earlier_subjects(before_order=recorded.order)])
    kept = [depth for node, depth in view.path.depth_of.items() if node in at_hand]
    if recorded.noise_std > 0.0:
        around = [
            choose_node(exposures, kept, recorded.noise_std * scale, recorded.order)
            for scale in (1.0 - TOLERANCE, 1.0, 1.0 + TOLERANCE)
        ]
        nodes = {view.path.nodes[one.depth].node for one in around}
        if request.source_node not in nodes:
            yield f"request {request.request}: it went back to node {request.source_node}, the rule says {nodes}"
        wanted = {view.path.nodes[one.wanted_depth].node for one in around}
        if request.wanted_node not in wanted:
            yield (
                f"request {request.request}: the wanted node is recorded as {request.wanted_node}, recomputed {wanted}"
            )
    elif request.source_node not in view.path.depth_of:
        yield f"request {request.request}: its source node {request.source_node} was not on the active history"


def _figure(text: str | None) -> float | None:
    """A Psi as the table `charges` writes it: a number, or the word for an infinite one in quotation marks."""
    return None if text is None else float(text.strip("'"))
