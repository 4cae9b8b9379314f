"""Checks that every request followed the rules: its method, node, noise, charges, erasure and rounds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from sifu.checking.certificate_checks import check_statements
from sifu.checking.head_checks import check_statistics_erased
from sifu.checking.stored_models import TOLERANCE, agree
from sifu.choices import LEVELS
from sifu.core.ledger import finite_or_text
from sifu.core.request_terms import AUTO
from sifu.planning.plan import MethodOption, choose_method, least_level
from sifu.requests.certification import RecordedRequest
from sifu.requests.files_to_erase import nodes_to_erase
from sifu.run.run_view import RunView
from sifu.store.projection import ChargeRow, RequestRow
from sifu.store.reader import RunReader
from sifu.store.replayed_ledger import ReplayedLedger, ReplayedTables
from sifu.theory.rollback import charge, choose_node


def check_choice_of_method(request: RequestRow, recorded: RecordedRequest, content: dict[str, Any]) -> Iterator[str]:
    """Yield the problems of a request's method, of the methods it was compared with, and of its level.

    `content` is the payload of its rollback.
    """
    auto = content.get("auto")
    level, restored = recorded.level, bool(recorded.view.record_history.restored)
    floor = request.terms.level
    if floor is not None and not restored and LEVELS.index(level) < LEVELS.index(floor):
        yield f"level {floor} was requested, and it was executed at level {level}"
    if request.terms.method != AUTO:
        if request.method != request.terms.method or auto is not None:
            yield f"method {request.terms.method} was asked for, {request.method} executed it"
        return
    if auto is None:
        yield f"auto chose the method, but the methods that {request.method} was compared with are not recorded"
        return
    least = auto["least_level"]
    compared = [MethodOption(way["method"], way["level"], way["rounds"]) for way in auto["ways"]]
    methods = [way.method for way in compared]
    always = recorded.view.regime.exact_method
    if len(set(methods)) < len(methods) or (request.terms.sigma == AUTO and always not in methods):
        yield f"auto had {', '.join(methods) or 'nothing'} to choose from, which cannot be all there was"
    if LEVELS.index(least) < LEVELS.index(least_level(recorded.request.terms, least)):
        yield f"auto chose among levels from {least} on, below the {floor} asked for"
    approved = least_level(request.terms)
    if recorded.view.spec.requests.approval != "none" and least != approved:
        yield f"auto chose among levels from {least} on, but the terms approved say {approved}"
    taken = choose_method(compared, least)
    if taken != request.method:
        yield f"{request.method} executed it, but by the recorded figures auto had to choose {taken}"
    stated = next((way.level for way in compared if way.method == request.method), None)
    if stated != level and not restored:
        yield f"auto took {request.method} for its level {stated}, recomputed {level}"


def check_requests(reader: RunReader) -> Iterator[str]:
    """Yield the problems of each request: its node, noise, charges, level and certificate are recomputed from scalars.

    Each request is compared with the replayed tables just before its rollback.
    """
    executed = {row.request: row for row in reader.requests() if row.noise_node is not None}
    stored: dict[int, dict[tuple[int, int], ChargeRow]] = {}
    for row in reader.charges():
        stored.setdefault(row.noise_node, {})[(row.noise_node, row.subject)] = row
    for event, before in ReplayedLedger.of(reader).moments():
        if event.kind != "rolled back":
            continue
        request = executed.pop(event.content["request"], None)
        if request is not None:
            charges, recorded = stored.get(request.noise_node or 0, {}), RecordedRequest(reader, request)
            for problem in _check_request(request, recorded, charges, before, event.content):
                yield f"request {request.request}: {problem}"
            if request.status == "done" and request.noise_std is not None:
                yield from check_statements(reader, request, recorded)
    for left in executed:
        yield f"request {left}: the ledger has no event that executed it"


def _check_request(
    request: RequestRow,
    recorded: RecordedRequest,
    stored_charges: dict[tuple[int, int], ChargeRow],
    before: ReplayedTables,
    content: dict[str, Any],
) -> Iterator[str]:
    reader, noise_node = recorded.reader, recorded.view.path.nodes[-1].node
    if request.noise_std is None:
        yield "its figures are missing"
        return
    new, earlier = recorded.new_exposures, recorded.earlier_exposures
    yield from _check_subjects(request, recorded, recorded.noise_std)
    charged = {}
    # Only the noise of the request itself is charged, to its own subjects and to subjects forgotten earlier.
    for exposure in [*new, *earlier]:
        psi, subject = recorded.psi(exposure), exposure.subject
        cost = charge(psi, recorded.noise_std)
        left = subject.left
        if cost > left * (1.0 + TOLERANCE):
            yield (
                f"the noise {recorded.noise_std!r} at node {request.source_node} costs subject "
                f"{subject.subject} {cost!r}, more than the {left!r} it has left"
            )
        if exposure in new or psi > 0.0:
            charged[(noise_node, subject.subject)] = (repr(finite_or_text(psi)), cost)
    recorded_charges = {key: (row.psi, row.charge) for key, row in stored_charges.items()}
    for key in sorted(set(charged) | set(recorded_charges)):
        pair, expected = recorded_charges.get(key, (None, None)), charged.get(key, (None, None))
        if not (agree(_figure(pair[0]), _figure(expected[0])) and agree(pair[1], expected[1])):
            yield (
                f"the charge of subject {key[1]} is recorded as {recorded_charges.get(key)}, "
                f"recomputed {charged.get(key)}"
            )
    view, available = RunView(reader, tip=before.tip, before=recorded.rolled_back), before.model_nodes
    exposures = view.exposures([exposure.subject for exposure in new])
    cut_after = -1 if request.source_node is None else view.path.depth_of.get(request.source_node, -1)
    wanted = nodes_to_erase(view, available, exposures, cut_after, request.terms.retention)
    yield from _check_erasure(request, wanted, available, content)
    yield from check_statistics_erased(recorded, before, content)
    if recorded.method.info.starts_from == "rule":
        yield from _check_choice(view, request, recorded, available)
    yield from _check_start(view, request, recorded)
    yield from check_choice_of_method(request, recorded, content)
    yield from _check_rounds(request, recorded)


def _check_subjects(request: RequestRow, recorded: RecordedRequest, noise_std: float) -> Iterator[str]:
    """Yield a problem unless the subjects are the requested clients and the new node agrees with the request's row.

    A subject includes all earlier indices of its client.
    """
    if not agree(request.multiplier, recorded.multiplier):
        budget = f"({request.terms.epsilon}, {request.terms.delta})"
        yield f"s is recorded as {request.multiplier!r}, {budget} give {recorded.multiplier!r}"
    wanted = recorded.view.chains(request.clients)
    hidden = [exposure.subject.clients for exposure in recorded.new_exposures]
    if hidden != wanted:
        yield f"it hides the clients {hidden}, but was asked to forget {wanted}"
    node = recorded.view.path.nodes[-1]
    place = (node.parent, node.branch, node.order, node.noise_std)
    if place != (request.source_node, recorded.order, recorded.order, noise_std):
        yield f"node {node.node} is not the one that its choice describes"


def _check_erasure(
    request: RequestRow, wanted: set[int], available: set[int], content: dict[str, Any]
) -> Iterator[str]:
    """Yield a problem unless exactly the models in `wanted` were erased."""
    erased, remaining = set(content.get("dropped_models", [])), set(content["remaining_models"])
    if erased != wanted:
        against = sorted(erased ^ wanted)
        yield f"models of nodes {against} were erased or left against retention {request.terms.retention}"
    if remaining != available - wanted:
        yield f"the models that remain are recorded as {sorted(remaining)}"
    back = {model["node"] for model in content["models"]} & wanted
    if back:
        yield f"erased models {sorted(back)} were written again"


def _check_start(view: RunView, request: RequestRow, recorded: RecordedRequest) -> Iterator[str]:
    """Yield a problem unless a request started from the model that its method prescribes, with the promised noise."""
    start = recorded.method.info.starts_from
    initial = view.path.nodes[0].node
    expected = {"fresh": None, "merge": initial if recorded.merged else None}
    if recorded.merged and start != "merge":
        yield f"groups were merged, which method {request.method} does not do"
    if start in expected and (request.source_node, request.wanted_node) != (expected[start],) * 2:
        yield f"it started from node {request.source_node}, not from the {start} model"
    sigma = request.terms.sigma
    if sigma != "auto" and recorded.noise_std not in (0.0, float(sigma)):
        yield f"sigma {sigma} was asked for, {recorded.noise_std!r} is recorded"


def _check_rounds(request: RequestRow, recorded: RecordedRequest) -> Iterator[str]:
    """Yield a problem if a request took more rounds with participants than the spec allows."""
    spec = recorded.view.spec
    if request.final_node is None:
        return
    start = recorded.view.path.nodes[-1].position
    # A solve is always one round, which the spec does not limit.
    limit = math.inf if spec.regime.solves else spec.stop.max_rounds
    nodes = recorded.reader.nodes_by_number()
    final = nodes[request.final_node]
    own = [node for node in nodes.values() if (node.kind, node.branch) == ("round", final.branch)]
    # A lost round has no participants and does not count; the record does not tell it from an empty draw.
    empty = sum(node.node <= final.node and node.regularity.total_samples == 0 for node in own)
    if final.position - empty > max(limit, start):
        yield f"the spec allows {limit} rounds, and it took {final.position - empty}"


def _check_choice(view: RunView, request: RequestRow, recorded: RecordedRequest, available: set[int]) -> Iterator[str]:
    """Yield a problem unless the source is the latest kept node that every budget allows."""
    subjects = [exposure.subject for exposure in recorded.new_exposures]
    exposures = view.exposures([*subjects, *view.earlier_subjects(before_order=recorded.order)])
    kept = [depth for node, depth in view.path.depth_of.items() if node in available]
    if recorded.noise_std > 0.0:
        around = [
            choose_node(exposures, kept, recorded.noise_std * scale)
            for scale in (1.0 - TOLERANCE, 1.0, 1.0 + TOLERANCE)
        ]
        nodes = {view.path.nodes[choice.depth].node for choice in around}
        if request.source_node not in nodes:
            yield f"it was rolled back to node {request.source_node}, the rule requires {nodes}"
        wanted = {view.path.nodes[choice.wanted_depth].node for choice in around}
        if request.wanted_node not in wanted:
            yield f"the wanted node is recorded as {request.wanted_node}, recomputed {wanted}"
    elif request.source_node not in view.path.depth_of:
        yield f"its source node {request.source_node} was not on the active history"


def _figure(text: str | None) -> float | None:
    """Parse a Psi from the table `charges`: a number, or infinity as a quoted string."""
    return None if text is None else float(text.strip("'"))
