"""The figures of a report with their captions, and the selection of figures that have something to show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sifu.report.accuracy_figure import (
    accuracy_message,
    before_after_message,
    draw_accuracy,
    draw_before_after,
    draw_rounds,
    rounds_message,
)
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
    caption_without_scratch: str = ""

    def explained(self, data: ReportData) -> str:
        """Return the caption that fits the recorded data."""
        scratch = any(request.measured.scratch is not None for request in data.done)
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
        "concerned is below that line, or to an earlier one.",
    ),
    FigureKind(
        "rounds",
        draw_rounds,
        rounds_message,
        "The sure way to forget a client is to train again from scratch without it. The bars show the rounds of each "
        "request next to those of training from scratch.",
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


def figures_of(data: ReportData) -> list[FigureKind]:
    """Return the figures that have something to show; a head in closed form has neither rounds nor noise.

    Requests of such a head measure no accuracy on training rows.
    """
    left_out = set[str]()
    if data.status.closed_form:
        left_out |= {"history", "psi", "rounds", "accuracy"}
    if data.regression:
        left_out |= {"before-after", "accuracy"}
    if data.requests and not data.psi_panels:
        left_out.add("psi")
    if (data.done or data.status.closed_form) and not any(request.measured.has_accuracy for request in data.done):
        left_out.add("before-after")
    return [kind for kind in FIGURES if kind.name not in left_out]
