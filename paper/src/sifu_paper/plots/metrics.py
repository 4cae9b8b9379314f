"""Figure of the published metrics: the distance of each method's models from Scratch's."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sifu.plots.style import GREY, INK, only_ticks, styled
from sifu_paper.plots.courses import Line, Results, Row
from sifu_paper.plots.panels import colour_of, figure_title, footnote, marker_of, nothing_yet, reference

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEASURES = {
    "klom_forgotten": ("KLoM, forgotten", "0 is best"),
    "epsilon_median": ("epsilon of the\nNeurIPS challenge", "0 is best"),
    "forgetting_quality": ("forgetting quality", "1 is best"),
    "tpr_at_1": ("TPR at 1 % FPR", "0.01 is chance"),
}


@styled
def draw_metrics(results: Results) -> Figure:
    """Draw a panel for each metric, a line for each method; dashed: Scratch against other runs of Scratch."""
    from matplotlib.figure import Figure

    most: dict[str, Row] = {}
    for row in results.rows:
        if not row["request"] and (row["method"] not in most or row["models"] > most[row["method"]]["models"]):
            most[row["method"]] = row
    if not most:
        return nothing_yet("not all runs are there yet")
    rows = sorted(most.values(), key=lambda row: row["klom_forgotten"])
    figure = Figure(figsize=(9.6, 1.9 + 0.34 * len(rows)), layout="constrained")
    panels = figure.subplots(1, len(MEASURES), sharey=True)
    for axes, (name, (title, words)) in zip(panels, MEASURES.items(), strict=True):
        only_ticks(axes, grid="x")
        axes.spines["left"].set_visible(False)
        axes.tick_params(labelsize=9.5)
        axes.set_title(title, fontweight="bold", loc="left", fontsize=10)
        axes.set_xlabel(words, fontsize=9)
        _dots(axes, rows, name)
    panels[0].set_yticks(range(len(rows)), [Line(row["method"], "").label for row in rows], fontsize=10)
    panels[0].set_ylim(len(rows) - 0.5, -0.5)
    figure_title(figure, metrics_message(rows))
    footnote(
        figure,
        [
            f"{rows[0]['models']} models of each method against as many of Scratch with other seeds; medians over the "
            "forgotten's samples. Dashed: Scratch against other runs of Scratch, the floor. inf: most samples tell the "
            "models apart without an error. A head in closed form is held against the head of those who stay.",
        ],
    )
    return figure


def _dots(axes: Axes, rows: list[Row], name: str) -> None:
    finite = [row[name] for row in rows if row[name] is not None and math.isfinite(row[name])]
    high = max([*finite, 1e-3])
    for place, row in enumerate(rows):
        line, value = Line(row["method"], ""), row[name]
        if value is None:
            continue
        if line.method == "scratch":
            reference(axes, value)
        if math.isfinite(value):
            axes.plot(value, place, marker_of(line), color=colour_of(line), markersize=7, zorder=5)
            axes.annotate(f"{value:.2f}", (value, place), xytext=(7, 0), textcoords="offset points", va="center",
                          fontsize=9, color=INK, zorder=4,
                          bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # fmt: skip
        else:
            axes.annotate("inf", (high, place), va="center", fontsize=9, color=GREY, fontweight="bold")
    axes.set_xlim(-0.06 * high, 1.45 * high)


def metrics_message(rows: list[Row]) -> str:
    """Name the methods that are as close to Scratch as Scratch itself."""
    scratch = next((row for row in rows if row["method"] == "scratch"), None)
    if scratch is None:
        return "Distance to Scratch"
    near = [
        Line(row["method"], "").label
        for row in rows
        if row is not scratch and row["klom_forgotten"] <= 1.5 * scratch["klom_forgotten"] + 0.05
    ]
    others = [
        Line(row["method"], "").label
        for row in rows
        if row is not scratch and Line(row["method"], "").label not in near
    ]
    text = f"As near to Scratch as Scratch is to itself: {', '.join(near) or 'none'}"
    return text + (f"; further: {', '.join(others)}" if others else "")
