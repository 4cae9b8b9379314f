"""How much noise, and where it pays: sigma against rounds, and the size of the federation against Scratch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sifu.plots.courses import Course, Line, Results, gains_by_clients, scratch_beside, shape_words, spread
from sifu.plots.panels import SCRATCH, colour_of, figure_title, footnote, nothing_yet, percent_axis
from sifu.plots.style import BLUE, GREEN, INK, VERMILLION, note, only_ticks, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EPSILON_COLOURS = {"1": VERMILLION, "5": GREEN, "10": BLUE}


@styled
def draw_sigma(results: Results) -> Figure:
    """Rounds and accuracy on the forgotten along sigma, with Scratch and Last as the two ends."""
    from matplotlib.figure import Figure

    courses = results.courses
    if not courses:
        return nothing_yet()
    figure = Figure(figsize=(max(1.0 + 2.1 * len(results.titles), 7.6), 5.2), layout="constrained")
    grid = figure.subplots(2, len(results.titles), squeeze=False, sharex="col")
    for column, (dataset, title) in enumerate(results.titles.items()):
        here = [course for course in courses if course.first["dataset"] == dataset]
        top, bottom = grid[0][column], grid[1][column]
        for axes in (top, bottom):
            only_ticks(axes, grid="y")
            axes.set_xscale("log")
            axes.tick_params(which="both", length=0)
        top.set_title(title, fontweight="bold", loc="left")
        bottom.set_xlabel(r"$\sigma$")
        table_sigma = results.sigmas[dataset]
        for method, style in (("scratch", (0, (4, 2))), ("last", (0, (1, 1.5)))):
            for line in dict.fromkeys(course.line for course in here if course.first["method"] == method):
                _level(top, bottom, [course for course in here if course.line == line], line, style, column == 0)
        for line in dict.fromkeys(course.line for course in here if course.first["method"] == "sifu"):
            _along_sigma(
                top, bottom, [course for course in here if course.line == line], line, table_sigma, column == 0
            )
        top.set_ylim(bottom=0)
        top.locator_params(axis="y", integer=True)
        top.yaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}k" if value >= 10000 else f"{value:,.0f}")
        percent_axis(bottom, "y")
        bottom.set_ylim(-0.04, 1.04)
    grid[0][0].set_ylabel("rounds of all requests")
    grid[1][0].set_ylabel("accuracy on the forgotten")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center")  # the title has the room above
    figure_title(figure, _sigma_message(courses))
    footnote(
        figure,
        [
            "Mean over seeds; bands: least and largest seed. Crosses: the target was missed. Ringed: the "
            "paper's sigma.",
            "The paper: with low sigma SIFU is Scratch, with high sigma it is Last; at the best sigma it is "
            "two to five times "
            "faster than Scratch.",
        ],
    )
    return figure


def _sigma_message(courses: Sequence[Course]) -> str:
    """The gain at the best sigma, mean over data sets, for each preset."""
    beside = scratch_beside(courses)
    parts = []
    for line in dict.fromkeys(course.line for course in courses if course.first["method"] == "sifu"):
        by_sigma: dict[str, dict[str, list[float]]] = {}
        for course in courses:
            scratch = beside(course)
            if course.line == line and scratch is not None:
                by_variant = by_sigma.setdefault(course.first["dataset"], {})
                by_variant.setdefault(course.first["variant"], []).append(scratch.total / max(course.total, 1))
        gains = [max(statistics.fmean(values) for values in by_variant.values()) for by_variant in by_sigma.values()]
        if gains:
            low, high = min(gains), max(gains)
            parts.append(
                f"{low:.1f} to {high:.1f} times ({line.preset})" if high > low else f"{low:.1f} times ({line.preset})"
            )
    return f"At its best sigma SIFU is faster than Scratch {', '.join(parts)}" if parts else "Rounds along sigma"


def _along_sigma(
    top: Axes, bottom: Axes, courses: Sequence[Course], line: Line, table_sigma: float, labelled: bool
) -> None:
    by_factor: dict[float, list[Course]] = {}
    for course in courses:
        if "sigma_factor" in course.variant:
            by_factor.setdefault(float(course.variant["sigma_factor"]), []).append(course)
    factors = sorted(by_factor)
    colour = colour_of(line)
    sigmas = [factor * table_sigma for factor in factors]
    totals = [[float(course.total) for course in by_factor[factor]] for factor in factors]
    forgotten = [
        [float("nan") if course.forgotten is None else course.forgotten for course in by_factor[factor]]
        for factor in factors
    ]
    for axes, values in ((top, totals), (bottom, forgotten)):
        points = [spread(by_seed) for by_seed in values]
        axes.plot(sigmas, [mean for mean, _, _ in points], "-", color=colour, linewidth=1.8, zorder=4)
        axes.fill_between(
            sigmas, [point[1] for point in points], [point[2] for point in points], color=colour, alpha=0.15, lw=0
        )
        for sigma, factor, point in zip(sigmas, factors, points, strict=True):
            missed = not all(course.reached for course in by_factor[factor])
            axes.plot(sigma, point[0], "x" if missed else "o", color=colour, markersize=5, zorder=5)
            if factor == 1.0:
                axes.plot(sigma, point[0], "o", markersize=10, markerfacecolor="none", markeredgecolor=colour, zorder=5)
    if labelled:
        top.plot([], [], "o-", color=colour, label=line.label)


def _level(
    top: Axes, bottom: Axes, courses: Sequence[Course], line: Line, style: tuple[int, tuple[float, ...]], labelled: bool
) -> None:
    rounds = statistics.fmean(course.total for course in courses)
    accuracies = [value for course in courses if (value := course.forgotten) is not None]
    colour = SCRATCH if line.method == "scratch" else colour_of(line)
    if line.preset == "ours" and line.method == "last":
        return  # the same end of the scale; one line is enough
    name = "Last" if line.method == "last" else line.label
    missed = "" if all(course.reached for course in courses) else " (missed)"
    top.axhline(
        rounds, color=colour, linestyle=style, linewidth=1.4, label=name + missed if labelled else None, zorder=2
    )
    if accuracies:
        bottom.axhline(statistics.fmean(accuracies), color=colour, linestyle=style, linewidth=1.4, zorder=2)


@styled
def draw_scale(results: Results) -> Figure:
    """Scratch's rounds over SIFU's as the federation grows, at the best sigma and at the automatic one."""
    from matplotlib.figure import Figure

    courses = results.courses
    sifu = [course for course in courses if course.first["method"] == "sifu"]
    if not sifu:
        return nothing_yet()
    beside = scratch_beside(courses)
    shapes = list(dict.fromkeys(course.variant["requests"] for course in sifu))
    figure = Figure(figsize=(max(7.6, 4.3 * len(shapes)), 4.3), layout="constrained")
    panels = figure.subplots(1, len(shapes), squeeze=False, sharey=True)[0]
    largest: tuple[int, float, str] = (0, 0.0, "")
    for axes, shape in zip(panels, shapes, strict=True):
        only_ticks(axes, grid="y")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.axhline(1.0, color=SCRATCH, linewidth=1.2, linestyle=(0, (4, 2)), zorder=1)
        axes.set_title(shape_words(shape), fontweight="bold", loc="left")
        axes.set_xlabel("clients")
        here = [course for course in sifu if course.variant["requests"] == shape]
        ends: list[tuple[float, str, str]] = []
        drawn: set[int] = set()
        for epsilon in sorted({course.variant["epsilon"] for course in here}, key=float):
            colour = EPSILON_COLOURS.get(epsilon, INK)
            for auto in (False, True):
                points = gains_by_clients(
                    [course for course in here if course.variant["epsilon"] == epsilon], beside, auto=auto
                )
                if not points:
                    continue
                sizes = sorted(points)
                values = [points[size][0] for size in sizes]
                style = ":" if auto else "-"
                axes.plot(sizes, values, style, color=colour, linewidth=1.3 if auto else 2.0, zorder=4)
                if not auto:
                    lows, highs = ([points[size][k] for size in sizes] for k in (1, 2))
                    axes.errorbar(
                        sizes,
                        values,
                        [
                            [v - low for v, low in zip(values, lows, strict=True)],
                            [high - v for v, high in zip(values, highs, strict=True)],
                        ],
                        fmt="o",
                        color=colour,
                        markersize=5,
                        elinewidth=1.0,
                        capsize=2,
                        zorder=5,
                    )
                    ends.append((values[-1], rf"$\epsilon$ = {epsilon}", colour))
                    # Single draws vary a lot: the title speaks of the largest federation, not of the luckiest point.
                    spoken_of = f"at {sizes[-1]:,} clients and epsilon {epsilon}, {shape_words(shape).lower()}"
                    largest = max(largest, (sizes[-1], values[-1], spoken_of))
                    drawn.update(sizes)
        if drawn:
            _label_ends(axes, ends, max(drawn))
            _client_ticks(axes, sorted(drawn))
    panels[0].set_ylabel("rounds of Scratch / rounds of SIFU")
    panels[0].set_ylim(bottom=min(0.75, panels[0].get_ylim()[0]))
    _times_ticks(panels)
    note(panels[0], "as Scratch", (panels[0].get_xlim()[0], 1.0), (4, -11))
    levels = sorted({row["level"] for course in sifu for row in course.rows})
    seeds = len({course.first["seed"] for course in sifu})
    spoken = "Mean over seeds, whiskers: least and largest." if seeds > 1 else "One seed."
    figure_title(figure, f"SIFU against Scratch: {largest[1]:.3g} times fewer rounds {largest[2]}")
    footnote(
        figure,
        [
            f"Convex, everyone takes part, every request certified ({', '.join(levels)}). Solid: the best "
            f"sigma tried; dotted: sigma chosen automatically. {spoken}",
            "Not in the paper, which has 100 clients.",
        ],
    )
    return figure


def _label_ends(axes: Axes, ends: Sequence[tuple[float, str, str]], last: int) -> None:
    """Labels at the right ends of the lines, pushed apart where they would touch."""
    placed = 0.0
    for value, text, colour in sorted(ends):
        at = max(value, placed * 1.22)
        axes.annotate(
            text, (last, at), xytext=(7, 0), textcoords="offset points", va="center", color=colour, fontweight="bold"
        )
        placed = at
    low, high = axes.get_xlim()
    axes.set_xlim(low, high * 1.6)


def _client_ticks(axes: Axes, sizes: Sequence[int]) -> None:
    labelled: list[int] = []
    for size in sizes:
        if not labelled or size >= 1.7 * labelled[-1]:
            labelled.append(size)
    axes.set_xticks(labelled, [f"{size:,}" for size in labelled], fontsize=8)
    axes.minorticks_off()


def _times_ticks(panels: Sequence[Axes]) -> None:
    low, high = panels[0].get_ylim()
    ticks = [tick for tick in (0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if low <= tick <= high]
    for axes in panels:
        axes.set_yticks(ticks, [f"{tick:g}x" for tick in ticks])
        axes.minorticks_off()
