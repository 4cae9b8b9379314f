"""Methods side by side: rounds, accuracy on the forgotten, watermarks, limited time, different requests."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sifu.plots.courses import Course, Line, Results, fewer_than_scratch, lines_of, scratch_beside, spread
from sifu.plots.panels import (
    SHADES,
    by_line,
    colour_of,
    faint_zero,
    figure_title,
    footnote,
    mark_missed,
    method_grid,
    nothing_yet,
    percent_axis,
    reference,
    whisker,
)
from sifu.plots.style import INK, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ON_FORGOTTEN = "accuracy on the forgotten"
DIVERGED = "Runs that diverged have no accuracy: dots are of the others, no dot where all did."


@styled
def draw_rounds(results: Results) -> Figure:
    """Rounds of the requests, and what the final model still knows of the forgotten clients."""
    courses = results.courses
    if not courses:
        return nothing_yet()
    requests = len(courses[0].rows)
    measures = [f"rounds of {requests} requests" if requests > 1 else "rounds", ON_FORGOTTEN]
    figure, panels = method_grid(results.lines, results.titles, measures)
    for column, dataset in enumerate(results.titles):
        here = [course for course in courses if course.first["dataset"] == dataset]
        _rounds_panel(panels[0][column], here, results.lines)
        _accuracy_panel(panels[1][column], here, results.lines)
    figure_title(figure, rounds_message(results))
    footnote(
        figure,
        [
            "Bars: rounds of request 1, 2, 3 (dark to light), mean over seeds; whiskers: least and largest seed; "
            f"dashed: Scratch. Missed: the target accuracy was not reached. {DIVERGED}",
            "The paper: SIFU takes 52 % fewer rounds than Scratch on average, FedEraser 12 % more; only SIFU and "
            "FedEraser come near Scratch on the forgotten.",
            f"{measured_sentence(courses)} {seeds_sentence(courses)}".strip(),
        ],
    )
    return figure


@styled
def draw_watermark(results: Results) -> Figure:
    """As above, and how much of the accuracy is owed to a client's own mark, before and after its request."""
    courses = results.courses
    if not courses:
        return nothing_yet()
    lines, datasets = results.lines, results.datasets
    measures = [f"rounds of {len(courses[0].rows)} requests", ON_FORGOTTEN, "success of the mark"]
    figure, panels = method_grid(lines, results.titles, measures)
    for column, dataset in enumerate(datasets):
        here = [course for course in courses if course.first["dataset"] == dataset]
        _rounds_panel(panels[0][column], here, lines)
        _accuracy_panel(panels[1][column], here, lines)
        _mark_panel(panels[2][column], here, lines)
    figure_title(figure, rounds_message(results))
    footnote(
        figure,
        [
            "Success of a mark: accuracy on a client's images with its own mark, minus accuracy on the same images "
            "with a fresh mark. Hollow: before the request; filled: after it. Zero: the mark means nothing to the "
            f"model. {DIVERGED}",
            "The paper: on every data set with a CNN, SIFU outperforms every other method; FedEraser forgets but is "
            "even more costly than Scratch.",
            measured_sentence(courses),
        ],
    )
    return figure


@styled
def draw_time_limited(results: Results) -> Figure:
    """|accuracy - accuracy of a full Scratch| on forget and retain sets, for each time limit."""
    courses = results.courses
    limited = [course for course in courses if "limit" in course.variant]
    if not limited:
        return nothing_yet("no request with a time limit has been carried out yet")
    beside = scratch_beside(courses)
    lines, datasets = lines_of(limited), results.datasets
    limits = sorted({float(course.variant["limit"]) for course in limited})
    measures = {
        "forgotten: points from Scratch": "accuracy_forget_after",
        "remaining: points from Scratch": "accuracy_retain_after",
    }
    figure, panels = method_grid(lines, results.titles, list(measures))
    for row, column_name in enumerate(measures.values()):
        for column, dataset in enumerate(datasets):
            axes = panels[row][column]
            percent_axis(axes)
            faint_zero(axes)
            for place, line in enumerate(lines):
                matching = by_line([course for course in limited if course.first["dataset"] == dataset], line)
                _limit_dots(axes, place, line, matching, limits, beside, column_name)
            axes.set_xlim(left=-0.03, right=max(axes.get_xlim()[1], 0.1))
    figure_title(figure, time_limited_message(limited, beside))
    shown = ", ".join(f"{100 * limit:.0f} %" for limit in limits)
    footnote(
        figure,
        [
            f"Dots from small to large: {shown} of the rounds of training; mean over seeds, whiskers: least "
            "and largest seed at the longest. Compared with Scratch trained to its target without a limit. "
            f"{DIVERGED}",
            "The paper: SIFU is the only method with a good trade-off on every network; Fine-Tuning and FedAccum do "
            "not forget, FedEraser and Last lose accuracy on the rest.",
        ],
    )
    return figure


@styled
def draw_request_sets(results: Results) -> Figure:
    """Ten different first requests: rounds and accuracy on the forgotten, a dot for each."""
    courses = results.courses
    if not courses:
        return nothing_yet()
    lines, datasets = results.lines, results.datasets
    figure, panels = method_grid(lines, results.titles, ["rounds of one request", ON_FORGOTTEN])
    for column, dataset in enumerate(datasets):
        for place, line in enumerate(lines):
            matching = by_line([course for course in courses if course.first["dataset"] == dataset], line)
            for row, value in enumerate((_total, _forgotten)):
                _set_dots(panels[row][column], place, line, matching, value)
        panels[0][column].set_xlim(left=0)
        percent_axis(panels[1][column])
        panels[1][column].set_xlim(-0.03, 1.03)
    sets = len({course.variant.get("set", "0") for course in courses})
    figure_title(figure, "Whichever clients ask: " + rounds_message(results))
    footnote(
        figure,
        [
            f"A dot for each of {sets} requests (mean over seeds), a bar at their mean. {missed_sentence(courses)}",
            "The paper: SIFU is consistently faster than Scratch and near it on the forgotten, whichever clients "
            "ask. DP seems fast because its costly training is not shown.",
            measured_sentence(courses),
        ],
    )
    return figure


def _total(course: Course) -> float:
    return float(course.total)


def _forgotten(course: Course) -> float | None:
    return course.forgotten


def _rounds_panel(axes: Axes, here: Sequence[Course], lines: Sequence[Line]) -> None:
    longest = max((course.total for course in here), default=1)
    scratch = [course.total for course in here if course.first["method"] == "scratch"]
    # A method that runs to the largest number of rounds would squeeze the others into a corner: cut its bar.
    limit = 1.05 * (min(longest, 2.5 * statistics.fmean(scratch)) if scratch else longest)
    for place, line in enumerate(lines):
        matching = by_line(here, line)
        if not matching:
            continue
        start, colour = 0.0, colour_of(line)
        mean, low, high = spread([course.total for course in matching])
        for number in range(len(matching[0].rows)):
            part = statistics.fmean(course.rounds[number] for course in matching)
            shade = 1.0 if mean > limit else SHADES[min(number, len(SHADES) - 1)]
            axes.barh(place, part, left=start, height=0.66, color=colour, alpha=shade, zorder=2)
            start += part
        whisker(axes, place, low, high)
        missed = sum(not course.reached for course in matching)
        text = f"missed {missed}/{len(matching)}" if missed else ""
        if mean > limit:
            text = f"{text + ', ' if text else ''}{mean:,.0f} rounds"
        if text:
            mark_missed(axes, place, max(mean, high), text, limit)
        if line.method == "scratch":
            reference(axes, mean)
    axes.set_xlim(0, limit)
    axes.xaxis.set_major_formatter(_thousands())
    axes.locator_params(axis="x", nbins=4, integer=True)


def _thousands() -> Callable[[float, float], str]:
    return lambda value, _: f"{value / 1000:g}k" if value >= 10000 else f"{value:,.0f}"


def _accuracy_panel(axes: Axes, here: Sequence[Course], lines: Sequence[Line]) -> None:
    for place, line in enumerate(lines):
        matching = by_line(here, line)
        if not matching:
            continue
        accuracies = [value for course in matching if (value := course.forgotten) is not None]
        if not accuracies:
            continue
        mean, low, high = spread(accuracies)
        whisker(axes, place, low, high)
        axes.plot(mean, place, "o", color=colour_of(line), markersize=6, zorder=5)
        if line.method == "scratch":
            reference(axes, mean)
    axes.set_xlim(-0.04, 1.04)
    percent_axis(axes)
    axes.set_xticks([0, 0.5, 1.0])


def _mark_panel(axes: Axes, here: Sequence[Course], lines: Sequence[Line]) -> None:
    faint_zero(axes)
    for place, line in enumerate(lines):
        marks = [row for course in by_line(here, line) for row in course.rows if row["mark_after"] is not None]
        if not marks:
            continue
        before = statistics.fmean(row["mark_before"] for row in marks)
        after, low, high = spread([row["mark_after"] for row in marks])
        axes.plot([before, after], [place, place], color=colour_of(line), linewidth=1.2, alpha=0.6, zorder=2)
        axes.plot(before, place, "o", markersize=6, markerfacecolor="white", markeredgecolor=colour_of(line), zorder=5)
        whisker(axes, place, low, high)
        axes.plot(after, place, "o", color=colour_of(line), markersize=6, zorder=6)
    axes.margins(x=0.12)
    percent_axis(axes)
    axes.locator_params(axis="x", nbins=4)


def _limit_dots(
    axes: Axes,
    place: int,
    line: Line,
    courses: Sequence[Course],
    limits: Sequence[float],
    beside: Callable[[Course], Course | None],
    column: str,
) -> None:
    points = []
    for number, limit in enumerate(limits):
        gaps = []
        for course in courses:
            scratch = beside(course)
            if float(course.variant["limit"]) == limit and scratch is not None:
                values = course.rows[-1][column], scratch.rows[-1][column]
                if None not in values:
                    gaps.append(abs(values[0] - values[1]))
        if gaps:
            points.append((statistics.fmean(gaps), 3.5 + 2.2 * number, 0.45 + 0.55 * number / max(len(limits) - 1, 1)))
            if number == len(limits) - 1 and len(gaps) > 1:
                whisker(axes, place, min(gaps), max(gaps))
    if points:
        axes.plot(
            [point[0] for point in points], [place] * len(points), color=colour_of(line), linewidth=1.0, alpha=0.5
        )
    for value, size, shade in points:
        axes.plot(value, place, "o", color=colour_of(line), markersize=size, alpha=shade, zorder=5, markeredgewidth=0)


def _set_dots(
    axes: Axes, place: int, line: Line, courses: Sequence[Course], value: Callable[[Course], float | None]
) -> None:
    by_set: dict[str, list[float]] = {}
    for course in courses:
        measured = value(course)
        if measured is not None:
            by_set.setdefault(course.variant.get("set", "0"), []).append(measured)
    means = [statistics.fmean(values) for values in by_set.values()]
    if not means:
        return
    axes.plot(means, [place] * len(means), "o", color=colour_of(line), markersize=4.5, alpha=0.55, zorder=3, mew=0)
    mean = statistics.fmean(means)
    axes.plot([mean, mean], [place - 0.3, place + 0.3], color=INK, linewidth=1.6, zorder=5)
    if line.method == "scratch":
        reference(axes, mean)


def time_limited_message(limited: Sequence[Course], beside: Callable[[Course], Course | None]) -> str:
    """How far the least time leaves SIFU and Scratch from a full retraining on the remaining clients."""
    longest = max(float(course.variant["limit"]) for course in limited)
    at_longest = [
        course for course in limited if float(course.variant["limit"]) == longest and beside(course) is not None
    ]
    names = {
        Line("sifu", "paper"): "SIFU by the paper's rules",
        Line("sifu", "ours"): "by ours",
        Line("scratch", "paper"): "Scratch",
    }
    compared = [course for course in at_longest if course.line in names]
    # A run that diverged has no accuracy: its data set and seed is left out for all, or the lines would not compare.
    lost = {_world(course) for course in compared if course.first["accuracy_retain_after"] is None}
    parts = []
    for line, name in names.items():
        gaps = [
            abs(course.first["accuracy_retain_after"] - full.first["accuracy_retain_after"])
            for course in compared
            if course.line == line and _world(course) not in lost and (full := beside(course)) is not None
        ]
        if gaps:
            parts.append(f"{name} {100 * statistics.fmean(gaps):.0f}")
    if not parts:
        return "Limited time, against a full retraining"
    message = f"With {100 * longest:.0f} % of the time, points below a full retraining: {', '.join(parts)}"
    worlds = len({_world(course) for course in compared})
    return message + (f" (SIFU diverged in {len(lost)} of {worlds} runs, left out)" if lost else "")


def _world(course: Course) -> tuple[str, int]:
    """Data set and seed."""
    return course.first["dataset"], course.first["seed"]


def rounds_message(results: Results) -> str:
    """How SIFU does against Scratch, in a sentence."""
    parts = []
    for preset, words in (("paper", "by the paper's rules"), ("ours", "by ours")):
        ratios = fewer_than_scratch(results.courses, lambda course, preset=preset: course.line == Line("sifu", preset))  # type: ignore[misc]
        if ratios:
            mean = statistics.fmean(ratios.values())
            parts.append(f"{_saved(mean)} {words}")
    return f"SIFU against Scratch: {', '.join(parts)}" if parts else results.title


def _saved(ratio: float) -> str:
    """How many rounds fewer or more than Scratch.

    >>> _saved(0.48), _saved(1.12), _saved(1.0)
    ('52 % fewer rounds', '12 % more rounds', 'as many rounds')
    """
    percents = round(100 * (1.0 - ratio))
    return "as many rounds" if percents == 0 else f"{abs(percents)} % {'fewer' if percents > 0 else 'more'} rounds"


def measured_sentence(courses: Sequence[Course]) -> str:
    """What was measured here, in the paper's own measure."""
    parts = []
    for line in lines_of(courses):
        ratios = fewer_than_scratch(courses, lambda course, line=line: course.line == line)  # type: ignore[misc]
        if ratios and line.method in ("sifu", "noisy_scratch", "fed_eraser"):
            parts.append(f"{line.label} {_saved(statistics.fmean(ratios.values()))}")
    return f"Here, against Scratch: {'; '.join(parts)} (mean over data sets and seeds)." if parts else ""


def seeds_sentence(courses: Sequence[Course]) -> str:
    """Who was run with fewer seeds than others: their bars are means over other worlds than the dashed line."""
    counts = {line: len({course.first["seed"] for course in by_line(courses, line)}) for line in lines_of(courses)}
    most = max(counts.values())
    fewer = [f"{line.label} {count}" for line, count in counts.items() if count < most]
    if not fewer:
        return ""
    return f"Seeds: {most}, but {', '.join(fewer)}; each ratio compares equal seeds."


def missed_sentence(courses: Sequence[Course]) -> str:
    """Who missed the target, and how often."""
    parts = []
    for line in lines_of(courses):
        matching = by_line(courses, line)
        missed = sum(not course.reached for course in matching)
        if missed:
            parts.append(f"{line.label} {missed} of {len(matching)}")
    return f"The target was missed by {', '.join(parts)} runs." if parts else ""
