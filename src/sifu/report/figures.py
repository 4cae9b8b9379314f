"""The figures of a report. Each function takes collected data and returns a matplotlib Figure:

from sifu.report import collect, figures

figures.draw_history(collect("my-run")).savefig("history.png", dpi=160)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sifu.plots.accuracy_figure import accuracy_message, before_after_message, draw_accuracy, draw_before_after
from sifu.plots.history_figure import draw_history, history_message
from sifu.plots.psi_figure import draw_psi, psi_message
from sifu.plots.rounds_figure import draw_rounds, rounds_message
from sifu.plots.run_data import ReportData

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
        "Each lane is one stretch of training, from left to right. To forget clients, the operator goes on from a "
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
        "How many rounds of training each request took. Training again from scratch was not tried beside them.",
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
