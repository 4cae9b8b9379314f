"""Checks of requests (order of their steps, approvals, clients they leave out), of purges and of restorations."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from sifu.requests.erasure import to_purge
from sifu.requests.lost_requests import lost_words, still_lost
from sifu.requests.request_record import MAY_FOLLOW, request_of
from sifu.run.run_view import RunView
from sifu.store.given_approvals import APPROVED, RECEIVED, Approvals, LeavingClients, approvals_needed, filed_terms
from sifu.store.keys import KEY_FILE
from sifu.store.projection import STATUS_AFTER, WAITING
from sifu.store.reader import PURGED, RESTORED, RunReader
from sifu.store.replayed_ledger import ReplayedLedger


def check_lifecycles(reader: RunReader) -> Iterator[str]:
    """Yield a problem for each step out of order, such as the execution of a refused request."""
    status: dict[str, str] = {}
    for event in reader.events():
        if event.kind == APPROVED and status.get(str(event.content["request"])) not in WAITING:
            yield f"request {event.content['request']}: event {event.seq} approves it, but it does not wait"
        if event.kind not in STATUS_AFTER:
            continue
        request, new = request_of(event.kind, event.content), STATUS_AFTER[event.kind]
        if status.get(request) not in MAY_FOLLOW[new]:
            yield f"request {request}: event {event.seq} makes it {new}, but it was {status.get(request)}"
        status[request] = new


def check_approvals(reader: RunReader) -> Iterator[str]:
    """Yield a problem for each request executed without enough approvals, and for each approval that cannot count."""
    needed = approvals_needed(reader)
    approvals: dict[str, Approvals] = {}
    for event in reader.events():
        content = event.content
        if event.kind == RECEIVED:
            request, actor = str(content["request"]["request"]), str(content.get("actor", "unknown"))
            approvals[request] = Approvals(actor, filed_terms(content).digest(request))
        elif event.kind == APPROVED:
            given = approvals.get(str(content["request"]))
            if given is not None and content.get("terms") != given.terms:
                yield f"request {content['request']}: event {event.seq} approves other terms than it was filed with"
            elif given is None or not given.add(str(content["actor"]), content.get("terms")):
                yield f"request {content['request']}: event {event.seq} approves it, but that approval cannot count"
        elif event.kind == "rolled back":
            counted = len(approvals[str(content["request"])].approved_by)
            if counted < needed:
                yield (
                    f"request {content['request']}: it was executed (event {event.seq}) with {counted} of the {needed} "
                    "approvals that the spec demands"
                )


def check_left_out(reader: RunReader) -> Iterator[str]:
    """Yield a problem for each event with a wrong `left_out`, and for rounds with a client that must be left out.

    `left_out` must name the clients of the approved requests that wait at that time.
    """
    leaving, everyone = LeavingClients(approvals_needed(reader)), reader.everyone()
    number = {profile.name: client for client, profile in enumerate(reader.clients())}
    for event in reader.events():
        leaving.take(event)
        content, rows = event.content, event.content.get("rows")
        waiting = sorted({number[name] for names in leaving.by_request().values() for name in names})
        solves_or_starts = "solve" in content or event.kind == "rolled back"
        stated = content.get("solve", content).get("left_out")
        if solves_or_starts and stated != waiting:
            yield f"event {event.seq} left out clients {stated}, approved requests that waited name {waiting}"
        if event.kind == "rounds" and rows is not None:
            there = set(everyone.between(int(rows["first"]), int(rows["last"])).clients.tolist())
            if not there.isdisjoint(waiting):
                client = min(there & set(waiting))
                yield f"event {event.seq}: client {client} took part in a round while its approved request waited"


def check_purges(reader: RunReader) -> Iterator[str]:
    """Yield a problem for each purge that did not erase the models that the rule selects."""
    for event, before in ReplayedLedger.of(reader).moments():
        if event.kind != PURGED:
            continue
        content, subjects = event.content, {row.subject for row in before.read("subjects")}
        purged = tuple(content.get("dropped_models", []))
        wanted = to_purge(RunView(reader, tip=before.tip), before.model_nodes, subjects)
        if purged != wanted:
            yield f"purge at event {event.seq}: it erased {purged}, the rule says {wanted}"
        if content["subjects"] != sorted(subjects):
            yield f"purge at event {event.seq}: it names subjects {content['subjects']}, not {sorted(subjects)}"


def event_notes(reader: RunReader) -> Iterator[str]:
    """Yield a note for each restoration, for each request that it lost, and for a missing key."""
    for event in reader.events():
        if event.kind == RESTORED:
            yield (
                f"event {event.seq} restored the run from a backup on {event.time}; what was done between the backup "
                "and then is not in this record"
            )
    yield from map(lost_words, still_lost(reader))
    if not (reader.folder / KEY_FILE).is_file():
        yield (
            f"the folder has no {KEY_FILE}: it can be verified, but nothing more can be signed until the key is put "
            "back, from a backup for example"
        )


def check_restored(reader: RunReader) -> Iterator[str]:
    """Yield a problem for each restoration whose event does not name the event before it as the backup's last one."""
    for before, event in itertools.pairwise(reader.events()):
        if event.kind == RESTORED and event.content["backup_head"] != before.head:
            yield f"restored: event {event.seq} names a backup that ended at another event than {before.seq}"
