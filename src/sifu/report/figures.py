"""The figures of a report with their captions, and the selection of figures that have something to show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sifu.report.accuracy_figure import accuracy_message, draw_accuracy
from sifu.report.psi_figure import draw_history, draw_psi, history_message, psi_message
from sifu.report.run_data import ReportData

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class FigureKind:
    """A figure of the page: its file name, its message in one sentence, and its caption."""

    name: str
    draw: Callable[[ReportData], Figure]
    message: Callable[[ReportData], str]
    caption: str


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
        "concerned is below that line, or to an earlier one.",
    ),
    FigureKind(
        "accuracy",
        draw_accuracy,
        accuracy_message,
        "How often the model is right on the training data of the clients that take part, round after round. A dotted "
        "line marks the first round of a request, with the number of its rounds.",
    ),
)


def figures_of(data: ReportData) -> list[FigureKind]:
    """Return the figures that have something to show; a head in closed form has neither rounds nor noise."""
    left_out = {"history", "psi", "accuracy"} if data.status.closed_form else set[str]()
    if data.regression or data.trace.x.size == 0:
        left_out.add("accuracy")
    if not data.psi_panels:
        left_out.add("psi")
    return [kind for kind in FIGURES if kind.name not in left_out]
