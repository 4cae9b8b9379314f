"""Figures of the experiments: a column of panels for each data set, and in it a line for each method."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sifu_paper.settings import dataset_title
from sifu_paper.speed import Course, Line, courses_of, speed_up
from sifu_paper.table import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sifu_paper.experiment import Experiment

# Okabe and Ito's palette, for colour-blind readers.
BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9"
INK, GREY, FAINT = "#1f2430", "#6b7280", "#d8dce3"
COLOURS = {
    "scratch": "#8b93a1",
    "noisy_scratch": PURPLE,
    "fed_eraser": ORANGE,
    "fed_accum": "#9a6a1f",
    "fine_tuning": SKY,
    "last": VERMILLION,
    "dp": "#7a4d73",
}
STYLE: dict[str, Any] = {
    "font.size": 9.0,
    "text.color": INK,
    "axes.labelcolor": GREY,
    "axes.edgecolor": "#aab0bb",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "xtick.color": GREY,
    "ytick.color": INK,
    "legend.frameon": False,
}
Value = Callable[[Course], float | None]


def save(experiment: Experiment, rows: Sequence[Row], path: Path) -> None:
    """Draw an experiment's figure, and write it as PNG or SVG."""
    import matplotlib.style

    with matplotlib.style.context(["default", STYLE]):
        experiment.draw(experiment, rows).savefig(path, dpi=160)


def draw_methods(experiment: Experiment, rows: Sequence[Row]) -> Figure:
    """Draw rounds, and what the model still knows of the forgotten, for every method."""
    courses = courses_of(rows)
    measures: dict[str, Value] = {
        "rounds of all requests": lambda course: course.rounds,
        "accuracy on the forgotten": lambda course: course.last["forgotten"],
    }
    return _panels(experiment, courses, measures, _saved(courses))


def draw_marks(experiment: Experiment, rows: Sequence[Row]) -> Figure:
    """Draw rounds, and what the model still knows of the forgotten clients' watermarks."""
    courses = courses_of(rows)
    measures: dict[str, Value] = {
        "rounds of all requests": lambda course: course.rounds,
        "accuracy lost with fresh marks": lambda course: course.last["mark_after"],
    }
    return _panels(experiment, courses, measures, _saved(courses))


def draw_limits(experiment: Experiment, rows: Sequence[Row]) -> Figure:
    """Draw how far each method is from a full retraining, in accuracy on remaining and forgotten clients."""
    courses = courses_of(rows)
    full = {one.counterfactual: one.last for one in courses if one.line.method == "scratch" and not one.variant}
    longest = max(one.variant.get("limit", 0.0) for one in courses)
    limited = [one for one in courses if one.variant.get("limit") == longest]

    def gap(column: str) -> Value:
        def of(course: Course) -> float | None:
            there = full.get(course.counterfactual)
            if there is None or course.last[column] is None:
                return None
            return 100.0 * float(course.last[column] - there[column])

        return of

    measures = {"remaining: points from retraining": gap("retain"), "forgotten: points": gap("forgotten")}
    return _panels(experiment, limited, measures, f"With {100 * longest:.0f} % of the rounds of training")


def draw_sigmas(experiment: Experiment, rows: Sequence[Row]) -> Figure:
    """Draw rounds and accuracy on the forgotten against the size of the noise; others than SIFU are level lines."""
    courses = courses_of(rows)
    datasets = list(dict.fromkeys(one.last["dataset"] for one in courses))
    figure, grid = _figure(2, len(datasets), 2.2)
    for column, dataset in enumerate(datasets):
        for line in _lines(courses):
            mine = [one for one in courses if one.last["dataset"] == dataset and one.line == line]
            for axes, value in ((grid[0][column], _rounds), (grid[1][column], _forgotten)):
                points = _by_factor(mine, value)
                if set(points) == {None}:
                    axes.axhline(points[None], color=_colour(line), linestyle="--", linewidth=1.0, label=line.label)
                elif points:
                    axes.plot(
                        list(points), list(points.values()), "o-", color=_colour(line), markersize=3, label=line.label
                    )
                axes.set_xscale("log")
                axes.grid(True, axis="y")
        grid[0][column].set_title(dataset_title(dataset), loc="left", fontweight="bold")
        grid[1][column].set_xlabel("times the paper's sigma")
    grid[0][0].set_ylabel("rounds")
    grid[1][0].set_ylabel("accuracy on the forgotten")
    grid[0][0].legend(fontsize=7)
    return _titled(figure, experiment.title)


def draw_bound(experiment: Experiment, rows: Sequence[Row]) -> Figure:
    """Draw Psi against the true distance, with the weights of the round and those of the population."""
    measured = [row for row in rows if row["distance"]]
    figure, grid = _figure(1, 2, 4.0)
    broken = {}
    for axes, column, words in zip(
        grid[0], ("psi_round", "psi_population"), ("weights of the round", "population weights"), strict=True
    ):
        for dataset in dict.fromkeys(row["dataset"] for row in measured):
            here = [row for row in measured if row["dataset"] == dataset]
            distances, bounds = [row["distance"] for row in here], [row[column] for row in here]
            axes.plot(distances, bounds, ".", alpha=0.6, label=dataset_title(dataset))
        low, high = axes.get_xlim()
        axes.plot([low, high], [low, high], color=INK, linewidth=1.0)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(words, loc="left", fontweight="bold")
        axes.set_xlabel("true distance")
        broken[words] = sum(row["distance"] > row[column] for row in measured)
    grid[0][0].set_ylabel("Psi with B = 1")
    grid[0][0].legend(fontsize=7)
    counts = ", ".join(f"{count} with {words}" for words, count in broken.items())
    return _titled(figure, f"Psi was too small in {counts}, of {len(measured)} measurements")


def draw_trace(experiment: Experiment, rows: Sequence[Row]) -> Figure:
    """Draw what is left of a forgotten client outside the span of the others' rows, and the error on their rows."""
    figure, grid = _figure(1, 2, 2.8)
    for axes, column, words in zip(
        grid[0], ("trace", "error"), ("trace of the client", "error of the others"), strict=True
    ):
        for method, colour in (("fine_tuning", SKY), ("scratch", GREY)):
            for seed in dict.fromkeys(row["seed"] for row in rows):
                mine = [row for row in rows if row["method"] == method and row["seed"] == seed]
                label = Line(method, "paper").label if seed == rows[0]["seed"] else None
                numbers, values = [row["number"] for row in mine], [max(row[column], 1e-16) for row in mine]
                axes.plot(numbers, values, color=colour, label=label)
        axes.set_yscale("log")
        axes.set_xlabel("rounds without the client")
        axes.set_title(words, loc="left", fontweight="bold")
    grid[0][0].legend()
    return _titled(figure, experiment.title)


def _rounds(course: Course) -> float | None:
    return course.rounds


def _forgotten(course: Course) -> float | None:
    value: float | None = course.last["forgotten"]
    return value


def _by_factor(courses: Sequence[Course], value: Value) -> dict[float | None, float]:
    """Return the mean of a value by the noise's factor; None for methods that have no such factor."""
    values: dict[float | None, list[float]] = {}
    for course in courses:
        one = value(course)
        if one is not None:
            values.setdefault(course.variant.get("sigma_factor"), []).append(one)
    return {factor: statistics.fmean(values[factor]) for factor in sorted(values, key=lambda one: one or 0.0)}


def _lines(courses: Sequence[Course]) -> list[Line]:
    return list(dict.fromkeys(one.line for one in courses))


def _colour(line: Line) -> str:
    if line.method == "sifu":
        return GREEN if line.ours else BLUE
    return COLOURS[line.method]


def _panels(experiment: Experiment, courses: Sequence[Course], measures: dict[str, Value], message: str) -> Figure:
    """Draw a bar with the spread over seeds for each line, in a panel for each measure and data set."""
    lines = _lines(courses)
    datasets = list(dict.fromkeys(one.last["dataset"] for one in courses))
    figure, grid = _figure(len(measures), len(datasets), 0.6 + 0.22 * len(lines))
    for row, (words, value) in enumerate(measures.items()):
        for column, dataset in enumerate(datasets):
            axes = grid[row][column]
            for place, line in enumerate(lines):
                _bar(
                    axes,
                    place,
                    line,
                    [one for one in courses if one.line == line and one.last["dataset"] == dataset],
                    value,
                )
            axes.set_ylim(len(lines) - 0.5, -0.5)
            axes.set_yticks(range(len(lines)), [line.label for line in lines] if column == 0 else [])
            axes.grid(True, axis="x")
            axes.set_xlabel(words, fontsize=8)
            if row == 0:
                axes.set_title(dataset_title(dataset), loc="left", fontweight="bold")
    return _titled(figure, f"{experiment.title}. {message}")


def _bar(axes: Axes, place: int, line: Line, courses: Sequence[Course], value: Value) -> None:
    """Draw the mean, a line from the smallest to the largest value, and how many runs missed the target."""
    values = [one for course in courses if (one := value(course)) is not None]
    if not values:
        return
    axes.barh(place, statistics.fmean(values), height=0.6, color=_colour(line), alpha=0.85)
    axes.plot([min(values), max(values)], [place, place], color=INK, linewidth=1.0)
    missed = sum(not course.reached for course in courses)
    if missed and "limit" not in courses[0].variant:
        axes.annotate(
            f"{missed} missed", (1.0, place), xycoords=axes.get_yaxis_transform(), ha="right", va="center", fontsize=7
        )


def _saved(courses: Sequence[Course]) -> str:
    """Say which share of Scratch's rounds SIFU saves, on average over the data sets where all its runs got there."""
    words = []
    for line in _lines(courses):
        shares = []
        for dataset in dict.fromkeys(one.last["dataset"] for one in courses):
            here = [one for one in courses if one.last["dataset"] == dataset]
            speed = speed_up([one for one in here if one.line == line], here)
            if speed.ratios and not speed.missed:
                shares.append(1.0 - 1.0 / statistics.median(speed.ratios))
        if line.method == "sifu" and shares:
            words.append(f"{line.label} saves {100 * statistics.fmean(shares):.0f} %")
    return f"Of Scratch's rounds {', '.join(words)}" if words else ""


def _figure(rows: int, columns: int, height: float) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(2.2 * columns + 1.6, 7.6), height * rows + 0.7), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _titled(figure: Figure, message: str) -> Figure:
    figure.suptitle(message, x=0.01, ha="left", fontsize=10, fontweight="bold", wrap=True)
    return figure
