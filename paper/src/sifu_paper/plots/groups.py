"""Figure of groups against Scratch: a line for each task, dots for seeds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sifu.plots.style import BLUE, INK, VERMILLION, only_ticks, styled
from sifu_paper.plots.courses import Results
from sifu_paper.plots.group_cases import Case, cases_by_rule
from sifu_paper.plots.panels import figure_title, footnote, nothing_yet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEAVERS = {1: ("one leaver", BLUE, "o", -0.19), 5: ("five leavers", VERMILLION, "D", 0.19)}
"""Label, colour, marker and offset of requests by number of clients; other numbers are only in the table."""


@styled
def draw_groups(results: Results) -> Figure:
    """Draw the speed-up over Scratch on each task, with groups by the default rule."""
    from matplotlib.figure import Figure

    cases = [case for leavers in LEAVERS for case in cases_by_rule(results.rows, leavers)]
    if not cases:
        return nothing_yet("no request with groups has been measured yet")
    order, titles = list(results.titles), dict(results.titles)
    tasks = sorted({case.task: None for case in cases}, key=lambda task: order.index(task.dataset))
    figure = Figure(figsize=(9.4, 1.7 + 0.3 * len(tasks)), layout="constrained")
    axes = figure.subplots()
    only_ticks(axes, grid="x")
    axes.spines["left"].set_visible(False)
    axes.axvline(1.0, color=INK, linewidth=1.0)
    for case in cases:
        _dots(axes, case, tasks.index(case.task))
    axes.set_yticks(range(len(tasks)), [task.label(titles) for task in tasks], fontsize=9)
    axes.set_ylim(len(tasks) - 0.4, -0.6)
    axes.set_xscale("log")
    largest = max((ratio for case in cases for ratio in case.speed.ratios if math.isfinite(ratio)), default=2.0)
    steps = [step for step in (0.5, 1, 2, 3, 5, 10, 20, 50) if step <= 1.3 * largest]
    axes.set_xticks(steps, [f"{step:g}x" for step in steps], fontsize=9.5)
    axes.minorticks_off()
    axes.set_xlim(0.75, 2.2 * largest)
    axes.set_xlabel("speed-up over Scratch, to within one point of its test accuracy", fontsize=9.5)
    for words, colour, marker, _ in LEAVERS.values():
        axes.plot([], [], marker, color=colour, markersize=6, label=words)
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, handletextpad=0.2)
    figure_title(figure, _message([case for case in cases if case.leavers == 1]))
    footnote(
        figure,
        [
            "Large marks: medians over seeds; small ones: single seeds. ✗ 2/5: two of five never got there within the "
            "rounds that Scratch was given. Other numbers of groups and rounds apart are in the table.",
        ],
    )
    return figure


def _dots(axes: Axes, case: Case, at: float) -> None:
    _, colour, marker, offset = LEAVERS[case.leavers]
    speed = case.speed
    for ratio in speed.ratios:
        axes.plot(ratio, at + offset, marker, color=colour, markersize=2.6, alpha=0.55)
    if speed.median is not None:
        axes.plot(speed.median, at + offset, marker, color=colour, markersize=6)
    if speed.missed:
        axes.text(0.9 if offset < 0 else 0.99, at, f"✗ {speed.missed}/{speed.runs}", ha="right", va="center",
                  fontsize=9, transform=axes.get_yaxis_transform(), color=colour)  # fmt: skip


def _message(cases: list[Case]) -> str:
    if not cases:
        return "Groups that merge against Scratch"
    speeds = [case.speed for case in cases]
    fourfold, twofold = (
        sum(speed.complete and (speed.median or 0.0) >= least - 1e-9 for speed in speeds) for least in (4.0, 2.0)
    )
    return f"One leaver costs at most a quarter of Scratch on {fourfold} of {len(speeds)} tasks, half on {twofold}"
