"""Files that a request erases: models and statistics that depend on the forgotten data."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sifu.choices import Retention
from sifu.core.closed_form_engine import recorded_fixed_point
from sifu.run.group_state import contains_any, nodes_always_kept
from sifu.run.run_view import RunView
from sifu.store.statistics_files import OwnStatistics, StatisticsRow, read_statistics, write_sum
from sifu.store.writer import RunWriter
from sifu.theory.closed_form.sums import RunningSum
from sifu.theory.rollback import Exposure, Subject, depths_to_erase


def influenced(exposures: Iterable[Exposure], depth: int) -> bool:
    """Return whether a subject influenced the model at this depth and no noise covers the influence (Psi > 0)."""
    return any(exposure.psi_to_hide(depth) > 0.0 for exposure in exposures)


def nodes_to_erase(
    view: RunView, available: set[int], exposures: Sequence[Exposure], cut_after: int, retention: Retention
) -> set[int]:
    """Return the nodes whose models a request erases.

    Args:
        view: View of the run before the request is executed.
        available: Nodes with a stored model.
        exposures: Subjects of the request, with their Psi along the path.
        cut_after: Depth of the model that the request rolls back to, or -1 for a fresh initial model.
        retention: Retention of the request.
    """
    depth_of = view.path.depth_of
    depths = depths_to_erase(
        sorted(depth_of[node] for node in available if node in depth_of),
        cut_after,
        retention,
        lambda depth: influenced(exposures, depth),
    )
    # Models of groups are on no path. A group's model is erased if a client of the request was in the group.
    leaving = {client for exposure in exposures for client in exposure.subject.clients}
    groups = view.reader.group_models()
    off_path = {node for node in available - set(depth_of) if node not in groups or contains_any(groups[node], leaving)}
    return ({view.path.nodes[depth].node for depth in depths} | off_path) - nodes_always_kept(view.reader)


def everyone_forgotten(view: RunView, among: set[int] | None = None) -> list[Exposure]:
    """Return the exposure of every subject of the executed requests, or only of the subjects in `among`."""
    requests, subjects = {row.request: row for row in view.requests}, []
    for row in view.reader.subjects():
        if among is None or row.subject in among:
            order = requests[row.request].request_order or 0
            subjects.append(Subject(row.subject, row.clients, 1.0, order))
    return view.exposures(subjects)


@dataclass(frozen=True)
class SumLeft:
    """Sum of the statistics of `clients` that replaces the erased sum `made_of`."""

    made_of: StatisticsRow
    clients: tuple[int, ...]


def statistics_to_erase(stored: Iterable[StatisticsRow], gone: Collection[int]) -> tuple[str, ...]:
    """Return the `stored` files with statistics of the clients `gone`."""
    return tuple(sorted(row.file for row in stored if set(gone) & set(row.clients)))


def sum_left(stored: Iterable[StatisticsRow], gone: Collection[int]) -> SumLeft | None:
    """Describe the sum of the `stored` statistics without the clients `gone`.

    A client is removed by subtraction, so its own statistics must be stored.

    Returns:
        The new sum, or None if no sum is stored, no client remains, or the stored sum can stay or cannot be reduced.
    """
    rows = list(stored)
    whole = next((row for row in rows if row.is_sum), None)
    if whole is None:
        return None
    leaving = set(whole.clients) & set(gone)
    clients = tuple(sorted(set(whole.clients) - leaving))
    own = {row.clients[0] for row in rows if not row.is_sum}
    return SumLeft(whole, clients) if clients and leaving and leaving <= own else None


def write_sum_left(writer: RunWriter, view: RunView, gone: Collection[int], node: int) -> list[dict[str, Any]]:
    """Write the sum that `sum_left` describes; return a list with its row, for the event that records `node`.

    The list is empty if there is no such sum.

    Args:
        writer: Writer of the run.
        view: Current view of the run.
        gone: Clients that are forgotten.
        node: Last node that the next event records.
    """
    rows = list(writer.statistics().values())
    left = sum_left(rows, gone)
    if left is None:
        return []
    fixed = recorded_fixed_point(view.spec, writer.layout)
    own = OwnStatistics.among(rows, fixed)
    running = RunningSum(fixed, read_statistics(writer.folder, left.made_of, fixed), in_place=True)
    for client in sorted(set(left.made_of.clients) & set(gone)):
        running.subtract(own.read(writer.folder, client))
    statistics = running.statistics()
    row = write_sum(writer.folder, node, left.clients, statistics)
    writer.written_sum = row["digest"], statistics
    return [row]
