"""Figures of accuracy before and after requests and over all rounds, and of rounds compared with Scratch."""

from __future__ import annotations

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
    empty_figure,
    headline,
    is_narrow,
    legend_below,
    new_figure,
    note,
    only_ticks,
    plain,
    say_instead,
    styled,
    whole_numbers,
)
from sifu.report.run_data import ReportData, ReportedRequest
from sifu.requests.outcome import Measured, accuracy_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Values = tuple[tuple[float | None, float | None], tuple[float | None, float | None], float | None]
MOST_ROWS = 30
MOST_POINTS = 1500
MOST_LINES = 40


@styled
def draw_before_after(data: ReportData) -> Figure:
    """Draw the accuracy before and after each request as dumbbells: forgotten clients left, remaining clients right."""
    done = [request for request in data.done if request.measured.has_accuracy]
    if not done:
        return empty_figure(before_after_message(data), "no request has been executed yet")
    shown = done[-MOST_ROWS:]
    grid = (2, 1) if is_narrow() else (1, 2)
    figure = new_figure(0.75 + grid[0] * (0.8 + len(shown) * (0.42 if len(shown) <= 12 else 0.27)))
    left, right = figure.subplots(*grid, sharey=True, sharex=True)
    values = [_accuracies(request.measured) for request in shown]
    for line, (forgotten, remaining, scratch) in enumerate(values):
        if scratch is not None:
            left.plot([100 * scratch], [-line], "D", ms=11, mfc="none", mec=GREY, mew=1.2, zorder=4)
        _dumbbell(left, -line, *forgotten, VERMILLION)
        _dumbbell(right, -line, *remaining, BLUE)
    concerned = "Clients concerned" if any(request.records for request in shown) else "Clients that were forgotten"
    for axes, title in ((left, concerned), (right, "Clients that remain")):
        axes.set_title(title, loc="left", fontweight="bold")
        axes.set_xlabel("Accuracy in %")
        only_ticks(axes, grid="x")
        axes.grid(True, axis="y", color=FAINT, linewidth=0.6)
        axes.spines["left"].set_visible(False)
    if data.status.target > 0:
        right.axvline(100 * data.status.target, color=GREY, linewidth=1.0, linestyle=(0, (4, 2)), zorder=1)
    left.set_yticks([-line for line in range(len(shown))], labels=[plain(request.request) for request in shown])
    for text in left.get_yticklabels():
        text.set(parse_math=False, color=INK)
    left.set_ylim(-len(shown) + 0.4, 0.6)
    left.set_xlim(*_range_of(values, data.status.target))
    _legend(figure, scratch=any(scratch is not None for _, _, scratch in values), target=data.status.target)
    headline(figure, before_after_message(data))
    return figure


def before_after_message(data: ReportData) -> str:
    """Return the figure's message on the change of accuracy on the remaining clients."""
    changes = [
        after.accuracy - before.accuracy
        for request in data.done
        if (after := request.measured.remaining_after) and (before := request.measured.remaining_before)
    ]
    if not changes:
        return "Accuracy before and after each request"
    largest = 100 * max(abs(change) for change in changes)
    if largest < 1.0:
        return "The clients that remain keep their accuracy: it moved by less than 1 point"
    worst = 100 * min(changes)
    if worst > -1.0:
        return f"The clients that remain keep their accuracy: it rose by up to {100 * max(changes):.1f} points"
    return f"The clients that remain lost up to {-worst:.1f} points of accuracy"


def _accuracies(measured: Measured) -> Values:
    """Return the accuracies before and after on forgotten and remaining clients, and Scratch's on forgotten clients."""
    forgotten = accuracy_of(measured.forgotten_before), accuracy_of(measured.forgotten_after)
    remaining = accuracy_of(measured.remaining_before), accuracy_of(measured.remaining_after)
    return forgotten, remaining, measured.scratch.forgotten_accuracy if measured.scratch else None


def _range_of(values: list[Values], target: float) -> tuple[float, float]:
    shown = [value for forgotten, remaining, scratch in values for value in (*forgotten, *remaining, scratch)]
    percents = [100 * value for value in shown if value is not None] + ([100 * target] if target > 0 else [])
    middle, half = (min(percents) + max(percents)) / 2, max(5.0, 0.58 * (max(percents) - min(percents)))
    return max(-3.0, middle - half), min(103.0, middle + half)


def _dumbbell(axes: Axes, y: float, before: float | None, after: float | None, colour: str) -> None:
    if before is not None and after is not None:
        axes.plot([100 * before, 100 * after], [y, y], color=colour, linewidth=2.0, alpha=0.5, zorder=2)
    if before is not None:
        axes.plot([100 * before], [y], "o", ms=8.5, mfc="white", mec=colour, mew=1.4, zorder=5)
    if after is not None:
        axes.plot([100 * after], [y], "o", ms=5.0, color=colour, mew=0, zorder=6)


def _legend(figure: Figure, *, scratch: bool, target: float) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], linestyle="", marker="o", mfc="white", mec=GREY, mew=1.4, ms=8.5, label="before the request"),
        Line2D([], [], linestyle="", marker="o", color=GREY, mew=0, ms=5.0, label="after it"),
    ]
    if scratch:
        handles.append(
            Line2D(
                [], [], linestyle="", marker="D", mfc="none", mec=GREY, mew=1.2, ms=9, label="model that never saw them"
            )
        )
    if target > 0:
        handles.append(Line2D([], [], color=GREY, linewidth=1.0, linestyle=(0, (4, 2)), label="target"))
    legend_below(figure, handles, handlelength=1.8, columnspacing=1.5)


@styled
def draw_accuracy(data: ReportData) -> Figure:
    """Draw the accuracy on the active clients over all rounds, including rounds that were rolled back later."""
    trace = data.trace
    figure = new_figure(3.1)
    headline(figure, accuracy_message(data))
    if trace.x.size == 0:
        return say_instead(figure, "Nothing to show: no model has been evaluated yet.")
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
    axes.set_xlabel("Rounds run since the beginning")
    whole_numbers(axes)
    only_ticks(axes, grid="y")
    return figure


def accuracy_message(data: ReportData) -> str:
    """Return the figure's message on the accuracy curve."""
    if data.status.accuracy is None:
        return "Accuracy over the rounds"
    now = f"{100 * data.status.accuracy:.1f} %"
    if len(data.branches) > 1 and data.status.phase == "ready":
        if data.status.target <= 0 or not any(branch.noise_std for branch in data.branches):
            return f"After {counted(len(data.branches) - 1, 'request')} the model is at {now} accuracy"
        if data.status.accuracy < data.status.target:
            return f"Noise costs accuracy; training on has not won all of it back: {now} now"
        return f"Noise costs accuracy, training on wins it back: the model is at {now} now"
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
    names = {branch.branch: plain(branch.label, 14) for branch in data.branches}
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


TOTAL_BESIDE_UP_TO = 8  # number of requests above which the total has its own scale
SCRATCH_COLOUR = "#b4bac4"


def fewer(rounds: int, scratch_rounds: int, *, at_least: bool = False) -> str:
    """Return a phrase for the ratio of two numbers of rounds.

    Args:
        rounds: Rounds of the request.
        scratch_rounds: Rounds of Scratch.
        at_least: True if Scratch stopped at its limit, so that the ratio is a lower bound.

    >>> fewer(47, 213), fewer(20, 10), fewer(0, 9), fewer(5, 5)
    ('4.5x fewer', '2.0x more', 'no rounds needed', 'as many')
    """
    if rounds == scratch_rounds:
        return "as many"
    if rounds == 0:
        return "no rounds needed"
    if rounds > scratch_rounds:
        return f"{rounds / max(scratch_rounds, 1):.1f}x more"
    ratio = scratch_rounds / rounds
    digits = 2 if ratio < 1.05 else 1
    return ("at least " if at_least else "") + f"{ratio:.{digits}f}x fewer"


@styled
def draw_rounds(data: ReportData) -> Figure:
    """Draw a pair of bars for each request, and one pair for the total."""
    done = data.done
    if not done:
        return empty_figure(rounds_message(data), "no request has been executed yet")
    shown, hidden = done[-MOST_ROWS:], len(done) - len(done[-MOST_ROWS:])
    lines = len(shown) + (1 if len(done) > 1 else 0)
    figure = new_figure(1.25 + lines * (0.52 if lines <= 12 else 0.38))
    if len(done) == 1:
        axes = total = figure.add_subplot()
    elif len(shown) <= TOTAL_BESIDE_UP_TO:
        axes, total = figure.subplots(2, 1, sharex=True, height_ratios=[len(shown), 1.25])
    else:
        axes, total = figure.subplots(2, 1, height_ratios=[len(shown), 1.6])
    for line, request in enumerate(shown):
        more = not request.scratch_reached
        _draw_pair(axes, -line, request.rounds, request.scratch_rounds, comparison(request), more=more)
    longest = max(max(request.rounds, request.scratch_rounds or 0) for request in shown)
    _finish(axes, [plain(request.request) for request in shown], longest, bold=False)
    if len(done) > 1:
        compared = data.compared
        rounds, scratch, more = data.total_compared
        if compared:
            _draw_pair(total, 0, rounds, scratch, fewer(rounds, scratch, at_least=more), more=more, many=True)
        else:
            rounds = sum(request.rounds for request in done)
            _draw_pair(total, 0, rounds, None, "", more=False)
        words = "total" if len(compared) in (0, len(done)) else f"total of {len(compared):,}\ncompared"
        _finish(total, [words], max(longest if len(shown) <= TOTAL_BESIDE_UP_TO else 1, rounds, scratch), bold=True)
        axes.tick_params(labelbottom=not axes.get_shared_x_axes().joined(axes, total))
    note = f" (the latest {len(shown)} above, all in the total)" if hidden else ""
    total.set_xlabel(f"Rounds{note}")
    _rounds_legend(figure, done)
    headline(figure, rounds_message(data))
    return figure


def _finish(axes: Axes, labels: list[str], longest: int, *, bold: bool) -> None:
    axes.set_yticks([-line for line in range(len(labels))], labels=labels)
    for text in axes.get_yticklabels():
        text.set(parse_math=False, color=INK, fontweight="bold" if bold else "normal")
    axes.set_ylim(-len(labels) + 0.4, 0.6)
    axes.set_xlim(0, (1.9 if is_narrow() else 1.32) * max(longest, 1))
    whole_numbers(axes)
    only_ticks(axes, grid="x")
    axes.spines["left"].set_visible(False)


def rounds_message(data: ReportData) -> str:
    """Return the figure's message on the rounds of requests compared with Scratch."""
    if not data.done:
        return "Rounds spent on forgetting"
    if not data.compared:
        total = sum(request.rounds for request in data.done)
        if data.status.target <= 0:
            return f"Forgetting took {counted(total, 'round')}, a fixed number for each request: no target was set"
        return f"Forgetting took {counted(total, 'round')}; they are not compared with training from scratch"
    rounds, scratch, at_least = data.total_compared
    takes = f"at least {scratch:,}" if at_least else f"{scratch:,}"
    ratio = fewer(rounds, scratch, at_least=at_least)
    return f"Forgetting took {counted(rounds, 'round')}, from scratch it takes {takes}: {ratio}"


def comparison(request: ReportedRequest) -> str:
    """Return a phrase that compares a request's rounds with Scratch's, or an empty string if this is impossible."""
    if request.reached is False:
        return "target not reached"
    if not request.compared or request.scratch_rounds is None:
        return ""
    return fewer(request.rounds, request.scratch_rounds, at_least=not request.scratch_reached)


def _draw_pair(
    axes: Axes, place: float, rounds: int, scratch: int | None, words: str, *, more: bool, many: bool = False
) -> None:
    """Draw a pair of bars with `words` next to the upper one; `more` marks Scratch's rounds as a lower bound."""
    height = 0.36
    upper = place + height / 2 if scratch is not None else place
    axes.barh(upper, rounds, height=height, color=BLUE, linewidth=0)
    text = f"{rounds:,}   {words}".rstrip()
    if scratch is not None:
        axes.barh(place - height / 2, scratch, height=height, color=SCRATCH_COLOUR, linewidth=0)
        stopped = (" or more" if many else ", target not reached") if more else ""
        note(axes, f"{scratch:,}{stopped}", (scratch, place - height / 2), (4, 0), va="center", fontsize=8.5)
    note(axes, text, (rounds, upper), (4, 0), va="center", fontsize=8.5, color=INK, fontweight="bold")


def _rounds_legend(figure: Figure, done: tuple[ReportedRequest, ...]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=BLUE, label="as it was done")]
    if any(request.scratch_rounds is not None for request in done):
        handles.append(Patch(color=SCRATCH_COLOUR, label="training again from scratch"))
    legend_below(figure, handles, handlelength=1.2, columnspacing=1.8)
