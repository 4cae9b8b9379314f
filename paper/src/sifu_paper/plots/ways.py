"""Figure of three methods on the same federation: the cost of a request, and the accuracy on test samples."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sifu.plots.style import INK, styled
from sifu_paper.plots.courses import Course, Line, Results, shape_words, spread
from sifu_paper.plots.panels import by_line, colour_of, figure_title, footnote, method_grid, nothing_yet, whisker

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HELD = {
    "closed_form": "a head in closed form",
    "sifu": "a softmax head, with noise",
    "scratch": "a network, trained again",
}
"""Model that each method of the experiment trains."""
TENS = "10x3"
"""Three requests of ten clients each."""


@styled
def draw_ways(results: Results) -> Figure:
    """Draw the rounds of a request, if any method takes some, and the test accuracy after the last one."""
    courses = results.courses
    if not courses:
        return nothing_yet()
    ways = _ways(results)
    measures = ["test accuracy, %"]
    if any(course.total for course in courses):
        measures.insert(0, "rounds a request")
    figure, panels = method_grid([(line, _label(line, shape)) for line, shape in ways], results.titles, measures)
    for column, dataset in enumerate(results.titles):
        here = [course for course in courses if course.first["dataset"] == dataset]
        runs = [(line, [run for run in by_line(here, line) if _shape(run) == shape]) for line, shape in ways]
        for row in panels:
            row[column].margins(x=0.15)
        accuracy = panels[-1][column]
        _dots(accuracy, [(line, _accuracies(own)) for line, own in runs], "{:.1f}")
        accuracy.set_xlim(right=accuracy.get_xlim()[1] + 8)
        if len(panels) > 1:
            most = max([1, *(count for course in here for count in course.rounds)])
            rounds = panels[0][column]
            _dots(rounds, [(line, _rounds(own)) for line, own in runs], "{:,.0f}")
            rounds.set_xlim(left=-0.06 * most, right=1.35 * most)
            if not any(course.total for course in here):
                rounds.set_xticks([0])  # half a round is not a useful tick
    figure_title(figure, ways_message(courses))
    footnote(figure, _notes(courses))
    return figure


def _ways(results: Results) -> list[tuple[Line, str]]:
    """Return the methods with their request shapes, because requests of one client and of ten differ."""
    shown = dict.fromkeys((course.line, _shape(course)) for course in results.courses)
    return sorted(shown, key=lambda way: results.lines.index(way[0]))


def _shape(course: Course) -> str:
    return course.variant.get("requests", "")


def _label(line: Line, shape: str) -> str:
    held = HELD.get(line.method, line.label)
    return f"{held},\n{shape_words(shape).lower()}" if shape else held


def _notes(courses: Sequence[Course]) -> list[str]:
    notes = [
        "Dots: mean over seeds; whiskers: least and largest seed. Test samples are looked at after the last request "
        "and decide nothing.",
    ]
    if any(_shape(course) == TENS for course in courses):
        notes.append(
            "Where each client holds one class (MNIST, FashionMNIST), ten clients that go take a class away whose test "
            "samples still count: after three of them at most 70 % can be right."
        )
    if len({course.line for course in courses}) > 1:
        notes.append(
            "The ways train different models: rounds are what a request costs the clients that stay, accuracy is what "
            "they get."
        )
    return notes


def ways_message(courses: Sequence[Course]) -> str:
    """Summarise the figure in a sentence."""
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
