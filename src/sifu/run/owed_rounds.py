"""Rounds that the current model owes to clients whose request was refused or withdrawn.

While an approved request waits, rounds leave its clients out. Once it is refused or withdrawn, its clients belong in
the model again. They take part in as many further rounds as the current branch ran without them.
"""

from __future__ import annotations

from dataclasses import dataclass

from sifu.run.run_view import RunView
from sifu.store.given_approvals import LeavingClients, approvals_needed

SETTLED = ("refused", "withdrawn")


@dataclass(frozen=True)
class Absence:
    """Clients that a settled request had left out between two events of the ledger."""

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
    branch = view.rows[-1].node.branch
    here = {row.node.node for row in view.rows if row.node.kind == "round" and row.node.branch == branch}
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
    if not any(row.status in SETTLED for row in view.requests):
        return []
    leaving, since, absences = LeavingClients(approvals_needed(view.reader)), dict[str, int](), []
    for event in view.reader.events():
        before = leaving.by_request()
        leaving.take(event)
        now = leaving.by_request()
        since |= {request: event.seq for request in now if request not in before}
        if event.kind in ("request refused", "request withdrawn"):
            absences += [
                Absence(tuple(view.index_of[name] for name in names), since[request], event.seq)
                for request, names in before.items()
                if request not in now and names
            ]
    return absences
