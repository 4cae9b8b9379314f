"""Comparison of methods with Scratch by data set, over all seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from sifu_paper.plots.courses import Line, matching_scratch
from sifu_paper.plots.speed import SpeedUp, speed_up
from sifu_paper.reading import courses_of, datasets_of, honest_preset, letter_preset, title_of
from sifu_paper.table import Row


def paper_line(method: str, rows: Sequence[Row]) -> Line:
    """Return a method's line by the paper's rules, in the table's preset closest to the authors' code."""
    return Line(method, letter_preset(rows))


def our_line(rows: Sequence[Row]) -> Line:
    """Return SIFU's line by our rules, trained like the paper's line if that was run."""
    return Line("sifu", honest_preset(rows))


def by_dataset(rows: Sequence[Row], line: Line) -> dict[str, SpeedUp]:
    """Return the speed-up of a line on each data set, over all seeds that it shares with Scratch."""
    courses = courses_of(rows)
    speeds = {}
    for dataset in datasets_of(rows):
        here = [course for course in courses if course.first["dataset"] == dataset]
        speed = speed_up([course for course in here if course.line == line], here)
        if speed.runs:
            speeds[dataset] = speed
    return speeds


def complete(speeds: Mapping[str, SpeedUp]) -> dict[str, SpeedUp]:
    """Return the data sets on which every run reached the target, because only there an average is meaningful."""
    return {name: speed for name, speed in speeds.items() if speed.complete and speed.median is not None}


def mean_fewer(speeds: Mapping[str, SpeedUp]) -> float | None:
    """Return the mean over data sets of the saved rounds (1 - 1/speed-up), or None without any."""
    shares = [share for speed in speeds.values() if (share := speed.fewer) is not None]
    return statistics.fmean(shares) if shares else None


def titles(names: Sequence[str] | Mapping[str, object]) -> str:
    """Return the titles of data sets, joined by commas."""
    return ", ".join(map(title_of, names))


def reached_gaps(rows: Sequence[Row], line: Line) -> tuple[list[float], int]:
    """Return the gaps to Scratch's accuracy on the forgotten if both reached the target, and the number of runs."""
    courses = courses_of(rows)
    scratch_of = matching_scratch(courses)
    runs = [course for course in courses if course.line == line]
    gaps = []
    for course in runs:
        scratch = scratch_of(course)
        if scratch is None or not (course.reached and scratch.reached):
            continue
        if course.forgotten is not None and scratch.forgotten is not None:
            gaps.append(course.forgotten - scratch.forgotten)
    return gaps, len(runs)


def signed(points: float) -> str:
    """Return a difference in whole points, with its sign.

    >>> signed(31.6), signed(-0.2), signed(-2.0)
    ('+32', '0', '-2')
    """
    whole = round(points)
    return f"{whole:+d}" if whole else "0"
