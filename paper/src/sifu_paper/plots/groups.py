"""Groups that merge against Scratch: a line for each task and each way to group, dots for seeds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sifu.plots.style import BLUE, INK, VERMILLION, only_ticks, styled
from sifu_paper.plots.courses import Results
from sifu_paper.plots.group_cases import USUAL_STRETCH, Case, Task, case_by_rule, cases_of
from sifu_paper.plots.panels import figure_title, footnote, nothing_yet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEAVERS = {1: ("one leaver", BLUE, "o", -0.19), 5: ("five leavers", VERMILLION, "D", 0.19)}
"""How requests of so many clients are shown; others are in the table."""


@styled
def draw_groups(results: Results) -> Figure:
    """The speed-up over Scratch, for each setting that was tried."""
    from matplotlib.figure import Figure

    cases = _shown([case for case in cases_of(results.rows) if case.leavers in LEAVERS])
    if not cases:
        return nothing_yet("no request with groups has been measured yet")
    order = list(results.titles)
    tasks = sorted({case.task: None for case in cases}, key=lambda task: order.index(task.dataset))
    lines = [(task, way) for task in tasks for way in _ways(cases, task)]
    titles = dict(results.titles)
    figure = Figure(figsize=(8.6, 1.6 + 0.23 * (len(lines) + len(tasks))), layout="constrained")
    axes = figure.subplots()
    only_ticks(axes, grid="x")
    axes.spines["left"].set_visible(False)
    axes.axvline(1.0, color=INK, linewidth=1.0)
    at, ticks, labels = 0.0, [], []
    for task in tasks:
        axes.text(-0.01, at, task.label(titles), transform=axes.get_yaxis_transform(), ha="right", va="center",
                  fontweight="bold", fontsize=9)  # fmt: skip
        at += 1.0
        for way in _ways(cases, task):
            ticks.append(at)
            labels.append("S = {}, R = {}, x {:g}".format(*way))
            for case in cases:
                if case.task == task and (case.groups, case.apart, case.stretch) == way:
                    _dots(axes, case, at)
            at += 1.0
    axes.set_yticks(ticks, labels, fontsize=9)
    axes.set_ylim(at - 0.4, -0.6)
    axes.set_xscale("log")
    largest = max((ratio for case in cases for ratio in case.speed.ratios if math.isfinite(ratio)), default=2.0)
    steps = [step for step in (0.5, 1, 2, 3, 4, 5, 8, 10, 20, 50) if step <= 1.3 * largest]
    axes.set_xticks(steps, [f"{step:g}x" for step in steps], fontsize=9.5)
    axes.minorticks_off()
    axes.set_xlim(0.75, 1.35 * largest)
    axes.set_xlabel("speed-up over Scratch, to within one point of its test accuracy", fontsize=9.5)
    for words, colour, marker, _ in LEAVERS.values():
        axes.plot([], [], marker, color=colour, markersize=6, label=words)
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, handletextpad=0.2)
    figure_title(figure, _message(cases))
    footnote(
        figure,
        [
            "Large marks: medians over seeds; small ones: single seeds. ✗ 2/5: two of five never got there within the "
            "rounds that Scratch was given. S groups, R rounds apart, the merge moved on by x; the other settings that "
            "were tried are in the table.",
        ],
    )
    return figure


def _shown(cases: list[Case]) -> list[Case]:
    """Of each task the merges that are moved on as usual, and the plain means of a task that has no others."""
    moved = {case.task for case in cases if case.stretch == USUAL_STRETCH}
    return [case for case in cases if case.stretch == USUAL_STRETCH or case.task not in moved]


def _ways(cases: list[Case], task: Task) -> list[tuple[int, int, float]]:
    """The numbers of groups, rounds apart and stretches that were tried on a task."""
    return sorted({(case.groups, case.apart, case.stretch) for case in cases if case.task == task})


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
    tasks = {case.task: None for case in cases}
    by_rule = [case.speed for task in tasks if (case := case_by_rule(cases, task, 1))]
    if not by_rule:
        return "Groups that merge against Scratch"
    fourfold = sum(speed.complete and (speed.median or 0.0) >= 4.0 - 1e-9 for speed in by_rule)
    twofold = sum(speed.complete and (speed.median or 0.0) >= 2.0 - 1e-9 for speed in by_rule)
    return (
        f"By the rule for groups one leaver is at least 4 times cheaper than Scratch on {fourfold} of {len(by_rule)} "
        f"tasks, 2 times on {twofold}"
    )
