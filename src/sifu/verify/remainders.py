"""Whether a client whose records were forgotten joined again as it should: once, at once, and with what it had left.

That the rows it left out are those of the request cannot be seen without its data; that their number is, can.
"""

from __future__ import annotations

from collections.abc import Iterator

from sifu.store.reader import JOINED, RunReader
from sifu.store.remainders import joined_remainders, next_name
from sifu.store.replayed_ledger import ReplayedLedger


def check_remainders(reader: RunReader) -> Iterator[str]:
    """Rows that were there, one joining between the rollback and the next round, and the right number of samples."""
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
    """A client joins again after the rollback of its request, before any round, and never twice."""
    records = {row.request: bool(row.records) for row in reader.requests()}
    expected, seen = None, set()
    for event in ReplayedLedger.of(reader).events:
        if event.kind == "rolled back" and records.get(event.content["request"]):
            expected = event.content["request"]
        elif event.kind == JOINED and "request" in event.content:
            request = event.content["request"]
            if request != expected or request in seen:
                yield f"request {request}: event {event.seq} lets its client join again at another time than it may"
            seen.add(request)
            expected = None
        elif expected is not None and event.kind in ("rounds", "request done", JOINED):
            yield f"request {expected}: event {event.seq} comes before its client joined again"
            expected = None
