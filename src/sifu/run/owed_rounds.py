"""Rounds owed to clients whose request was refused or withdrawn.

While an approved request waits, its clients take part in no round. Once it is refused or withdrawn, its clients take
part in as many further rounds as the current branch ran without them.
"""

from __future__ import annotations

from dataclasses import dataclass

from sifu.run.run_view import RunView
from sifu.store.given_approvals import LeavingClients, approvals_needed
from sifu.store.projection import ENDINGS


@dataclass(frozen=True)
class Absence:
    """Clients left out of the rounds between two events, because of a request that was later refused or withdrawn."""

    clients: tuple[int, ...]
    first: int
    last: int


def owed_rounds(view: RunView) -> tuple[int, set[int]]:
    """Return the number of rounds still owed, and the clients that they are owed to.

    A new branch owes nothing: its rounds included every client that belongs in the model.
    """
    absences = [
        absence for absence in _absences(view) if not (view.forgotten | view.left_out).issuperset(absence.clients)
    ]
    if not absences:
        return 0, set()
    branch = view.nodes[-1].branch
    here = {node.node for node in view.nodes if node.kind == "round" and node.branch == branch}
    trained = [
        (event.seq, sum(node in here for node in range(int(rows["first"]), int(rows["last"]) + 1)))
        for event in view.reader.events()
        if event.kind == "rounds" and (rows := event.content.get("rows")) is not None
    ]
    most, owed_to = 0, set[int]()
    for absence in absences:
        without = sum(count for seq, count in trained if absence.first < seq < absence.last)
        since = sum(count for seq, count in trained if seq > absence.last)
        if without > since:
            most = max(most, without - since)
            owed_to |= set(absence.clients) - view.forgotten - view.left_out
    return most, owed_to


def _absences(view: RunView) -> list[Absence]:
    """Return the clients that each refused or withdrawn request excluded, with the exclusion's first and last event."""
    if not any(row.was_ended for row in view.requests):
        return []
    leaving, since, absences = LeavingClients(approvals_needed(view.reader)), dict[str, int](), []
    for event in view.reader.events():
        before = leaving.by_request()
        leaving.take(event)
        now = leaving.by_request()
        since |= {request: event.seq for request in now if request not in before}
        if event.kind in ENDINGS:
            absences += [
                Absence(tuple(view.index_of[name] for name in names), since[request], event.seq)
                for request, names in before.items()
                if request not in now and names
            ]
    return absences
