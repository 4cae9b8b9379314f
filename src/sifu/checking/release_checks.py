"""Checks of releases with noise: each must be a solved head plus noise of the spec's size, with correct distances."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from sifu.errors import SifuError
from sifu.run.releases import Accountant
from sifu.run.run_view import RunView
from sifu.store.files import is_locked
from sifu.store.reader import RELEASED, RunReader
from sifu.store.release_files import (
    ReleaseRow,
    release_path,
    release_row,
    released_model,
    releases,
    unnamed_releases,
)

DISTANCES_AGREE = 1e-6
"""Largest accepted relative difference between a recorded distance and its recomputation on another machine."""


def check_releases(reader: RunReader) -> Iterator[str]:
    """Yield the problems of all releases, of the latest release's file, and of its distances if still recomputable."""
    view = RunView(reader)
    noise_std, rows = view.spec.release.noise, list[ReleaseRow]()
    everyone, released = reader.everyone(), set[int]()
    for event in reader.events():
        content = event.content
        if event.kind == RELEASED:
            row = release_row(event)
            rows.append(row)
            yield from (f"releases: event {event.seq} {problem}" for problem in _wrong(row, noise_std, released))
            if row.clients != tuple(everyone.between(row.node, row.node).clients.tolist()):
                yield f"releases: event {event.seq} does not name the clients of node {row.node}"
            released.add(row.node)
        first = event.kind == "training done"
        if noise_std > 0.0 and (first or event.kind == "request done"):
            node = int(content["node"] if first else content["final_node"])
            if node not in released:
                yield f"releases: event {event.seq} ({event.kind}) came before the head of node {node} was released"
    if is_locked(reader.folder):
        return  # a writer may be about to replace the file
    for path in unnamed_releases(reader):
        yield f"releases: {path.name} is not the latest release: delete it, or let the next command do so"
    if rows:
        yield from _check_latest(reader, view, rows[-1])


def _wrong(row: ReleaseRow, noise_std: float, released: set[int]) -> Iterator[str]:
    """Yield the problems of a single release."""
    if row.noise_std != noise_std or not noise_std > 0.0:
        yield f"records noise {row.noise_std!r}, the spec says {noise_std!r}"
    if row.node in released:
        yield f"releases node {row.node} a second time"
    if sorted(row.distances) != sorted(row.clients) or not set(row.record_distances) <= set(row.clients):
        yield "has distances of clients that did not take part, or lacks some"
    if not all(
        math.isfinite(value) and value >= 0.0 for value in (*row.distances.values(), *row.record_distances.values())
    ):
        yield "has a distance that is not a finite number"


def _check_latest(reader: RunReader, view: RunView, row: ReleaseRow) -> Iterator[str]:
    """Yield the problems of the latest release's file and, if its head is current, of its noise and its distances."""
    try:
        noisy = released_model(reader).astype(np.float64)
    except SifuError as error:
        yield f"releases: {release_path(reader.folder, row.node).name}: {error}"
        return
    if row.node != reader.tip:
        return  # a request changed the head, and the new one has not been released
    moved = float(np.linalg.norm(noisy - reader.load_model(row.node)))
    low, high = (row.noise_std * (math.sqrt(noisy.size) + far) for far in (-8.0, 8.0))
    if not low <= moved <= high:
        yield (
            f"releases: the latest is {moved:.6g} from the solved head; its noise makes it {max(low, 0.0):.6g} to "
            f"{high:.6g}"
        )
    accountant = Accountant.of(reader, view.spec)
    for client in row.clients:
        distance, largest = accountant.distances_of(client)
        yield from _differs(view, client, "distance", row.distances.get(client), distance)
        if largest is not None:
            what = "largest distance of a record"
            yield from _differs(view, client, what, row.record_distances.get(client), largest)


def _differs(view: RunView, client: int, what: str, recorded: float | None, recomputed: float) -> Iterator[str]:
    """Yield a problem if a recorded distance is not the recomputed one."""
    if recorded is None or not abs(recorded - recomputed) <= DISTANCES_AGREE * recomputed:
        who = view.clients[client].name
        yield f"releases: the {what} of {who} is recorded as {recorded!r}, recomputed {recomputed!r}"


def trusted_notes(reader: RunReader) -> Iterator[str]:
    """Yield notes on recorded distances that cannot be recomputed, because statistics or samples are not stored."""
    rows = releases(reader)
    current = bool(rows) and rows[-1].node == reader.tip
    if taken := len(rows) - current:
        yield (
            f"the distances of {taken} of {len(rows)} releases were taken from the signed record: the statistics of "
            "their heads are no longer stored"
        )
    as_rows = {row.clients[0] for row in reader.statistics().values() if row.is_rows}
    if current and (trusted := set(rows[-1].record_distances) - as_rows):
        yield (
            f"the distances of records of {len(trusted)} clients in the latest release were taken from the signed "
            "record: these clients' samples are not stored as rows"
        )
