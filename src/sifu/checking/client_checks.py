"""Checks of the recorded clients: the rounds they took part in, the digests of their samples, and rejoined clients."""

from __future__ import annotations

from collections.abc import Iterator

from sifu.errors import InputError
from sifu.run.run_view import RunView
from sifu.store.projection import ENDINGS
from sifu.store.reader import JOINED, RunReader, joined_remainders, next_name
from sifu.store.replayed_ledger import ReplayedLedger
from sifu.store.salts import SALTS_FILE, WITHOUT_SALTS, obsolete_clients, read_salts, recorded_digests


def check_history(reader: RunReader) -> Iterator[str]:
    """Yield a problem for each node that does not fit its parent, and each forgotten client that took part later."""
    rows = reader.nodes_by_number()
    for node in rows.values():
        parent = rows.get(node.parent) if node.parent is not None else None
        if node.kind == "round" and (
            parent is None
            or parent.node >= node.node
            or (node.branch, node.position) != (parent.branch, parent.position + 1)
        ):
            yield f"history: round node {node.node} does not follow its parent {node.parent}"
        if node.kind == "noise" and (parent is None or node.position != 0 or node.branch != node.order):
            yield f"history: noise node {node.node} is misplaced"
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


ERASING = ("rolled back", JOINED, "rounds", *ENDINGS)
"""Kinds of events after which salts are erased. If the process is killed before that, the next writer erases them."""


def check_sample_digests(reader: RunReader) -> Iterator[str]:
    """Yield a problem for a wrong number of initial digests, and for salts that should have been erased."""
    founders, digests = len(reader.clients()) - len(reader.joined()), reader.payload(1).get("sample_digests")
    if digests is not None and len(digests) != founders:
        yield f"clients: the first event has {len(digests)} digests of samples for {founders} clients"
    try:
        salts = read_salts(reader.folder)
    except InputError as error:
        yield str(error)
        return
    left = sorted(obsolete_clients(reader) & salts.keys())
    (last,) = reader.query("SELECT kind FROM events ORDER BY seq DESC LIMIT 1")[0]
    if left and last not in ERASING:
        names = ", ".join(reader.clients()[client].name for client in left[:5])
        yield f"{SALTS_FILE} holds the salts of {names}, which were erased when they were forgotten: delete it"


def lost_salt_notes(reader: RunReader) -> list[str]:
    """Return a note if salts are missing. No claim depends on salts, but the next request needs them."""
    try:
        salts = read_salts(reader.folder)
    except InputError:
        return []  # another check reports this problem
    lost = recorded_digests(reader).keys() - salts.keys() - obsolete_clients(reader)
    if not lost:
        return []
    return [
        f"{SALTS_FILE} is missing or lacks the salts of {len(lost)} clients; certificates hold. "
        f"To continue, {WITHOUT_SALTS}"
    ]


def check_remainders(reader: RunReader) -> Iterator[str]:
    """Yield a problem for each request to forget records whose client did not join again correctly.

    The forgotten rows must have existed. The client must rejoin between the rollback and the next round, with the
    remaining number of samples.
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
    """Yield a problem for each client that does not rejoin between the rollback and the next round."""
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
        elif event.kind in ENDINGS and event.content["request"] == expected:
            expected = None
        elif expected is not None and event.kind in ("rounds", "request done", JOINED):
            yield f"request {expected}: event {event.seq} comes before its client joined again"
            expected = None
