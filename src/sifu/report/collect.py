"""Data of a report, read from one snapshot of the run while other processes may write to it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sifu.api import Run, RunStatus
from sifu.api.status import status_of
from sifu.core.certificate_words import Certificate
from sifu.report import report_words as words
from sifu.report.run_data import AccuracyTrace, Branch, PsiPanel, ReportData, ReportedRequest
from sifu.requests.outcome import Measured
from sifu.run.run_view import ACTIVE, RunView
from sifu.theory.calibration import hidden_sensitivity
from sifu.theory.history import PathNode, count_rounds, rounds_so_far
from sifu.theory.rollback import Subject

MOST_POINTS = 400
MOST_PANELS = 6
MOST_SUBJECTS = 24


def collect(run_folder: str | Path) -> ReportData:
    """Return the data of a report, from one snapshot of the run."""
    with Run(run_folder).view() as view:
        return _collect(view)


def _collect(view: RunView) -> ReportData:
    reader = view.reader
    status = status_of(view)
    solved = status.closed_form  # solves do not count as rounds, not even those for new clients
    nodes = reader.nodes_by_number()
    on_path = {node.node for node in view.nodes}
    accuracies = {row.node: row.accuracy for row in reader.evaluations() if row.subset == ACTIVE}
    labels = {row.request_order: row.request for row in view.requests if row.request_order is not None}
    events, rounds_before = reader.events(), _rounds_before(nodes, view.spec.groups.rounds)
    return ReportData(
        run=reader.value("run"),
        status=status,
        training_rounds=0 if solved else count_rounds(node for node in nodes.values() if node.branch == 0),
        rounds_in_all=0 if solved else status.rounds_run,
        branches=_branches(nodes, on_path, rounds_before, labels),
        requests=_requests(view, status, nodes),
        psi_panels=tuple(_psi_panels(view, rounds_before)),
        trace=_trace(nodes, accuracies),
        events=len(events),
        last_event=events[-1].time if events else "",
        ledger_head=events[-1].hash.hex() if events else "",
        public_key=reader.value("public_key"),
        regression=not view.spec.regime.has_accuracy,
    )


def _rounds_before(nodes: Mapping[int, PathNode], separate: int) -> dict[int, int]:
    """Return the number of rounds that led to each node; parents precede their children in `nodes`.

    A merge counts the `separate` rounds of its groups.
    """
    result: dict[int, int] = {}
    for number, node in nodes.items():
        before = 0 if node.parent is None else result[node.parent]
        result[number] = before + {"round": 1, "merge": separate}.get(node.kind, 0)
    return result


def _branches(
    nodes: Mapping[int, PathNode], on_path: set[int], rounds_before: Mapping[int, int], labels: Mapping[int, str]
) -> tuple[Branch, ...]:
    # Group models belong to no branch. The merge of the first training starts none: it belongs to branch 0.
    nodes = {number: node for number, node in nodes.items() if node.kind != "group"}
    starts = {
        node.branch: node
        for node in nodes.values()
        if node.kind != "round" and not (node.kind == "merge" and node.branch == 0)
    }
    rounds = dict.fromkeys(starts, 0)
    active = dict.fromkeys(starts, -1)
    for node in nodes.values():
        rounds[node.branch] = max(rounds[node.branch], node.position)
        if node.node in on_path:
            active[node.branch] = max(active[node.branch], node.position)
    return tuple(
        Branch(
            branch,
            "training" if branch == 0 else labels.get(branch, f"request {branch}"),
            rounds_before[first.node],
            rounds[branch],
            None if first.parent is None else (nodes[first.parent].branch, nodes[first.parent].position),
            first.noise_std,
            active[branch],
        )
        for branch, first in sorted(starts.items())
    )


def _trace(nodes: Mapping[int, PathNode], accuracies: Mapping[int, float]) -> AccuracyTrace:
    x, accuracy, branch, starts = [], [], [], []
    for (number, node), run in zip(nodes.items(), rounds_so_far(nodes.values()), strict=True):
        if node.kind != "round" and node.branch > 0:
            starts.append((run, node.branch))
        if number in accuracies:
            x.append(run)
            accuracy.append(accuracies[number])
            branch.append(node.branch)
    return AccuracyTrace(
        np.array(x, dtype=np.int64), np.array(accuracy), np.array(branch, dtype=np.int64), tuple(starts)
    )


def _requests(view: RunView, status: RunStatus, nodes: Mapping[int, PathNode]) -> tuple[ReportedRequest, ...]:
    last = {node.branch: node.position for node in nodes.values()}
    reader, regime, target, result = view.reader, view.spec.regime, status.target, []

    def fit(found: Any) -> str:
        if regime.has_accuracy:
            return words.percent(found and found.accuracy)
        return words.number(regime.squared_error(found and found.loss), 4)

    for row, request in zip(view.requests, status.requests, strict=True):
        source = nodes.get(row.source_node) if row.source_node is not None else None
        measured = vars(Measured.of(reader, row))
        after = measured["remaining_after"]
        stored = reader.certificates(row.request).get((row.request, "auditor"))
        reported = ReportedRequest(
            **vars(request),
            noise_std=row.noise_std,
            rollback=None if source is None else (source.branch, source.position),
            rounds=0 if status.closed_form else last.get(row.request_order or -1, 0),
            fits={name: fit(found) for name, found in measured.items()},
            reached=None if after is None or target <= 0 else after.accuracy >= target,
            certificate=None if stored is None else Certificate("auditor", **json.loads(stored)),
        )
        result.append(reported)
    return tuple(result)


def _psi_panels(now: RunView, rounds_before: Mapping[int, int]) -> Iterator[PsiPanel]:
    """Yield a panel for each of the latest requests that continued from an earlier model and hide clients by noise."""
    rows = [request for request in now.requests if request.noise_node is not None and request.source_node is not None]
    charged = {(charge.noise_node, charge.subject): float(charge.psi.strip("'")) for charge in now.reader.charges()}
    for row in sorted(rows, key=lambda request: request.request_order or 0)[-MOST_PANELS:]:
        subjects = [subject for subject in now.reader.subjects() if subject.request == row.request]
        subjects.sort(key=lambda subject: -charged.get((row.noise_node or 0, subject.subject), 0.0))
        # The evaluation on the remaining clients identifies the model just before the request.
        before = Measured.of(now.reader, row).remaining_before
        view = RunView(now.reader, tip=(row.noise_node or 1) - 1 if before is None else before.node)
        path = view.path
        multiplier = row.terms.multiplier
        noise_std = row.noise_std or 0.0
        psi_star = hidden_sensitivity(noise_std, multiplier)
        rounds = np.array([rounds_before[node.node] for node in path.nodes])
        source = path.depth_of[row.source_node or 0]
        depths = _some_depths(path.tip, source)
        drawn = [
            Subject(subject.subject, subject.clients, multiplier, row.request_order or 0)
            for subject in subjects[:MOST_SUBJECTS]
        ]
        psi_curves = [view.curve(subject) for subject in drawn]
        at_source = np.array([curve.one(source) for curve in psi_curves])
        by_size = np.argsort(-at_source, kind="stable")
        largest = drawn[int(by_size[0])].clients
        yield PsiPanel(
            request=row.request,
            x=rounds[depths].astype(np.int64),
            curves=np.array([psi_curves[int(index)].at(depths) for index in by_size]),
            largest=view.clients[largest[0]].name,
            psi_star=psi_star,
            noise_std=noise_std,
            source_x=int(rounds[source]),
            source_psi=float(at_source.max()),
            tip_x=int(rounds[-1]),
            noise_edges=tuple(int(rounds[depth]) for depth, _ in path.noise_depths),
        )


def _some_depths(tip: int, source: int) -> np.ndarray:
    """Return all depths, or a selection that keeps a figure small and includes the ends and the source."""
    spread = np.linspace(0, tip, min(tip + 1, MOST_POINTS)).round().astype(np.int64)
    return np.unique(np.append(spread, source))
