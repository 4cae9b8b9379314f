"""Checks of a closed-form head against the remaining clients (docs/theory.md, section 14).

Random vectors compare the stored sum with the sum of the clients' statistics (`theory.closed_form.sum_check`).
The head must solve the equations of the sum up to rounding, and no statistics of a forgotten client may be stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from sifu.core.closed_form_engine import recorded_fixed_point
from sifu.errors import RunDamagedError
from sifu.requests.certification import RecordedRequest, solves
from sifu.requests.files_to_erase import statistics_to_erase, sum_left
from sifu.run.run_view import RunView
from sifu.store.files import is_locked
from sifu.store.projection import ENDINGS
from sifu.store.reader import RunReader
from sifu.store.replayed_ledger import ReplayedTables
from sifu.store.statistics_files import OwnStatistics, StatisticsRow, read_statistics
from sifu.theory.closed_form import Rows, Statistics
from sifu.theory.closed_form.ridge import GRID, RESIDUAL, gcv_scores, residual_of
from sifu.theory.closed_form.sum_check import is_sum_of

SCORES_AGREE = 1e-6
"""Relative difference up to which two scores count as equal, because another machine may rank them differently."""


def check_kept_statistics(reader: RunReader) -> Iterator[str]:
    """Yield the problems of the statistics files, of the clients in them, and of the current head."""
    view, rows = RunView(reader), list(reader.statistics().values())
    if not view.regime.solves:
        if rows or solves(reader):
            yield "statistics: files are stored, but the model is not solved in closed form"
        return
    if is_locked(reader.folder):
        return  # a writer may erase a file that is about to be read
    yield from _check_solves(reader, view)
    yield from _check_rows(view, rows)
    fixed = recorded_fixed_point(view.spec, reader.layout)
    own = OwnStatistics.among(rows, fixed)
    whole = next((row for row in rows if row.is_sum), None)
    problems: list[str] = []
    try:
        statistics = None if whole is None else read_statistics(reader.folder, whole, fixed)
        # Read one client at a time: the statistics of all clients may not fit in memory.
        parts = _summed(reader, view, own, set(whole.clients) if whole else set(), problems)
        is_sum = is_sum_of(statistics or Statistics.empty(fixed), parts)
    except RunDamagedError as error:
        yield f"statistics: {error}"
        return
    yield from problems
    if whole is None or statistics is None:
        return
    if set(whole.clients) <= own.rows.keys() and not is_sum:
        yield f"statistics: {whole.file} is not the sum of the statistics of its clients"
    yield from _check_head(reader, view, (whole, statistics))


def _summed(
    reader: RunReader, view: RunView, own: OwnStatistics, clients: set[int], problems: list[str]
) -> Iterator[Statistics | Rows]:
    """Check the stored statistics of every client, append to `problems`, and yield the statistics of `clients`."""
    for client, row in own.rows.items():
        statistics = own.read(reader.folder, client)
        if row.samples != view.clients[client].samples:
            problems.append(f"statistics: {row.file} counts other samples than its client has")
        if client in clients:
            yield statistics


def _check_rows(view: RunView, rows: list[StatisticsRow]) -> Iterator[str]:
    """Yield a problem for each file that contains a forgotten client, is a duplicate, or is not allowed by the spec."""
    for row in rows:
        for client in sorted(set(row.clients) & view.forgotten):
            yield f"statistics: {row.file} contains the forgotten client {view.clients[client].name}"
    own = [row.clients for row in rows if not row.is_sum]
    if len(set(own)) != len(own) or sum(row.is_sum for row in rows) > 1:
        yield "statistics: there are two files of one client, or two sums"
    if own and view.spec.keep.statistics != "clients":
        yield "statistics: single clients' statistics are stored, but the spec allows only their sum"


def _check_solves(reader: RunReader, view: RunView) -> Iterator[str]:
    """Yield a problem for each round that is not a solve from exactly the expected clients.

    The expected clients are all that had joined, except clients that were forgotten, rejected, absent, or left out for
    an approved request.
    """
    recorded, everyone, client_count = solves(reader), reader.everyone(), 0
    named_by: dict[str, set[int]] = {}
    rolled_back = set[str]()
    left_out = {
        (rejection.branch, rejection.round, rejection.client) for rejection in reader.rejections() if rejection.left_out
    }
    for event in reader.events():
        content = event.content
        client_count = int(content.get("run", {}).get("client_count", client_count))
        if event.kind == "request received":
            request = content["request"]
            named_by[request["request"]] = {view.index_of[name] for name in request["clients"]}
        if event.kind in ENDINGS:
            named_by.pop(content["request"], None)
        if event.kind == "rolled back":
            rolled_back.add(content["request"])
        if event.kind != "rounds":
            continue
        first, last = int(content["rows"]["first"]), int(content["rows"]["last"])
        if first != last or last not in recorded:
            yield f"statistics: event {event.seq} records rounds that are no solve"
            continue
        node, part = reader.nodes_by_number()[last], everyone.between(last, last)
        taken = set(part.clients.tolist())
        if not (math.isinf(node.mean_shift) and np.all(np.isinf(part.drifts))):
            yield f"statistics: node {last} is a solve, but has a finite drift"
        relative, rule = recorded[last]["relative_penalty"], view.spec.ridge.regularisation
        if relative not in (GRID if rule == "auto" else (rule,)):
            yield f"statistics: node {last} was solved with r = {relative!r}, the spec says {rule!r}"
        names = {(node.branch, node.position - 1, view.clients[client].name) for client in range(client_count)}
        refused = {view.index_of[name] for _, _, name in names & left_out}
        absent = set(recorded[last].get("absent", []))
        gone = set(recorded[last]["left_out"]).union(*(named_by[request] for request in rolled_back))
        if taken & (gone | absent) or taken | refused | absent != set(range(client_count)) - gone:
            yield f"statistics: node {last} was solved from the wrong clients, not from those that remain"
        samples = sum(view.clients[client].samples for client in taken)
        if recorded[last]["samples"] != samples:
            yield f"statistics: node {last} was solved from {recorded[last]['samples']} samples, not {samples}"


def _check_head(reader: RunReader, view: RunView, whole: tuple[StatisticsRow, Statistics]) -> Iterator[str]:
    """Yield a problem unless the current head solves the equations of the sum, with the lambda of the spec's rule."""
    row, statistics = whole
    tip = view.path.nodes[-1]
    if tip.kind != "round":
        return  # the head was rolled back and is not solved again yet
    solve = solves(reader).get(tip.node, {})
    taken = reader.everyone().between(tip.node, tip.node).clients.tolist()
    if (solve.get("sum"), list(row.clients)) != (row.digest, taken):
        yield f"statistics: the current head was not solved from {row.file}"
        return
    relative = float(solve["relative_penalty"])
    rule = view.spec.ridge.regularisation
    weights = reader.load_model(tip.node).astype(np.float64).reshape(statistics.fixed.width, statistics.fixed.outputs)
    if rule == "auto":
        scores = gcv_scores(statistics)
        best = float(np.min(scores))
        chosen = scores[GRID.index(relative)] if relative in GRID else math.inf
        if not chosen <= best * (1.0 + SCORES_AGREE):
            yield f"statistics: r = {relative!r} is not what cross-validation of the sum chooses"
    residual = residual_of(statistics, relative, weights)
    if not residual <= RESIDUAL:
        yield f"statistics: the current head leaves a residual of {residual:.3g} in the equations of its sum"


def check_statistics_erased(
    recorded: RecordedRequest, before: ReplayedTables, content: dict[str, Any]
) -> Iterator[str]:
    """Yield a problem unless a rollback erased the forgotten clients' statistics and wrote the sum without them.

    `before` holds the tables just before the rollback, whose payload is `content`.
    """
    gone = {client for exposure in recorded.new_exposures for client in exposure.subject.clients}
    stored = before.read("statistics")
    if tuple(content.get("dropped_statistics", [])) != statistics_to_erase(stored, gone):
        yield "the erased statistics are not exactly those that contain forgotten clients"
    left = sum_left(stored, gone)
    expected = [] if left is None else [(True, left.clients)]
    written = [
        (row["file"].endswith(".sum.statistics"), tuple(row["clients"])) for row in content.get("statistics", [])
    ]
    if written != expected:
        yield "the statistics that were written are not those of the remaining clients"
