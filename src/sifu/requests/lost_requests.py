"""Requests whose certificates were issued after the backup that a run was restored from.

A certificate for clients is satisfied if the restored run forgets each of these clients, or an open request asks for
it. A certificate for records does not name the records, so a later request for as many records of the client satisfies
it as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sifu.core.operator_words import forgotten_words
from sifu.run.run_view import RunView
from sifu.store.reader import RESTORED, RunReader, names_now, plain_names

Lost = Mapping[str, Any]
"""Request of a certificate: its id, the time it was received, its clients, and the number of records or None."""


def lost_requests(reader: RunReader, bodies: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the requests of certificates, given by their bodies, that a run has neither executed nor open."""
    named = ("request", "received", "clients", "records")
    lost = {body["request"]: {name: body[name] for name in named} for body in bodies}
    last = reader.last_event()[0]
    return [entry for entry in lost.values() if not _is_satisfied(reader, entry, last)]


def still_lost(reader: RunReader) -> list[Lost]:
    """Return the lost requests that restorations of the run recorded and that nobody has filed again."""
    return [
        entry
        for event in reader.events()
        if event.kind == RESTORED
        for entry in event.content["requests"]
        if not _is_satisfied(reader, entry, event.seq)
    ]


def lost_words(entry: Lost) -> str:
    """Return what to do about a lost request."""
    clients = ",".join(entry["clients"])
    whom = forgotten_words(entry["clients"], entry["records"])
    rows = " --records ..., if their rows still exist" if entry["records"] else ""
    return (
        f"request {entry['request']} for {whom} was executed after the backup and is not in this run: file it again "
        f"with sifu forget DIR --clients {clients}{rows}"
    )


def _is_satisfied(reader: RunReader, entry: Lost, since: int) -> bool:
    """Return whether a run forgets what a lost request asked for; a request for records must be filed after `since`."""
    view, steps, now = RunView(reader), reader.steps(), names_now(reader)
    rejoining = {name for row in view.requests if row.records and row.status == "running" for name in row.clients}
    covered = {view.clients[client].name for client in view.forgotten} - rejoining
    covered |= {name for row in view.requests if row.is_open and not row.records for name in row.clients}
    if covered.issuperset(now.get(name, name) for name in entry["clients"] if name in view.index_of):
        return True
    return bool(entry["records"]) and any(
        not row.was_ended
        and len(row.records) == entry["records"]
        and list(plain_names(reader, row.clients)) == list(entry["clients"])
        and (row.request == entry["request"] or steps["request received", row.request] > since)
        for row in view.requests
    )
