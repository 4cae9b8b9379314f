"""Psi of every client at the tip of a run, which follows from the recorded rounds."""

from __future__ import annotations

import numpy as np

from sifu.run.run_view import RunView
from sifu.store.history_tables import ParticipationRows
from sifu.store.reader import RunReader, chain_of, joined_remainders
from sifu.theory.arrays import Floats
from sifu.theory.history import KINDS_WITH_CLIENTS, PathNode
from sifu.theory.rollback import Subject
from sifu.theory.tracking import SensitivityTracker

MOST_TRACKERS = 3
"""Largest number of nodes at which the Psi of all clients is kept in memory."""


def track_everyone(view: RunView) -> SensitivityTracker:
    """Return Psi of every client at the tip of `view`, computed from the last cached node on its path."""
    reader, nodes, count = view.reader, view.nodes, len(view.clients)
    remembered = {node: tracker for node, tracker in reader.trackers.items() if tracker.client_count == count}
    start = next((d for d in range(len(nodes) - 1, -1, -1) if nodes[d].node in remembered), None)
    tracker = SensitivityTracker(count) if start is None else remembered[nodes[start].node].copy()
    beyond = nodes[0 if start is None else start + 1 :]
    taken_part, numbers = ParticipationRows.empty(), [node.node for node in beyond]
    if any(node.kind in KINDS_WITH_CLIENTS for node in beyond):
        taken_part = reader.everyone() if start is None else reader.participation(first=min(numbers))
    starts = np.searchsorted(taken_part.nodes, numbers)
    ends = np.searchsorted(taken_part.nodes, numbers, side="right")
    for node, first, last in zip(beyond, starts, ends, strict=True):
        _track(view, tracker, node, taken_part, slice(first, last))
    remember_psi(reader, nodes[-1].node, tracker)
    return tracker.copy()


def with_earlier_names(view: RunView, psi: Floats, depth: int) -> Floats:
    """Return every client's Psi at `depth`; a client that rejoined gets the joint Psi of all its indices."""
    for remainder in joined_remainders(view.reader):
        subject = Subject(0, chain_of(view.reader, remainder.client), 1.0, view.next_order)
        if remainder.client < psi.size:  # a view of an earlier time has fewer clients
            psi[remainder.client] = view.curve(subject).one(depth)
    return psi


def remember_psi(reader: RunReader, node: int, tracker: SensitivityTracker) -> None:
    """Cache the Psi of all clients at a node, for callers that continue from this node."""
    trackers = reader.trackers
    trackers.pop(node, None)
    trackers[node] = tracker
    while len(trackers) > MOST_TRACKERS:
        del trackers[next(iter(trackers))]


def _track(view: RunView, tracker: SensitivityTracker, node: PathNode, rows: ParticipationRows, taken: slice) -> None:
    if node.kind == "noise":
        tracker.add_rounding(node.rounding)
    if node.kind not in KINDS_WITH_CLIENTS:
        return
    measured = rows.clients[taken], rows.samples[taken], rows.drifts[taken], node.mean_shift, node.rounding
    _, scalars = view.summarise_round(*measured)
    tracker.update(scalars)
