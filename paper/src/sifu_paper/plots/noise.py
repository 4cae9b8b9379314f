"""Figures on the amount of noise: sigma against rounds and against the accuracy on the forgotten."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sifu.plots.style import GREY, only_ticks, styled
from sifu_paper.plots.courses import Course, Line, Results, labels_of, rules_or_presets
from sifu_paper.plots.panels import SCRATCH, colour_of, figure_title, footnote, marker_of, nothing_yet, percent_axis
from sifu_paper.plots.speed import SpeedUp, speed_up, times

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@styled
def draw_sigma(results: Results) -> Figure:
    """Draw rounds and accuracy on the forgotten along sigma, with Scratch and Last as the two ends."""
    from matplotlib.figure import Figure

    courses = results.courses
    if not courses:
        return nothing_yet()
    figure = Figure(figsize=(max(1.0 + 2.1 * len(results.titles), 7.6), 5.2), layout="constrained")
    grid = figure.subplots(2, len(results.titles), squeeze=False, sharex="col")
    labels = labels_of(courses) | {line: "Last" for line in results.lines if line.method == "last"}
    for column, (dataset, title) in enumerate(results.titles.items()):
        here = [course for course in courses if course.first["dataset"] == dataset]
        names = labels if column == 0 else {}
        top, bottom = grid[0][column], grid[1][column]
        for axes in (top, bottom):
            only_ticks(axes, grid="y")
            axes.set_xscale("log")
            axes.tick_params(which="both", length=0)
        top.set_title(title, fontweight="bold", loc="left")
        bottom.set_xlabel(r"$\sigma$", fontsize=10)
        table_sigma = results.sigmas[dataset]
        for method, style in (("scratch", (0, (4, 2))), ("last", (0, (1, 1.5)))):
            for line in dict.fromkeys(course.line for course in here if course.first["method"] == method):
                _level(
                    top,
                    bottom,
                    [course for course in here if course.line == line],
                    line,
                    style,
                    names.get(line),
                )
        for line in dict.fromkeys(course.line for course in here if course.first["method"] == "sifu"):
            _along_sigma(
                top,
                bottom,
                [course for course in here if course.line == line],
                line,
                table_sigma,
                names.get(line),
            )
        top.margins(y=0.12)
        top.autoscale(axis="y")
        top.set_ylim(bottom=0)
        top.tick_params(labelsize=9.5)
        bottom.tick_params(labelsize=9.5)
        top.locator_params(axis="y", integer=True)
        top.yaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value >= 10000 else f"{value:,.0f}")
        percent_axis(bottom, "y")
        bottom.set_ylim(-0.04, 1.04)
    grid[0][0].set_ylabel("rounds of all requests")
    grid[1][0].set_ylabel("accuracy on the forgotten")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=9.5)  # the title needs the space above
    figure_title(figure, _sigma_message(courses))
    footnote(
        figure,
        [
            "Median over seeds; bands: least and largest seed. Crosses: some run did not reach the target (above: "
            "rounds of those that did, none where no run did). Ringed: the paper's sigma. The best sigma is known in "
            "hindsight only.",
        ],
    )
    return figure


def _sigma_message(courses: Sequence[Course]) -> str:
    """Return the speed-up at the best sigma, over the data sets, for each preset; only hindsight reveals this sigma."""
    parts, words = [], rules_or_presets(courses)
    for line in dict.fromkeys(course.line for course in courses if course.first["method"] == "sifu"):
        gains = []
        for dataset in dict.fromkeys(course.first["dataset"] for course in courses):
            here = [course for course in courses if course.first["dataset"] == dataset]
            best = best_speed([course for course in here if course.line == line], here)
            if best is not None and best.median is not None:
                gains.append(best.median)
        if gains:
            low, high = times(min(gains)), times(max(gains))
            parts.append(f"{low}x ({words(line)})" if low == high else f"{low}x to {high}x ({words(line)})")
    return f"In hindsight, at its best sigma, SIFU's speed-up is {', '.join(parts)}" if parts else "Rounds along sigma"


def best_speed(courses: Sequence[Course], everyone: Sequence[Course]) -> SpeedUp | None:
    """Return the speed-up at the sigma that proved best."""
    by_variant: dict[str, list[Course]] = {}
    for course in courses:
        by_variant.setdefault(course.first["variant"], []).append(course)
    speeds = [speed_up(runs, everyone) for runs in by_variant.values()]
    return min((speed for speed in speeds if speed.median is not None), key=lambda speed: speed.rank, default=None)


def _along_sigma(
    top: Axes, bottom: Axes, courses: Sequence[Course], line: Line, table_sigma: float, name: str | None
) -> None:
    by_factor: dict[float, list[Course]] = {}
    for course in courses:
        if "sigma_factor" in course.variant:
            by_factor.setdefault(float(course.variant["sigma_factor"]), []).append(course)
    factors = sorted(by_factor)
    colour = colour_of(line)
    sigmas = [factor * table_sigma for factor in factors]
    totals = [[float(course.total) for course in by_factor[factor] if course.reached] for factor in factors]
    forgotten = [
        [course.forgotten for course in by_factor[factor] if course.forgotten is not None] for factor in factors
    ]
    style, marker = ("-", marker_of(line)) if line.honest else ("--", marker_of(line))
    for axes, values in ((top, totals), (bottom, forgotten)):
        present = [
            (sigma, factor, by_seed) for sigma, factor, by_seed in zip(sigmas, factors, values, strict=True) if by_seed
        ]
        places = [sigma for sigma, _, _ in present]
        axes.plot(
            places, [statistics.median(seeds) for _, _, seeds in present], style, color=colour, linewidth=1.8, zorder=4
        )
        axes.fill_between(
            places, [min(seeds) for _, _, seeds in present], [max(seeds) for _, _, seeds in present], color=colour,
            alpha=0.15, lw=0,
        )  # fmt: skip
        for sigma, factor, seeds in present:
            missed = not all(course.reached for course in by_factor[factor])
            axes.plot(sigma, statistics.median(seeds), "x" if missed else marker, color=colour, markersize=6, zorder=5)
            if factor == 1.0:
                axes.plot(sigma, statistics.median(seeds), "o", markersize=12, markerfacecolor="none",
                          markeredgecolor=colour, zorder=5)  # fmt: skip
    if not any(totals):
        top.text(0.5, 0.5, "no run reached the target", transform=top.transAxes, ha="center", color=GREY)
    if name:
        top.plot([], [], style, marker=marker, color=colour, label=name)


def _level(
    top: Axes,
    bottom: Axes,
    courses: Sequence[Course],
    line: Line,
    style: tuple[int, tuple[float, ...]],
    name: str | None,
) -> None:
    reached = [course.total for course in courses if course.reached]
    accuracies = [value for course in courses if (value := course.forgotten) is not None]
    colour = SCRATCH if line.method == "scratch" else colour_of(line)
    if line.honest and line.method == "last":
        return  # the same end of the scale, so one line suffices
    if reached:
        top.axhline(statistics.median(reached), color=colour, linestyle=style, linewidth=1.6, zorder=2)
    if name:
        top.plot([], [], color=colour, linestyle=style, linewidth=1.6, label=name)
    if accuracies:
        bottom.axhline(statistics.median(accuracies), color=colour, linestyle=style, linewidth=1.4, zorder=2)
