"""Groups that merge against Scratch: a line for each task and each way to group, dots for seeds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sifu.plots.courses import Results
from sifu.plots.group_cases import Case, Task, cases_of
from sifu.plots.panels import figure_title, footnote, nothing_yet
from sifu.plots.style import BLUE, GREY, INK, VERMILLION, only_ticks, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEAVERS = {1: ("one leaver", BLUE, -0.17), 5: ("five leavers", VERMILLION, 0.17)}
"""How requests of so many clients are shown; others are in the table."""
MOST = 1.6
"""Where the axis ends, in shares of Scratch's rounds."""


@styled
def draw_groups(results: Results) -> Figure:
    """Rounds to Scratch's accuracy as a share of Scratch's rounds."""
    from matplotlib.figure import Figure

    cases = [case for case in cases_of(results.rows) if case.leavers in LEAVERS]
    if not cases:
        return nothing_yet("no request with groups has been measured yet")
    order = list(results.titles)
    tasks = sorted({case.task: None for case in cases}, key=lambda task: order.index(task.dataset))
    lines = [(task, way) for task in tasks for way in _ways(cases, task)]
    titles = dict(results.titles)
    figure = Figure(figsize=(8.6, 1.6 + 0.21 * (len(lines) + len(tasks))), layout="constrained")
    axes = figure.subplots()
    only_ticks(axes, grid="x")
    axes.spines["left"].set_visible(False)
    axes.axvline(1.0, color=INK, linewidth=1.0)
    at, ticks, labels = 0.0, [], []
    for task in tasks:
        axes.text(-0.01, at, task.label(titles), transform=axes.get_yaxis_transform(), ha="right", va="center",
                  fontweight="bold", fontsize=8)  # fmt: skip
        at += 1.0
        for way in _ways(cases, task):
            ticks.append(at)
            labels.append("S = {}, R = {}, x {:g}".format(*way))
            for case in cases:
                if case.task == task and (case.groups, case.apart, case.stretch) == way:
                    _dots(axes, case, at)
            at += 1.0
    axes.set_yticks(ticks, labels, fontsize=7.5)
    axes.set_ylim(at - 0.4, -0.6)
    axes.set_xlim(0.0, MOST)
    axes.set_xlabel("rounds to within one point of Scratch's test accuracy, as a share of Scratch's rounds")
    for words, colour, _ in LEAVERS.values():
        axes.plot([], [], "o", color=colour, markersize=5, label=words)
    axes.legend(loc="lower right", handletextpad=0.2)
    figure_title(figure, _message(cases))
    footnote(
        figure,
        [
            "Large dots: medians over seeds; small dots: single seeds; hollow: never got there within the rounds that "
            "Scratch was given. Left of the line groups take fewer rounds. S groups, R rounds apart, the merge moved "
            "on by x.",
        ],
    )
    return figure


def _ways(cases: list[Case], task: Task) -> list[tuple[int, int, float]]:
    """The numbers of groups, rounds apart and stretches that were tried on a task."""
    return sorted({(case.groups, case.apart, case.stretch) for case in cases if case.task == task})


def _dots(axes: Axes, case: Case, at: float) -> None:
    _, colour, offset = LEAVERS[case.leavers]
    for request in case.requests:
        face = colour if request.reached else "none"
        axes.plot(min(request.share, MOST), at + offset, "o", color=colour, markerfacecolor=face, markersize=2.6,
                  alpha=0.55, clip_on=False)  # fmt: skip
    whole = case.reached * 2 > len(case.requests)
    axes.plot(min(case.share, MOST), at + offset, "o", color=colour, markerfacecolor=colour if whole else "white",
              markersize=5.5, clip_on=False)  # fmt: skip
    if not whole:
        axes.annotate("not reached", (min(case.share, MOST), at + offset), xytext=(5, -2.5),
                      textcoords="offset points", fontsize=6, color=GREY, annotation_clip=False)  # fmt: skip


def _message(cases: list[Case]) -> str:
    alone = [case for case in cases if case.leavers == 1]
    if not alone:
        return "Groups that merge against Scratch"
    quarter = sum(case.share <= 0.25 for case in alone)
    return (
        f"One leaver costs at most a quarter of Scratch's rounds in {quarter} of {len(alone)} settings "
        f"({min(case.share for case in alone):.2f} to {max(case.share for case in alone):.2f} of them)"
    )
