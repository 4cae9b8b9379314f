"""The history as in figure 2 of the paper: a lane for the training and one for each request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sifu.plots.run_data import Branch, ReportData
from sifu.plots.style import (
    GREY,
    INK,
    branch_colour,
    counted,
    headline,
    new_figure,
    note,
    only_ticks,
    plain,
    styled,
    whole_numbers,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LANES = 40
MOST_MARKS = 110
CUT = (0, (2.5, 2.0))


@styled
def draw_history(data: ReportData) -> Figure:
    """Rounds along x; noise takes a branch up to the next lane; what was cut off is dashed."""
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
    axes.set_xlim(-0.06 * max(longest, 1), longest + 0.17 * max(longest, 1))
    axes.set_xlabel("Rounds along the path")
    only_ticks(axes, grid="x")
    axes.spines["left"].set_visible(False)
    whole_numbers(axes)
    _legend(figure, step, requests=len(data.branches) > 1)
    headline(figure, history_message(data))
    return figure


def history_message(data: ReportData) -> str:
    """What the history shows, in one sentence."""
    active = sum(max(0, branch.active_until) for branch in data.branches)
    cut = data.rounds_in_all - active
    carried_out = len(data.branches) - 1
    rounds = f"{counted(active, 'round')} {'leads' if active == 1 else 'lead'}"
    if carried_out == 0:
        return f"{rounds} to the current model; no client has been forgotten"
    gone = "none was cut off" if cut == 0 else f"{cut:,} {'was' if cut == 1 else 'were'} cut off"
    return f"After {counted(carried_out, 'request')}, {rounds} to the current model; {gone}"


def mark_step(rounds: int) -> int:
    """A round number of rounds from one mark to the next, so that there are not too many marks.

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
        axes.annotate(
            rf"$\theta_{{{branch.branch}}}^{{0}}$",
            (branch.start, lane),
            xytext=(-5, 0 if fresh else 4),
            textcoords="offset points",
            ha="right",
            va="center" if fresh else "bottom",
            fontsize=9.5,
            color=colour,
        )
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
    """The models that requests went back to, once each."""
    starts = {branch.branch: branch.start for branch in shown}
    for branch, position in sorted({branch.source for branch in shown if branch.source is not None}):
        if branch in lane_of and position > 0:
            axes.annotate(
                rf"$\theta_{{{branch}}}^{{{position}}}$",
                (starts[branch] + position, lane_of[branch]),
                xytext=(0, -5),
                textcoords="offset points",
                ha="center",
                va="top",
                fontsize=9.5,
                color=branch_colour(branch),
            )


def _draw_current(axes: Axes, shown: tuple[Branch, ...], lane_of: dict[int, int]) -> None:
    last = shown[-1]
    x, lane = last.start + last.rounds, lane_of[last.branch]
    axes.plot([x], [lane], "o", markersize=10, markerfacecolor="white", markeredgecolor=INK, mew=1.6, zorder=6)
    axes.plot([x], [lane], "o", markersize=5, color=branch_colour(last.branch), mew=0, zorder=7)
    axes.annotate(
        rf"$\mathbf{{now}}\ \ \theta_{{{last.branch}}}^{{{last.rounds}}}$",
        (x, lane),
        xytext=(9, 0),
        textcoords="offset points",
        ha="left",
        va="center",
        fontsize=9.5,
        color=INK,
    )


def _legend(figure: Figure, step: int, *, requests: bool) -> None:
    from matplotlib.lines import Line2D

    mark = "a mark is a round" if step == 1 else f"a mark every {step:,} rounds"
    handles = [Line2D([], [], color=INK, linewidth=2.2, marker="s", markersize=3, label=f"history in use ({mark})")]
    if requests:
        handles += [
            Line2D([], [], color=GREY, linewidth=1.1, linestyle=CUT, label="cut off"),
            Line2D([], [], color=GREY, linewidth=1.3, linestyle=(0, (1.2, 1.2)), marker="^", ms=5, label="noise added"),
        ]
    handles.append(Line2D([], [], linestyle="", marker="o", mfc="white", mec=INK, mew=1.6, ms=8, label="current model"))
    figure.legend(handles=handles, loc="outside lower left", ncols=4, handlelength=2.4, columnspacing=1.8)
