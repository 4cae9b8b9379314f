"""Psi of every client at the tip of a run, by replaying its recorded rounds."""

from __future__ import annotations

import numpy as np

from sifu.run.run_view import RunView
from sifu.store.history_tables import ParticipationRows
from sifu.store.reader import RunReader
from sifu.store.remainders import chain_of, joined_remainders
from sifu.theory.arrays import Floats
from sifu.theory.history import TAKEN_PART, PathNode
from sifu.theory.rollback import Subject
from sifu.theory.tracking import SensitivityTracker, summarise_round

MOST_TRACKERS = 3
"""Places at which everyone's Psi is kept in memory: the tip, and two that requests may go on from."""


def track_everyone(view: RunView) -> SensitivityTracker:
    """Psi of every client at the tip of `view`, from the last place on its path at which it was remembered."""
    reader, rows, count = view.reader, view.rows, len(view.clients)
    remembered = {node: tracker for node, tracker in reader.trackers.items() if tracker.client_count == count}
    start = next((d for d in range(len(rows) - 1, -1, -1) if rows[d].node.node in remembered), None)
    tracker = SensitivityTracker(count) if start is None else remembered[rows[start].node.node].copy()
    beyond = rows[0 if start is None else start + 1 :]
    taken_part, numbers = ParticipationRows.empty(), [row.node.node for row in beyond]
    if any(row.node.kind in TAKEN_PART for row in beyond):
        taken_part = reader.everyone() if start is None else reader.participation(first=min(numbers))
    starts = np.searchsorted(taken_part.nodes, numbers)
    ends = np.searchsorted(taken_part.nodes, numbers, side="right")
    for row, first, last in zip(beyond, starts, ends, strict=True):
        _track(view, tracker, row.node, taken_part, slice(first, last))
    remember_psi(reader, rows[-1].node.node, tracker)
    return tracker.copy()


def with_earlier_names(view: RunView, psi: Floats, depth: int) -> Floats:
    """Every client's Psi at `depth`; for a client that rejoined with fewer records, that of all its names together."""
    for remainder in joined_remainders(view.reader):
        subject = Subject(0, chain_of(view.reader, remainder.client), 1.0, "all", view.next_order)
        if remainder.client < psi.size:  # a view of before it joined has less
            psi[remainder.client] = view.curve(subject).one(depth)
    return psi


def is_followed(view: RunView, depth: int) -> bool:
    """Whether everyone's Psi at this depth is already computed, apart from noise that adds nothing to it."""
    nodes, trackers = view.path.nodes, view.reader.trackers
    while depth > 0 and nodes[depth].kind == "noise" and nodes[depth].node not in trackers:
        depth -= 1
    return nodes[depth].node in trackers


def remember_psi(reader: RunReader, node: int, tracker: SensitivityTracker) -> None:
    """Keep everyone's Psi at a node, for callers that continue from there."""
    trackers = reader.trackers
    trackers.pop(node, None)
    trackers[node] = tracker
    while len(trackers) > MOST_TRACKERS:
        del trackers[next(iter(trackers))]


def _track(view: RunView, tracker: SensitivityTracker, node: PathNode, rows: ParticipationRows, taken: slice) -> None:
    if node.kind == "heuristic":
        tracker.lose_track()
    if node.kind == "noise":
        tracker.add_rounding(node.rounding)
    if node.kind not in TAKEN_PART:
        return
    who = rows.clients[taken]
    _, scalars = summarise_round(
        who,
        rows.samples[taken],
        rows.drifts[taken],
        node.mean_shift,
        node.rounding,
        factors=view.regularities.factors[who],
        averagedness=view.regularities.averagedness[who],
        server_rate=view.facts.server_rate,
        population_samples=view.tracked_population,
    )
    tracker.update(scalars)
