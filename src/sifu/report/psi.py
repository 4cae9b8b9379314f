"""Psi of a request's subjects along the path as it was before the request: what decided where it went back to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sifu.plots.run_data import PsiPanel
from sifu.record.run_view import RunView
from sifu.store.reader import RunReader
from sifu.store.table_rows import RequestRow, SubjectRow
from sifu.theory.calibration import hidden_sensitivity
from sifu.theory.rollback import Subject

MOST_POINTS = 400


def psi_panel(
    reader: RunReader, row: RequestRow, subjects: Sequence[SubjectRow], subject_count: int, tip: int | None
) -> PsiPanel:
    """One request's panel: `subjects` are those shown, `tip` the current model before the request."""
    view = RunView(reader, tip=tip)
    path = view.path
    terms, multiplier = row.terms, row.terms.multiplier
    noise_std = row.noise_std or 0.0
    psi_star = hidden_sensitivity(noise_std, multiplier)
    rounds = np.cumsum([0 if node.kind != "round" else 1 for node in path.nodes])
    source = path.depth_of[row.source_node or 0]
    depths = _some_depths(path.tip, source)
    drawn = [
        Subject(subject.subject, subject.clients, multiplier, terms.scope, row.request_order or 0, 0.0, terms.reserve)
        for subject in subjects
    ]
    psi_curves = [view.curve(subject) for subject in drawn]
    at_source = np.array([curve.one(source) for curve in psi_curves])
    by_size = np.argsort(-at_source, kind="stable")
    limit = psi_star * np.sqrt(1.0 - terms.reserve)
    next_psi = max((curve.one(min(source + 1, path.tip)) for curve in psi_curves), default=0.0)
    held_back = ""
    if row.wanted_node is not None and row.wanted_node != row.source_node:
        held_back = "the latest allowed model was not kept"
    elif source < path.tip and noise_std > 0.0 and next_psi <= limit:
        held_back = "held back by clients forgotten earlier"
    largest = drawn[int(by_size[0])].clients
    return PsiPanel(
        request=row.request,
        clients=len(row.clients),
        subjects=subject_count,
        joint=terms.unit == "joint",
        x=rounds[depths].astype(np.int64),
        curves=np.array([psi_curves[int(index)].at(depths) for index in by_size]),
        largest="" if terms.unit == "joint" else view.clients[largest[0]].name,
        psi_star=psi_star,
        limit=float(limit),
        noise_std=noise_std,
        source_x=int(rounds[source]),
        source_psi=float(at_source.max()),
        tip_x=int(rounds[-1]),
        noise_edges=tuple(int(rounds[depth]) for depth, _ in path.noise_depths),
        held_back=held_back,
    )


def _some_depths(tip: int, source: int) -> np.ndarray:
    """Every depth, or few enough of them that a figure stays small; the ends and the source are always among them."""
    spread = np.linspace(0, tip, min(tip + 1, MOST_POINTS)).round().astype(np.int64)
    return np.unique(np.append(spread, source))
