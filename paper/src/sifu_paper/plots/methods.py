"""Figures that compare methods: rounds, accuracy on the forgotten, watermarks, limited time, different requests."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sifu.plots.style import GREY, INK, styled
from sifu_paper.plots.courses import (
    METHOD_NAMES,
    Course,
    Line,
    Results,
    labels_of,
    lines_of,
    matching_scratch,
    rules_or_presets,
    spread,
)
from sifu_paper.plots.panels import (
    SHADES,
    by_line,
    colour_of,
    faint_zero,
    figure_title,
    footnote,
    gutter,
    marker_of,
    method_grid,
    nothing_yet,
    percent_axis,
    reference,
    whisker,
)
from sifu_paper.plots.speed import fewer_words, same_seeds, speed_up

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ON_FORGOTTEN = "accuracy on the forgotten"
DIVERGED = "Runs that diverged have no accuracy: dots are of the others, no dot where all did."
MISSED = "✗\u00a03/10: three of ten runs did not reach the target, and are in no bar."


@styled
def draw_rounds(results: Results) -> Figure:
    """Draw the rounds of the requests, and the final accuracy on the forgotten clients."""
    return _method_figure(results, [])


@styled
def draw_watermark(results: Results) -> Figure:
    """Draw the same with the success of a client's watermark before and after its request."""
    return _method_figure(
        results,
        [
            "Success of a mark: accuracy on a client's images with its own mark, less accuracy on the same images with "
            "a fresh mark; zero: the mark means nothing to the model. Hollow: before the request; filled: after it.",
        ],
        marks=True,
    )


def _method_figure(results: Results, notes: Sequence[str], *, marks: bool = False) -> Figure:
    if not results.courses:
        return nothing_yet()
    courses = _on_same_seeds(results)
    lines = lines_of(courses)
    titles = {dataset: title for dataset, title in results.titles.items() if _of(courses, dataset)}
    requests = len(courses[0].rows)
    measures = [f"rounds of {requests} requests" if requests > 1 else "rounds", ON_FORGOTTEN]
    if marks:
        measures.append("success of the mark")
    names = labels_of(results.courses)
    figure, panels = method_grid([(line, names[line]) for line in lines], titles, measures)
    for column, dataset in enumerate(titles):
        here = _of(courses, dataset)
        _rounds_panel(panels[0][column], here, lines)
        _accuracy_panel(panels[1][column], here, lines)
        if marks:
            _mark_panel(panels[2][column], here, lines)
    figure_title(figure, rounds_message(results))
    shades = f" of requests 1 to {requests}, dark to light" if requests > 1 else ""
    footnote(
        figure,
        [
            f"Bars: median rounds{shades}, of the runs that reached the target; whiskers: least and largest; dashed: "
            f"Scratch. {MISSED} {DIVERGED}",
            *notes,
            "All lines of a data set are of the same seeds.",
        ],
    )
    return figure


def _of(courses: Sequence[Course], dataset: str) -> list[Course]:
    return [course for course in courses if course.first["dataset"] == dataset]


def _on_same_seeds(results: Results) -> list[Course]:
    """Return all courses of a data set on the seeds that every line has."""
    return [course for dataset in results.titles for course in same_seeds(_of(results.courses, dataset)).courses]


@styled
def draw_time_limited(results: Results) -> Figure:
    """Draw |accuracy - accuracy of a full Scratch| on forget and retain sets, for each time limit."""
    courses = results.courses
    limited = [course for course in courses if "limit" in course.variant]
    if not limited:
        return nothing_yet("no request with a time limit has been carried out yet")
    scratch_of = matching_scratch(courses)
    lines, datasets = lines_of(limited), results.datasets
    limits = sorted({float(course.variant["limit"]) for course in limited})
    measures = {
        "forgotten: points from full Scratch": "accuracy_forget_after",
        "remaining: points from full Scratch": "accuracy_retain_after",
    }
    names = labels_of(courses)
    figure, panels = method_grid([(line, names[line]) for line in lines], results.titles, list(measures))
    for row, column_name in enumerate(measures.values()):
        for column, dataset in enumerate(datasets):
            axes = panels[row][column]
            percent_axis(axes, symbol="")
            faint_zero(axes)
            for place, line in enumerate(lines):
                matching = by_line([course for course in limited if course.first["dataset"] == dataset], line)
                _limit_dots(axes, place, line, matching, limits, scratch_of, column_name)
            right = max(axes.get_xlim()[1], 0.1)
            axes.set_xlim(left=-0.03 * right / 0.4, right=right)
            axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= right])  # distances are never negative
    figure_title(figure, time_limited_message(limited, scratch_of))
    shown = ", ".join(f"{100 * limit:.0f} %" for limit in limits)
    footnote(
        figure,
        [
            f"Dots from small to large: {shown} of the rounds of training; median over seeds, whiskers: least "
            "and largest seed at the longest. Compared with Scratch trained to its target without a limit; the title "
            "has the remaining clients at the longest limit, without the runs that diverged. "
            f"{DIVERGED}",
            "The paper: SIFU is the only method with a good trade-off on every network; Fine-Tuning and FedAccum do "
            "not forget, FedEraser and Last lose accuracy on the rest.",
        ],
    )
    return figure


@styled
def draw_request_sets(results: Results) -> Figure:
    """Draw ten different first requests: rounds and accuracy on the forgotten, a dot for each."""
    courses = results.courses
    if not courses:
        return nothing_yet()
    lines, datasets = results.lines, results.datasets
    measures = ["rounds of one request", ON_FORGOTTEN]
    figure, panels = method_grid(list(labels_of(courses).items()), results.titles, measures)
    for column, dataset in enumerate(datasets):
        for place, line in enumerate(lines):
            matching = by_line([course for course in courses if course.first["dataset"] == dataset], line)
            for row, value in enumerate((_total, _forgotten)):
                _set_dots(panels[row][column], place, line, matching, value)
        panels[0][column].set_xlim(left=0)
        percent_axis(panels[1][column])
        panels[1][column].set_xlim(-0.03, 1.03)
    sets = len({course.variant.get("set", "0") for course in courses})
    figure_title(figure, "Whichever clients ask, " + rounds_message(results))
    footnote(
        figure,
        [
            f"A dot for each of {sets} requests (mean over seeds), a bar at their mean. {missed_sentence(courses)}",
            "The paper: SIFU is consistently faster than Scratch and near it on the forgotten, whichever clients ask."
            + (" DP seems fast because its costly training is not shown." if _has(lines, "dp") else ""),
        ],
    )
    return figure


def _has(lines: Sequence[Line], method: str) -> bool:
    return any(line.method == method for line in lines)


def _total(course: Course) -> float:
    return float(course.total)


def _forgotten(course: Course) -> float | None:
    return course.forgotten


def _rounds_panel(axes: Axes, here: Sequence[Course], lines: Sequence[Line]) -> None:
    """Draw bars for runs that reached the target; a column at the right counts the others."""
    reached = {line: [course for course in by_line(here, line) if course.reached] for line in lines}
    scratch = [course.total for line, own in reached.items() if line.method == "scratch" for course in own]
    longest = max((course.total for own in reached.values() for course in own), default=1)
    # A line that takes many times as long would squeeze the others, so its bar is cut.
    limit = min(longest, 2.5 * statistics.median(scratch)) if scratch else longest
    for place, line in enumerate(lines):
        matching, own = by_line(here, line), reached[line]
        missed = len(matching) - len(own)
        if missed:
            gutter(axes, place, f"✗ {missed}/{len(matching)}")
        if matching and not own:
            axes.annotate("not reached", (0.0, place), xytext=(3, 0), textcoords="offset points", va="center",
                          fontsize=8, color=GREY, fontstyle="italic", zorder=3,
                          bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8})  # fmt: skip
        if own:
            _bar(axes, place, line, own, limit)
            if line.method == "scratch":
                reference(axes, statistics.median(course.total for course in own))
    axes.set_xlim(0, limit / 0.78)
    ticks = [tick for tick in _round_ticks(limit) if tick <= 1.02 * limit]
    axes.set_xticks(ticks, [_thousands()(tick, 0) for tick in ticks])


def _bar(axes: Axes, place: int, line: Line, courses: Sequence[Course], limit: float) -> None:
    totals = [course.total for course in courses]
    median, colour, start = statistics.median(totals), colour_of(line), 0.0
    parts = [statistics.fmean(course.rounds[k] for course in courses) for k in range(len(courses[0].rows))]
    for number, part in enumerate(parts):
        width = median * part / max(sum(parts), 1)
        shade = SHADES[min(number, len(SHADES) - 1)]
        end = min(start + width, limit)
        if end > start:
            axes.barh(place, end - start, left=start, height=0.66, color=colour, alpha=shade, zorder=2)
        start += width
    if median > limit:
        axes.annotate(f"{median:,.0f}", (0.0, place), xytext=(4, 0), textcoords="offset points", va="center",
                      fontsize=8, color="white", fontweight="bold", zorder=6)  # fmt: skip
    elif min(totals) < limit:
        whisker(axes, place, min(totals), min(max(totals), 1.02 * limit))


def _round_ticks(limit: float) -> list[float]:
    """Return the first five multiples of a round step, from zero; at most four are within `limit`."""
    step = next(size * 10**power for power in range(9) for size in (1, 2, 5) if limit / (size * 10**power) <= 3.4)
    return [step * k for k in range(5)]


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
        median = statistics.median(accuracies)
        whisker(axes, place, min(accuracies), max(accuracies))
        axes.plot(median, place, marker_of(line), color=colour_of(line), markersize=6, zorder=5)
        if line.method == "scratch":
            reference(axes, median)
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
        mark = marker_of(line)
        axes.plot(before, place, mark, markersize=6, markerfacecolor="white", markeredgecolor=colour_of(line), zorder=5)
        whisker(axes, place, low, high)
        axes.plot(after, place, mark, color=colour_of(line), markersize=6, zorder=6)
    axes.margins(x=0.12)
    percent_axis(axes)
    axes.locator_params(axis="x", nbins=4)


def _limit_dots(
    axes: Axes,
    place: int,
    line: Line,
    courses: Sequence[Course],
    limits: Sequence[float],
    scratch_of: Callable[[Course], Course | None],
    column: str,
) -> None:
    points = []
    for number, limit in enumerate(limits):
        gaps = []
        for course in courses:
            scratch = scratch_of(course)
            if float(course.variant["limit"]) == limit and scratch is not None:
                values = course.rows[-1][column], scratch.rows[-1][column]
                if None not in values:
                    gaps.append(abs(values[0] - values[1]))
        if gaps:
            points.append((statistics.median(gaps), 3.5 + 2.2 * number, 0.45 + 0.55 * number / max(len(limits) - 1, 1)))
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


def time_limited_message(limited: Sequence[Course], scratch_of: Callable[[Course], Course | None]) -> str:
    """Describe how far SIFU and Scratch with the longest time are from a full retraining on the remaining clients."""
    longest = max(float(course.variant["limit"]) for course in limited)
    compared = [
        course
        for course in limited
        if float(course.variant["limit"]) == longest
        and course.line.method in ("sifu", "scratch")
        and scratch_of(course) is not None
    ]
    # A diverged run has no accuracy, so its data set and seed are left out for all lines.
    lost = {_counterfactual(course) for course in compared if course.first["accuracy_retain_after"] is None}
    words = rules_or_presets(limited)
    by_method: dict[str, list[tuple[str, str]]] = {}
    for line in lines_of(compared):
        gaps = [
            abs(course.first["accuracy_retain_after"] - full.first["accuracy_retain_after"])
            for course in by_line(compared, line)
            if _counterfactual(course) not in lost and (full := scratch_of(course)) is not None
        ]
        if gaps:
            by_method.setdefault(line.method, []).append((f"{100 * statistics.median(gaps):.0f}", words(line)))
    if not by_method:
        return "Limited time, against a full retraining"
    parts = [
        f"{METHOD_NAMES[method]} {', '.join(f'{gap} ({name})' if len(own) > 1 else gap for gap, name in own)}"
        for method, own in by_method.items()
    ]
    message = f"With {100 * longest:.0f} % of the time, points from a full retraining: {', '.join(parts)}"
    counterfactuals = len({_counterfactual(course) for course in compared})
    return message + (f"; SIFU diverged in {len(lost)} of {counterfactuals} runs" if lost else "")


def _counterfactual(course: Course) -> tuple[str, int]:
    """Return data set and seed of a course."""
    return course.first["dataset"], course.first["seed"]


def rounds_message(results: Results) -> str:
    """Compare SIFU with Scratch in a sentence: the mean over the data sets where SIFU always reached the target."""
    everywhere = len(results.titles)
    saved: dict[str, list[float]] = {}
    counts: dict[str, int] = {}
    words = rules_or_presets(results.courses)
    for line in results.lines:
        if line.method != "sifu":
            continue
        for dataset in results.titles:
            here = [course for course in results.courses if course.first["dataset"] == dataset]
            speed = speed_up(by_line(here, line), here)
            counts[words(line)] = counts.get(words(line), 0) + (speed.runs > 0)
            if speed.complete and speed.fewer is not None:
                saved.setdefault(words(line), []).append(speed.fewer)
    means = {name: (statistics.fmean(shares), len(shares)) for name, shares in saved.items()}
    if len(means) > 2:  # a sentence for each would make the title too long
        parts = [
            f"{name} {round(100 * mean)} % ({got_there} of {everywhere})" for name, (mean, got_there) in means.items()
        ]
        return f"Share of Scratch's rounds that SIFU saves (data sets on which every run got there): {', '.join(parts)}"
    parts = []
    for name, (mean, got_there) in means.items():
        where = (
            "" if got_there == counts[name] else f" on the {got_there} of {counts[name]} data sets it always got there"
        )
        if counts[name] < everywhere:  # the others were not run, or their training missed the target
            where = f" on {got_there} of {everywhere} data sets"
        parts.append(f"{fewer_words(mean)} ({name}){where}")
    return f"SIFU against Scratch: {', '.join(parts)}" if parts else results.title


def missed_sentence(courses: Sequence[Course]) -> str:
    """Name the lines that missed the target, and how often."""
    parts = []
    for line, label in labels_of(courses).items():
        matching = by_line(courses, line)
        missed = sum(not course.reached for course in matching)
        if missed:
            parts.append(f"{label} {missed} of {len(matching)}")
    return f"The target was missed in runs of {', '.join(parts)}." if parts else ""
