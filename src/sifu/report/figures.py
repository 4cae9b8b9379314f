"""The figures of a report. Each function takes collected data and returns a matplotlib figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sifu.plots.accuracy_figure import (
    accuracy_message,
    before_after_message,
    draw_accuracy,
    draw_before_after,
    draw_rounds,
    rounds_message,
)
from sifu.plots.psi_figure import draw_history, draw_psi, history_message, psi_message
from sifu.plots.run_data import PsiPanel, ReportData
from sifu.run.run_view import RunView
from sifu.store.projection import RequestRow, SubjectRow
from sifu.store.reader import RunReader
from sifu.theory.calibration import hidden_sensitivity
from sifu.theory.rollback import Subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


__all__ = ["FIGURES", "FigureKind", "draw_accuracy", "draw_before_after", "draw_history", "draw_psi", "draw_rounds"]


@dataclass(frozen=True)
class FigureKind:
    """A figure of the page: its file name, what it says in one sentence, and how to read it."""

    name: str
    draw: Callable[[ReportData], Figure]
    message: Callable[[ReportData], str]
    caption: str
    caption_without_scratch: str = ""

    def explained(self, data: ReportData) -> str:
        """The caption that fits what was recorded."""
        scratch = any(request.scratch_rounds is not None for request in data.done)
        return self.caption if scratch or not self.caption_without_scratch else self.caption_without_scratch


FIGURES: tuple[FigureKind, ...] = (
    FigureKind(
        "history",
        draw_history,
        history_message,
        "Each lane is one stretch of training, from left to right. To forget clients, the operator continues from a "
        "kept model, the current one or an earlier one, adds random noise where something needs hiding (dotted arrow), "
        "and trains on without them; what came after that model is cut off and erased.",
    ),
    FigureKind(
        "psi",
        draw_psi,
        psi_message,
        "Ψ bounds how far a client can have moved the model, if what the certificates name as assumed holds. Noise of "
        "size σ hides it up to the line Ψ*, so a request goes back to the latest kept model at which every client "
        "concerned is below that line.",
    ),
    FigureKind(
        "rounds",
        draw_rounds,
        rounds_message,
        "The sure way to forget a client is to train again from scratch without it. The bars compare how many rounds "
        "of training either way took to reach the same target.",
        "How many rounds of training each request took. Training from scratch was not run for comparison.",
    ),
    FigureKind(
        "before-after",
        draw_before_after,
        before_after_message,
        "Forgetting does not mean being bad at the client's data: a model that never saw the client (diamond) is often "
        "right about it too. What counts is that the filled dot is near the diamond.",
        "How often the model is right before and after each request. Forgetting does not mean being bad at the "
        "client's data: a model that never saw the client is often right about it too.",
    ),
    FigureKind(
        "accuracy",
        draw_accuracy,
        accuracy_message,
        "How often the model is right on the training data of the clients that take part, round after round. Dotted "
        "lines mark the requests.",
    ),
)
