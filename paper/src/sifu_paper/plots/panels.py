"""Panels for several figures: a line for each method, a column for each data set."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sifu.plots.style import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    new_figure,
    only_ticks,
    say_instead,
)
from sifu_paper.plots.courses import Course, Line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SCRATCH = "#8b93a1"
COLOURS = {
    "scratch": SCRATCH,
    "noisy_scratch": PURPLE,
    "fed_eraser": ORANGE,
    "fed_accum": "#9a6a1f",
    "fine_tuning": SKY,
    "last": VERMILLION,
    "dp": "#7a4d73",
}
MARKERS = {
    "scratch": "o",
    "noisy_scratch": "d",
    "sifu": "D",
    "closed_form": "*",
    "groups": "P",
    "fed_eraser": "^",
    "fed_accum": "v",
    "fine_tuning": ">",
    "last": "s",
    "dp": "h",
}
"""Markers that distinguish methods in black and white."""
SHADES = (1.0, 0.66, 0.38)
PANEL_WIDTH, LABEL_WIDTH, LETTER_WIDTH = 1.85, 1.45, 0.072


def colour_of(line: Line) -> str:
    """Return the colour of a line: green for SIFU by our rules, blue by other rules; other methods have their own."""
    if line.method == "sifu":
        return GREEN if line.honest else BLUE
    return COLOURS.get(line.method, INK)


def marker_of(line: Line) -> str:
    """Return the marker of a method; SIFU by our rules has a separate one."""
    return "X" if line.method == "sifu" and line.honest else MARKERS.get(line.method, "p")


def method_grid(
    named: Sequence[tuple[Line, str]], titles: Mapping[str, str], rows: Sequence[str]
) -> tuple[Figure, list[list[Axes]]]:
    """Return a figure with a column for each data set, a row of panels for each measure, and a line for each name."""
    from matplotlib.figure import Figure

    lines = [line for line, _ in named]
    height = 0.95 + len(rows) * (0.62 + 0.235 * len(lines)) + 0.75
    longest = max((len(part) for _, label in named for part in label.splitlines()), default=0)
    width = max(max(LABEL_WIDTH, LETTER_WIDTH * longest) + PANEL_WIDTH * len(titles), 7.6)
    figure = Figure(figsize=(width, height), layout="constrained")
    grid = figure.subplots(len(rows), len(titles), sharey=True, squeeze=False)
    for row, measure in enumerate(rows):
        for column, title in enumerate(titles.values()):
            axes = grid[row][column]
            only_ticks(axes, grid="x")
            axes.spines["left"].set_visible(False)
            axes.set_ylim(len(lines) - 0.5, -0.5)
            if column == 0:
                axes.set_yticks(range(len(lines)), [label for _, label in named])
                for label, line in zip(axes.get_yticklabels(), lines, strict=True):
                    label.set_color(colour_of(line) if line.method == "sifu" else INK)
                    label.set_fontweight("bold" if line.method == "sifu" else "normal")
            axes.tick_params(axis="x", labelsize=8.5)
            axes.tick_params(axis="y", labelsize=9.5)
            if row == 0:
                axes.set_title(title, fontweight="bold", loc="left")
            axes.set_xlabel(measure, fontsize=8.5)
    return figure, [list(row) for row in grid]


def by_line(courses: Sequence[Course], line: Line) -> list[Course]:
    """Return the courses of one line."""
    return [course for course in courses if course.line == line]


def whisker(axes: Axes, place: float, low: float, high: float) -> None:
    """Draw the spread over seeds."""
    if high > low:
        axes.plot([low, high], [place, place], color=INK, linewidth=1.0, solid_capstyle="butt", zorder=4)
        for end in (low, high):
            axes.plot([end, end], [place - 0.13, place + 0.13], color=INK, linewidth=1.0, zorder=4)


def gutter(axes: Axes, place: float, text: str) -> None:
    """Write text in the column at the right edge of a panel, over any reference line."""
    axes.annotate(text, (1.0, place), xycoords=axes.get_yaxis_transform(), ha="right", va="center", fontsize=8,
                  color=INK, zorder=3, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8})  # fmt: skip


def reference(axes: Axes, value: float, **options: Any) -> None:
    """Draw a line at Scratch's value."""
    axes.axvline(value, color=SCRATCH, linewidth=1.0, linestyle=(0, (4, 2)), zorder=1.5, **options)


def percent_axis(axes: Axes, axis: str = "x", symbol: str = " %") -> None:
    """Show shares as percentages, with a decimal if a tick has one."""
    getattr(axes, f"{axis}axis").set_major_formatter(lambda share, _: f"{_percent(share)}{symbol}")


def _percent(share: float) -> str:
    """Return a share in per cent, with as many digits as it needs.

    >>> _percent(0.025), _percent(0.5), _percent(-0.05)
    ('2.5', '50', '−5')

    """
    return f"{round(100 * share, 6):g}".replace("-", "−")


def footnote(figure: Figure, sentences: Sequence[str]) -> None:
    """Write the paper's statement and ours under the figure."""
    width = int(figure.get_figwidth() * 13.6)
    text = "\n".join("\n".join(textwrap.wrap(sentence, width)) for sentence in sentences if sentence)
    figure.supxlabel(text, x=0.008, ha="left", fontsize=9, color=GREY, parse_math=False)


def figure_title(figure: Figure, message: str) -> None:
    """Write the message of the figure above it."""
    width = int(figure.get_figwidth() * 9.8)
    figure.suptitle(
        "\n".join(textwrap.wrap(message, width)), x=0.008, ha="left", fontsize=12, fontweight="bold", parse_math=False
    )


def faint_zero(axes: Axes) -> None:
    """Draw a faint line at zero."""
    axes.axvline(0.0, color=FAINT, linewidth=1.0, zorder=1)


def nothing_yet(sentence: str = "no request has been carried out yet") -> Figure:
    """Return a figure with a sentence instead of empty panels."""
    return say_instead(new_figure(1.6), f"Nothing to show: {sentence}.")
