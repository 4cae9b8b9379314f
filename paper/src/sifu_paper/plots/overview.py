"""Figure of all methods: accuracy on the forgotten, speed-up over Scratch, and proven levels."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sifu.plots.style import BLUE, FAINT, GREY, INK, VERMILLION, only_ticks, styled
from sifu_paper.plots.panels import figure_title, footnote, nothing_yet
from sifu_paper.plots.speed import SpeedUp, times

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHAPES = {"o": "●", "s": "■", "D": "◆", "^": "▲", "v": "▼", "P": "✚", "*": "★", "X": "✖", ">": "▶", "<": "◀"}
"""Markers of tasks, and their characters in text."""
MARKERS = "".join(SHAPES)
PROVEN = ("exact", "proven", "conditional")


@dataclass(frozen=True)
class Standing:
    """Results of a method over all its tasks; dictionaries are keyed by task (a data set, a size).

    `gaps` are accuracies on the forgotten clients minus those of Scratch, empty for methods exact by construction.
    `levels` counts requests by proven level.
    """

    label: str
    gaps: Mapping[str, float]
    speeds: Mapping[str, SpeedUp]
    levels: Mapping[str, int]
    note: str = ""

    @property
    def proves(self) -> bool:
        """True if every request that did not diverge was certified."""
        ended = [level for level in self.levels if level != "diverged"]
        return bool(ended) and all(level in PROVEN for level in ended)

    @property
    def medians(self) -> dict[str, float]:
        """Speed-up of each task on which some run reached the target."""
        return {name: speed.median for name, speed in self.speeds.items() if speed.median is not None}

    @property
    def median(self) -> float | None:
        """Median over the tasks."""
        return statistics.median(self.medians.values()) if self.medians else None

    @property
    def missed(self) -> tuple[int, int]:
        """Number of runs that missed the target, and of all runs."""
        return sum(speed.missed for speed in self.speeds.values()), sum(speed.runs for speed in self.speeds.values())

    @property
    def proof(self) -> str:
        """Proven level, in a word or two."""
        if not self.proves:
            return "nothing"
        ordered = [level for level in PROVEN if level in self.levels]
        return ordered[0] if len(ordered) == 1 else ", ".join(f"{self.levels[level]} {level}" for level in ordered)


@styled
def draw_overview(standings: Sequence[Standing]) -> Figure:
    """Draw a line for each method, certified methods first."""
    from matplotlib.figure import Figure

    if not standings:
        return nothing_yet("no request has been carried out yet")
    ordered = sorted(standings, key=lambda standing: (not standing.proves, -(standing.median or 0.0)))
    proving = sum(standing.proves for standing in ordered)
    places = [place + (0.7 if place >= proving else 0.0) for place in range(len(ordered))]
    figure = Figure(figsize=(9.6, 1.75 + 0.33 * len(ordered)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[1.0, 1.4])
    tasks = list(dict.fromkeys(name for standing in ordered for name in (*standing.gaps, *standing.speeds)))
    markers = {name: MARKERS[number % len(MARKERS)] for number, name in enumerate(tasks)}
    for axes in (left, right):
        only_ticks(axes, grid="x")
        axes.spines["left"].set_visible(False)
        axes.tick_params(labelsize=9.5)
        if 0 < proving < len(ordered):
            axes.axhline(proving - 0.15, color=INK, linewidth=0.8, linestyle=(0, (2, 2)))
    left.axvline(0.0, color=INK, linewidth=1.2, zorder=1)
    right.axvline(1.0, color=INK, linewidth=1.2, zorder=1)
    for place, standing in zip(places, ordered, strict=True):
        _gaps(left, place, standing, markers)
        _speeds(right, place, standing, markers)
    left.set_yticks(places, [standing.label for standing in ordered], fontsize=10)
    for label, standing in zip(left.get_yticklabels(), ordered, strict=True):
        label.set_color(INK)
        label.set_fontweight("bold" if standing.proves else "normal")
    left.set_ylim(places[-1] + 0.6, -0.6)
    left.set_title("What it still knows\n(points above Scratch)", loc="left", fontsize=10, fontweight="bold")
    right.set_title("Speed-up over Scratch\n(times fewer rounds)", loc="left", fontsize=10, fontweight="bold")
    _log_axis(right, ordered)
    right.text(
        1.02,
        1.012,
        "What is proven\n(requests)",
        transform=right.transAxes,
        fontsize=10,
        fontweight="bold",
        va="bottom",
    )
    for place, standing in zip(places, ordered, strict=True):
        right.text(1.02, place, standing.proof, transform=right.get_yaxis_transform(), va="center", fontsize=9.5,
                   color=INK if standing.proves else GREY)  # fmt: skip
    figure_title(figure, _message(ordered))
    footnote(
        figure,
        [
            "A mark for each task: median over seeds, of the runs that reached the target. Thick bar: median over the "
            "tasks, with its number. ✗\u00a03/15: three of fifteen runs did not reach the target. Above the dotted "
            "line: methods with a certificate.",
            ", ".join(f"{SHAPES[marker]} {name}" for name, marker in markers.items()) + ".",
        ],
    )
    return figure


def _gaps(axes: Axes, place: float, standing: Standing, markers: Mapping[str, str]) -> None:
    colour = BLUE if standing.proves else VERMILLION
    if not standing.gaps:
        words = "none, by construction" if standing.proves else "no run reached the target"
        axes.annotate(words, (0.0, place), xytext=(6, 0), textcoords="offset points", va="center", fontsize=9,
                      color=GREY, fontstyle="italic")  # fmt: skip
        return
    for name, gap in standing.gaps.items():
        axes.plot(
            100 * gap, place, markers[name], color=colour, markersize=5.5, alpha=0.65, markeredgewidth=0, zorder=4
        )
    _bar(axes, 100 * statistics.median(standing.gaps.values()), place)


def _speeds(axes: Axes, place: float, standing: Standing, markers: Mapping[str, str]) -> None:
    colour = BLUE if standing.proves else VERMILLION
    finite = {name: value for name, value in standing.medians.items() if math.isfinite(value)}
    for name, value in finite.items():
        axes.plot(value, place, markers[name], color=colour, markersize=5.5, alpha=0.65, mew=0, zorder=4)
    missed, runs = standing.missed
    words = f"✗ {missed}/{runs}" if missed else ""
    if standing.median is None:
        words, end = f"did not reach the target ({missed} of {runs})", 1.0
    elif math.isinf(standing.median):
        words, end = "no rounds at all", 1.0
    else:
        _bar(axes, standing.median, place)
        words, end = f"{times(standing.median)}x  {words}".rstrip(), max(finite.values())
    look: dict[str, Any] = {"color": INK} if standing.median else {"color": GREY, "fontstyle": "italic"}
    axes.annotate(
        words,
        (end, place),
        xytext=(8, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
        annotation_clip=False,
        **look,
    )


def _bar(axes: Axes, value: float, place: float) -> None:
    axes.plot([value, value], [place - 0.3, place + 0.3], color=INK, linewidth=2.6, zorder=5, solid_capstyle="butt")


def _log_axis(axes: Axes, standings: Sequence[Standing]) -> None:
    values = [value for standing in standings for value in standing.medians.values() if math.isfinite(value)]
    low, high = min([1.0, *values]), max([2.0, *values])
    axes.set_xscale("log")
    ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200) if low / 1.2 <= tick <= high * 1.1]
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(low / 1.25, high * (high / low) ** 0.42)  # space for the words at the right
    axes.axvspan(low / 1.25, 1.0, color=FAINT, alpha=0.4, zorder=0, linewidth=0)


def _message(standings: Sequence[Standing]) -> str:
    quick = [
        f"{standing.label} {times(standing.median)}x" if math.isfinite(standing.median) else f"{standing.label} at once"
        for standing in standings
        if standing.proves and not standing.missed[0] and standing.median is not None and standing.median > 1.1
    ]
    if not quick:
        return "Nothing that proves what it forgets was quicker than training again"
    return f"With a proof, and quicker than training again: {'; '.join(quick)}"
