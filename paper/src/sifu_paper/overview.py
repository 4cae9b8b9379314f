"""Results of every method over all tables, for the figure at the top of the page."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from sifu_paper.plots.courses import Course, Line, labels_of, matching_scratch
from sifu_paper.plots.group_cases import cases_by_rule
from sifu_paper.plots.overview import Standing
from sifu_paper.plots.speed import SpeedUp, same_seeds, speed_up, speed_up_of
from sifu_paper.reading import courses_of, datasets_of, honest_preset, letter_preset, title_of, trained_like
from sifu_paper.table import Row

LARGE = 1000
"""Number of clients from which SIFU on a convex task has a separate line."""


def standings(tables: Mapping[str, Sequence[Row]]) -> list[Standing]:
    """Return the methods of the paper's experiment, and exact methods and large federations from other experiments."""
    result = _of_requests(tables.get("sequential") or tables.get("watermark") or ())
    if not any(standing.label.startswith("Closed form") for standing in result):
        result += _closed_form(tables.get("exact", ()))
    return [*result, *_groups(tables.get("groups", ())), *large_federations(tables.get("scale", ()))]


def _of_requests(rows: Sequence[Row]) -> list[Standing]:
    shown = {letter_preset(rows), honest_preset(rows)}
    trainings = {trained_like(preset) for preset in shown}
    tasks = {
        title_of(dataset): same_seeds(
            [
                course
                for course in courses_of(rows)
                if course.first["dataset"] == dataset
                and (course.line.preset in shown or (course.line.method == "scratch" and course.training in trainings))
            ]
        ).courses
        for dataset in datasets_of(rows)
    }
    labels = labels_of([course for courses in tasks.values() for course in courses])
    return [
        _standing(label, line, tasks)
        for line, label in labels.items()
        # Last by our rules adds nothing to Last by the paper's.
        if line.preset in shown and not (line.method == "last" and line.honest)
    ]


def _standing(label: str, line: Line, tasks: Mapping[str, Sequence[Course]]) -> Standing:
    speeds: dict[str, SpeedUp] = {}
    gaps: dict[str, float] = {}
    levels: Counter[str] = Counter()
    for title, courses in tasks.items():
        runs = [course for course in courses if course.line == line]
        if not runs:
            continue
        speeds[title] = speed_up(runs, courses)
        levels.update(row["level"] for run in runs for row in run.rows)
        own = _gaps(runs, courses)
        if own and line.method != "scratch":
            gaps[title] = statistics.median(own)
    return Standing(label, gaps, speeds, dict(levels))


def _gaps(runs: Sequence[Course], courses: Sequence[Course]) -> list[float]:
    """Return the gaps to Scratch's accuracy on the forgotten if both reached the target."""
    scratch_of = matching_scratch(courses)
    gaps = []
    for run in runs:
        scratch = scratch_of(run)
        if scratch is None or not (run.reached and scratch.reached):
            continue
        if run.forgotten is not None and scratch.forgotten is not None:
            gaps.append(run.forgotten - scratch.forgotten)
    return gaps


def _closed_form(rows: Sequence[Row]) -> list[Standing]:
    """Return the standing of a closed-form head against a network; only rounds are compared,
    because the models differ.
    """
    courses = courses_of(rows)
    scratch_of = matching_scratch(courses)
    runs = [course for course in courses if course.first["method"] == "closed_form"]
    if not runs:
        return []
    speeds = {}
    for name in datasets_of(rows):
        own = [run for run in runs if run.first["dataset"] == name]
        at_once = sum(run.total == 0 for run in own)
        if own and at_once == len(own):  # zero rounds need no comparison
            speeds[title_of(name)] = SpeedUp((math.inf,) * at_once, at_once, 0)
        elif own:
            speeds[title_of(name)] = speed_up_of((run, scratch_of(run)) for run in own)
    levels = Counter(row["level"] for run in runs for row in run.rows)
    return [Standing("Closed form (a head)", {}, speeds, dict(levels))]


def _groups(rows: Sequence[Row]) -> list[Standing]:
    cases = [case for case in cases_by_rule(rows) if case.main]
    if not cases:
        return []
    speeds: dict[str, SpeedUp] = {}
    for case in cases:
        title = title_of(case.task.dataset)
        earlier = speeds.get(title, SpeedUp((), 0, 0))
        speed = case.speed
        speeds[title] = SpeedUp(
            (*earlier.ratios, *speed.ratios), earlier.runs + speed.runs, earlier.missed + speed.missed
        )
    return [Standing("Groups (ten)", {}, speeds, {"exact": sum(len(case.requests) for case in cases)})]


def large_federations(rows: Sequence[Row]) -> list[Standing]:
    """Return the standing of large federations: one request of ten clients, automatic sigma, every tried epsilon."""
    courses = [course for course in courses_of(rows) if int(course.variant["clients"]) >= LARGE]
    scratch_of = matching_scratch(courses)
    runs = [
        course
        for course in courses
        if course.first["method"] == "sifu"
        and course.variant["sigma_scale"] == "auto"
        and "x" not in course.variant["requests"]
        and scratch_of(course) is not None
    ]
    speeds: dict[str, SpeedUp] = {}
    gaps: dict[str, float] = {}
    for size in sorted({int(run.variant["clients"]) for run in runs}):
        here = [run for run in runs if int(run.variant["clients"]) == size]
        title = f"{size:,} clients"
        speeds[title] = speed_up_of((run, scratch_of(run)) for run in here)
        own = _gaps(here, courses)
        if own:
            gaps[title] = statistics.median(own)
    if not speeds:
        return []
    levels = Counter(row["level"] for run in runs for row in run.rows)
    return [Standing(f"SIFU (our rules, {LARGE:,}+ clients)", gaps, speeds, dict(levels))]
