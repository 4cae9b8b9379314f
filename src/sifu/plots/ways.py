"""Three ways to hold the same federation: what a request costs each, and how accurate it is on test samples."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sifu.plots.courses import Course, Line, Results, spread
from sifu.plots.panels import by_line, colour_of, figure_title, footnote, method_grid, nothing_yet, whisker
from sifu.plots.style import INK, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HELD = {
    "closed_form": "a head in closed form",
    "sifu": "a softmax head, with noise",
    "scratch": "a network, trained again",
}
"""What each method of the experiment trains."""


@styled
def draw_ways(results: Results) -> Figure:
    """Rounds of a request, and test accuracy after the last one."""
    courses = results.courses
    if not courses:
        return nothing_yet()
    lines = results.lines
    figure, panels = method_grid(lines, results.titles, ["rounds a request", "test accuracy, %"])
    for column, dataset in enumerate(results.titles):
        here = [course for course in courses if course.first["dataset"] == dataset]
        rounds = [round_count for course in here for round_count in course.rounds]
        for axes in (panels[0][column], panels[1][column]):
            axes.margins(x=0.15)
        _dots(panels[0][column], [(line, _rounds(by_line(here, line))) for line in lines], "{:,.0f}")
        _dots(panels[1][column], [(line, _accuracies(by_line(here, line))) for line in lines], "{:.1f}")
        panels[0][column].set_xlim(left=-0.06 * max([*rounds, 1]), right=1.35 * max([*rounds, 1]))
        panels[1][column].set_xlim(right=panels[1][column].get_xlim()[1] + 8)
    for axes in (row[0] for row in panels):
        axes.set_yticks(range(len(lines)), [HELD.get(line.method, line.label) for line in lines])
    figure_title(figure, ways_message(courses))
    footnote(
        figure,
        [
            "Dots: mean over seeds and requests; whiskers: least and largest seed. Test samples are looked at after "
            "the last request and decide nothing.",
            "Where each client holds one class (MNIST, FashionMNIST), ten clients that go take a class away whose "
            "test samples still count: after three of them at most 70 % can be right.",
            "The ways train different models: rounds are what a request costs the clients that stay, accuracy is what "
            "they get.",
        ],
    )
    return figure


def ways_message(courses: Sequence[Course]) -> str:
    """What the figure shows, in a sentence."""
    closed = [course for course in courses if course.first["method"] == "closed_form"]
    network = [course for course in courses if course.first["method"] == "scratch"]
    if not closed:
        return "Ways to hold the same federation"
    requests = sum(len(course.rows) for course in closed)
    rounds = sum(course.total for course in closed)
    took = "no round" if rounds == 0 else f"{rounds} rounds"
    text = f"{requests} requests by a head in closed form took {took}"
    if not network:
        return text
    again = statistics.fmean(value for course in network for value in course.rounds)
    return f"{text}; a network took {again:,.0f} rounds each"


def _rounds(courses: Sequence[Course]) -> list[float]:
    return [statistics.fmean(course.rounds) for course in courses]


def _accuracies(courses: Sequence[Course]) -> list[float]:
    values = [course.rows[-1].get("accuracy_test") for course in courses]
    return [100.0 * value for value in values if value is not None]


def _dots(axes: Axes, measured: Sequence[tuple[Line, list[float]]], form: str) -> None:
    for place, (line, values) in enumerate(measured):
        if values:
            mean, low, high = spread(values)
            whisker(axes, place, low, high)
            axes.plot(mean, place, "o", color=colour_of(line), markersize=6, zorder=5)
            axes.annotate(
                form.format(mean),
                (high, place),
                (7, 0),
                textcoords="offset points",
                va="center",
                fontsize=7.5,
                color=INK,
            )
