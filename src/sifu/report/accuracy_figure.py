"""Figure of the rounds and the accuracy of a run: one curve over all rounds, with a mark where each request begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sifu.plots.style import (
    GREY,
    branch_colour,
    counted,
    headline,
    is_narrow,
    new_figure,
    note,
    only_ticks,
    plain,
    styled,
    whole_numbers,
)
from sifu.report.run_data import ReportData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_POINTS = 1500
MOST_LINES = 40


@styled
def draw_accuracy(data: ReportData) -> Figure:
    """Draw the accuracy on the active clients over all rounds, including rounds that were rolled back later."""
    trace = data.trace
    figure = new_figure(3.1)
    headline(figure, accuracy_message(data))
    axes = figure.add_subplot()
    percent = 100 * trace.accuracy
    for branch in np.unique(trace.branch):
        chosen = np.flatnonzero(trace.branch == branch)
        chosen = chosen[np.unique(np.linspace(0, chosen.size - 1, min(chosen.size, MOST_POINTS)).round().astype(int))]
        few = trace.x.size <= 60
        axes.plot(
            trace.x[chosen],
            percent[chosen],
            color=branch_colour(int(branch)),
            linewidth=1.8,
            marker="o" if few or chosen.size == 1 else None,
            markersize=3,
            zorder=3,
        )
    low, top = _lower_end(data, percent), max(percent.max(), 100 * data.status.target)
    axes.set_ylim(low, min(101.0, top + 0.12 * (top - low) + 0.5))
    axes.set_xlim(0, max(int(trace.x[-1]), data.rounds_in_all, 1) * 1.02)
    _mark_requests(axes, data)
    if data.status.target > 0:
        axes.axhline(100 * data.status.target, color=GREY, linewidth=1.0, linestyle=(0, (4, 2)), zorder=1)
        target, place = f"target {100 * data.status.target:g} %", (1.0, 100 * data.status.target)
        note(axes, target, place, (0, 3), xycoords=("axes fraction", "data"), ha="right")
    if percent[0] < low:
        enters = trace.x[np.argmax(percent >= low)]
        note(axes, f"starts at {percent[0]:.0f} %", (float(enters), low), (9, 4), va="bottom")
    axes.set_ylabel("Training accuracy in %")
    axes.set_xlabel("Rounds run since the beginning" + (" (behind a request: its rounds)" if data.trace.starts else ""))
    whole_numbers(axes)
    only_ticks(axes, grid="y")
    return figure


def accuracy_message(data: ReportData) -> str:
    """Return the figure's message: the rounds spent on forgetting, and the accuracy now."""
    if data.status.accuracy is None:
        return "Accuracy over the rounds"
    now = f"{100 * data.status.accuracy:.1f} %"
    if data.done and data.status.phase == "ready":
        took = counted(sum(request.rounds for request in data.done), "round")
        short = data.status.accuracy < data.status.target
        return f"Forgetting took {took}; the model is at {now} now" + (", below its target" if short else "")
    if data.status.phase == "ready":
        return f"Training ended at {now} accuracy on its clients' data"
    return f"Not finished: the model is at {now} accuracy so far"


def _lower_end(data: ReportData, percent: np.ndarray) -> float:
    """Return the lower limit of the axis; only the accuracy of the first rounds may be below it."""
    later = percent[data.trace.x >= 0.06 * data.trace.x[-1]] if percent.size > 10 else percent
    after_noise = percent[data.trace.branch > 0]
    lowest = min(later.min(), after_noise.min(initial=100.0))
    highest = max(percent.max(), 100 * data.status.target)
    return float(max(0.0, lowest - max(1.0, 0.08 * (highest - lowest))))


def _mark_requests(axes: Axes, data: ReportData) -> None:
    names = {branch.branch: f"{plain(branch.label, 14)}: {branch.rounds:,}" for branch in data.branches}
    width = max(data.rounds_in_all, 1)
    taken_until = -np.inf
    for x, branch in data.trace.starts:
        if len(data.trace.starts) <= MOST_LINES:
            axes.axvline(x, color=branch_colour(branch), linewidth=0.9, linestyle=(0, (1.2, 1.2)), zorder=2)
        half = (0.0145 if is_narrow() else 0.0065) * (len(names[branch]) + 1) * width
        if x - half < taken_until:
            continue
        taken_until = x + half
        at_the_top: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "bottom"}
        note(axes, names[branch], (x, 1.0), (0, 2), color=branch_colour(branch), **at_the_top)
