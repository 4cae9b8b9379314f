"""Figures of rollbacks: the history as in figure 2 of the paper, and Psi against Psi*, for requests and plans."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np

from sifu.plots.style import (
    BLUE,
    FAINT,
    GREY,
    INK,
    VERMILLION,
    branch_colour,
    counted,
    headline,
    is_narrow,
    legend_below,
    new_figure,
    note,
    only_ticks,
    plain,
    styled,
    whole_numbers,
)
from sifu.report.run_data import Branch, PsiPanel, ReportData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LANES = 40
MOST_MARKS = 110
CUT = (0, (2.5, 2.0))
_FORMULA: dict[str, Any] = {"fontsize": 9.5, "parse_math": True}


@styled
def draw_history(data: ReportData) -> Figure:
    """Draw the history: rounds along x, a new lane for each request, and rounds that were rolled back dashed."""
    hidden = max(0, len(data.branches) - MOST_LANES)
    shown = data.branches[:1] + data.branches[1 + hidden :]
    lane_of = {branch.branch: lane + (1 if hidden and lane else 0) for lane, branch in enumerate(shown)}
    lanes = 1 + max(lane_of.values())
    figure = new_figure(max(2.3, 1.5 + lanes * (0.5 if lanes <= 12 else 0.3)))
    axes = figure.add_subplot()
    longest = max(branch.start + branch.rounds for branch in data.branches)
    step = mark_step(longest)
    for branch in shown:
        _draw_branch(axes, branch, lane_of[branch.branch], step)
    crowded = lanes > 14
    for branch in shown:
        _draw_start(axes, branch, lane_of, crowded=crowded)
    if not crowded:
        _label_sources(axes, shown, lane_of)
    _draw_current(axes, shown, lane_of)
    labels = {lane_of[branch.branch]: plain(branch.label) for branch in shown}
    if hidden:
        labels[1] = f"… {hidden:,} more"
    axes.set_yticks(sorted(labels), labels=[labels[lane] for lane in sorted(labels)])
    for text, lane in zip(axes.get_yticklabels(), sorted(labels), strict=True):
        text.set_parse_math(False)
        text.set_color(INK if not hidden or lane != 1 else GREY)
    axes.set_ylim(-0.75, lanes - 0.35)
    before, after = (0.18, 0.55) if is_narrow() else (0.06, 0.17)  # leave room for labels on both sides
    axes.set_xlim(-before * max(longest, 1), longest + after * max(longest, 1))
    axes.set_xlabel("Rounds along the path")
    only_ticks(axes, grid="x")
    axes.spines["left"].set_visible(False)
    whole_numbers(axes)
    _history_legend(figure, step, requests=len(data.branches) > 1)
    headline(figure, history_message(data))
    return figure


def history_message(data: ReportData) -> str:
    """Return the figure's message on the history."""
    rounds, executed = data.status.rounds, len(data.branches) - 1
    of_all = f"{rounds:,} of {counted(data.rounds_in_all, 'round')} {'leads' if rounds == 1 else 'lead'}"
    if executed == 0:
        return f"{of_all} to the current model; no client has been forgotten"
    return f"After {counted(executed, 'request')}, {of_all} to the current model"


def mark_step(rounds: int) -> int:
    """Return the number of rounds between two marks, so that there are at most `MOST_MARKS` of them.

    >>> mark_step(75), mark_step(160), mark_step(5000)
    (1, 2, 50)
    """
    step = 1
    while rounds / step > MOST_MARKS:
        step = step * 5 // 2 if str(step)[0] == "2" else step * 2
    return step


def _draw_branch(axes: Axes, branch: Branch, lane: int, step: int) -> None:
    colour = branch_colour(branch.branch)
    kept, end = branch.start + max(0, branch.active_until), branch.start + branch.rounds
    if branch.active_until >= 0:
        axes.plot([branch.start, kept], [lane, lane], color=colour, linewidth=2.2, solid_capstyle="round", zorder=3)
    if end > kept or branch.active_until < 0:
        axes.plot([kept, end], [lane, lane], color=colour, linewidth=1.1, linestyle=CUT, alpha=0.55, zorder=2)
    for first, last, alpha in ((branch.start, kept, 1.0), (kept, end, 0.4)):
        if branch.active_until < 0 and first == branch.start and last == kept:
            continue
        marks = [x for x in range(first, last + 1) if (x - branch.start) % step == 0]
        axes.plot(marks, [lane] * len(marks), "s", color=colour, markersize=2.6, alpha=alpha, mew=0, zorder=3)


def _draw_start(axes: Axes, branch: Branch, lane_of: dict[int, int], *, crowded: bool) -> None:
    lane, colour = lane_of[branch.branch], branch_colour(branch.branch)
    faded = branch.active_until < 0
    axes.plot([branch.start], [lane], "s", color=colour, markersize=5.5, alpha=0.5 if faded else 1.0, mew=0, zorder=4)
    fresh = branch.source is None
    if not crowded or branch.branch == 0:
        formula, below = rf"$\theta_{{{branch.branch}}}^{{0}}$", 0 if fresh else 4
        over = "center" if fresh else "bottom"
        note(axes, formula, (branch.start, lane), (-5, below), ha="right", va=over, **_FORMULA, color=colour)
    if branch.branch > 0 and not crowded:
        noise = f"noise σ = {branch.noise_std:.3g}" if branch.noise_std else "no noise"
        words = f"fresh start, {noise}" if fresh else noise
        note(axes, words, (branch.start, lane - (0.28 if fresh else 0.66)), (5, 0), fontsize=7.5, va="center")
    if branch.source is None:
        return
    axes.annotate(
        "",
        (branch.start, lane),
        xytext=(branch.start, lane_of.get(branch.source[0], 1)),
        arrowprops={
            "arrowstyle": "-|>",
            "color": colour,
            "linewidth": 1.3,
            "linestyle": (0, (1.2, 1.2)),
            "shrinkA": 3,
            "shrinkB": 4,
            "mutation_scale": 11,
            "alpha": 0.55 if faded else 1.0,
        },
        zorder=5,
    )


def _label_sources(axes: Axes, shown: tuple[Branch, ...], lane_of: dict[int, int]) -> None:
    """Label each model that a request rolled back to, once."""
    starts = {branch.branch: branch.start for branch in shown}
    for branch, position in sorted({branch.source for branch in shown if branch.source is not None}):
        if branch in lane_of and position > 0:
            formula, place = rf"$\theta_{{{branch}}}^{{{position}}}$", (starts[branch] + position, lane_of[branch])
            note(axes, formula, place, (0, -5), ha="center", va="top", **_FORMULA, color=branch_colour(branch))


def _draw_current(axes: Axes, shown: tuple[Branch, ...], lane_of: dict[int, int]) -> None:
    last = shown[-1]
    x, lane = last.start + last.rounds, lane_of[last.branch]
    axes.plot([x], [lane], "o", markersize=10, markerfacecolor="white", markeredgecolor=INK, mew=1.6, zorder=6)
    axes.plot([x], [lane], "o", markersize=5, color=branch_colour(last.branch), mew=0, zorder=7)
    formula = rf"$\mathbf{{now}}\ \ \theta_{{{last.branch}}}^{{{last.rounds}}}$"
    note(axes, formula, (x, lane), (9, 0), ha="left", va="center", **_FORMULA, color=INK)


def _history_legend(figure: Figure, step: int, *, requests: bool) -> None:
    from matplotlib.lines import Line2D

    mark = "a mark is a round" if step == 1 else f"a mark every {step:,} rounds"
    handles = [Line2D([], [], color=INK, linewidth=2.2, marker="s", markersize=3, label=f"history in use ({mark})")]
    if requests:
        handles += [
            Line2D([], [], color=GREY, linewidth=1.1, linestyle=CUT, label="cut off"),
            Line2D([], [], color=GREY, linewidth=1.3, linestyle=(0, (1.2, 1.2)), marker="^", ms=5, label="noise added"),
        ]
    handles.append(Line2D([], [], linestyle="", marker="o", mfc="white", mec=INK, mew=1.6, ms=8, label="current model"))
    legend_below(figure, handles, handlelength=2.4, columnspacing=1.8)


LINEAR_UP_TO = 8.0  # Psi beyond this many Psi* is drawn on a logarithmic axis


@styled
def draw_psi(data: ReportData) -> Figure:
    """Draw Psi and Psi* in a small panel for each of the latest requests."""
    panels = data.psi_panels
    columns = 1 if len(panels) == 1 or is_narrow() else 2
    rows = -(-len(panels) // columns)
    figure = new_figure(0.9 + 2.25 * rows)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        _draw_panel(axes, panel)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_axis_off()
    for axes in grid[:, 0]:
        axes.set_ylabel("Sensitivity Ψ")
    for column in range(columns):
        lowest = max(index for index in range(len(panels)) if index % columns == column)
        grid.flat[lowest].set_xlabel("Rounds along the path before the request")
    _legend(figure, panels, empty=grid.flat[-1] if len(panels) < rows * columns else None)
    headline(figure, psi_message(data))
    return figure


def psi_message(data: ReportData) -> str:
    """Return the figure's message on the panels."""
    panels = data.psi_panels
    stayed = sum(1 for panel in panels if panel.source_x == panel.tip_x)
    if stayed == len(panels) and any(panel.noise_std for panel in panels):
        return "Noise hides the forgotten clients at the current model: nothing had to be undone"
    if stayed == len(panels):
        return "The forgotten clients never touched the current model: nothing had to be undone"
    return "Training went back to where the noise hides what each client had left in the model"


def _draw_panel(axes: Axes, panel: PsiPanel) -> None:
    curves = np.where(np.isfinite(panel.curves), panel.curves, np.nan)
    top = float(np.nanmax(curves, initial=0.0))
    logarithmic = panel.psi_star > 0.0 and top > LINEAR_UP_TO * panel.psi_star
    if logarithmic:
        curves = np.where(curves > 0.0, curves, np.nan)
        axes.set_yscale("log")
    before = panel.x <= panel.source_x
    for index in reversed(range(len(curves))):
        strong = index == 0
        style: dict[str, Any] = {"color": BLUE, "linewidth": 2.0 if strong else 0.8, "zorder": 4 if strong else 3}
        # The last model before the cut belongs to both parts, so that the line has no gap.
        after = panel.x >= panel.source_x
        axes.plot(panel.x[before], curves[index][before], alpha=1.0 if strong else 0.45, **style)
        axes.plot(
            panel.x[after], curves[index][after], alpha=0.55 if strong else 0.25, linestyle=(0, (2.5, 2.0)), **style
        )
    if panel.tip_x > panel.source_x:
        axes.axvspan(panel.source_x, panel.tip_x, color=FAINT, alpha=0.45, linewidth=0, zorder=0)
        if panel.tip_x - panel.source_x > 0.2 * panel.tip_x:
            middle = (panel.source_x + panel.tip_x) / 2
            note(axes, "cut off", (middle, 0.02), (0, 0), xycoords=("data", "axes fraction"), ha="center", va="bottom")
    for x in panel.noise_edges:
        axes.axvline(x, color=GREY, linewidth=0.8, linestyle=(0, (1.2, 1.2)), zorder=1)
    if panel.psi_star > 0.0:
        axes.axhline(panel.psi_star, color=VERMILLION, linewidth=1.6, zorder=2)
    chosen = panel.source_psi if panel.source_psi > 0.0 or not logarithmic else np.nan
    axes.plot([panel.source_x], [chosen], "o", markersize=8, mfc="white", mec=INK, mew=1.8, zorder=6, clip_on=False)
    axes.plot([panel.source_x], [chosen], "o", markersize=3.2, color=INK, mew=0, zorder=7, clip_on=False)
    if not logarithmic:
        axes.set_ylim(0.0, max(top, panel.psi_star, 1e-300) * 1.12)
    axes.set_xlim(0, max(panel.tip_x, 1) * 1.02)
    whole_numbers(axes, most=6)
    only_ticks(axes, grid="y")
    words = textwrap.wrap(_subtitle(panel), 46 if is_narrow() else 200)
    axes.set_title(plain(panel.request, 30), loc="left", fontweight="bold", parse_math=False, pad=8 + 11 * len(words))
    axes.text(
        0.0, 1.035, "\n".join(words), transform=axes.transAxes, fontsize=8, color=GREY, va="bottom", parse_math=False
    )


def _subtitle(panel: PsiPanel) -> str:
    if panel.source_x == panel.tip_x:
        where = f"stays at round {panel.tip_x:,}"
    else:
        where = f"back to round {panel.source_x:,} of {panel.tip_x:,}"
    if panel.noise_std == 0.0:
        return f"{where}: never touched, no noise needed"
    return f"{where}, largest Ψ: {plain(panel.largest)}"


def _legend(figure: Figure, panels: tuple[PsiPanel, ...], empty: Axes | None) -> None:
    """Draw the legend in the empty cell of the grid, or below the grid if there is none."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=BLUE, linewidth=2.0, label="Ψ, largest and others"),
        Line2D([], [], color=VERMILLION, linewidth=1.6, label="Ψ* = σ/s: what the noise hides"),
        Line2D([], [], linestyle="", marker="o", mfc="white", mec=INK, mew=1.8, ms=8, label="rollback target"),
    ]
    if any(panel.noise_edges for panel in panels):
        handles.append(Line2D([], [], color=GREY, lw=0.8, linestyle=(0, (1.2, 1.2)), label="earlier noise"))
    if empty is not None:
        empty.legend(handles=handles, loc="center left", handlelength=1.8, labelspacing=0.9)
    else:
        legend_below(figure, handles, handlelength=1.8, columnspacing=1.5)
