"""An experiment's result in one small table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from sifu.experiments.reading import courses_of, datasets_of, title_of
from sifu.experiments.settings import Experiment
from sifu.experiments.table import Row
from sifu.plots.courses import Course, Line, lines_of, scratch_beside
from sifu.plots.group_cases import cases_of, first_trainings_of


def summary_rows(experiment: Experiment, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One line for each data set, method and variant (or each data set, for distances; each setting, for groups)."""
    if experiment.kind == "groups":
        return _groups(rows)
    return _distances(rows) if experiment.kind == "distance" else _requests(rows)


def _groups(rows: Sequence[Row]) -> list[dict[str, Any]]:
    first = {(line.task, line.groups, line.apart, line.stretch): line.difference for line in first_trainings_of(rows)}
    titles = {dataset: title_of(dataset) for dataset in datasets_of(rows)}
    lines = []
    for case in cases_of(rows):
        difference = first.get((case.task, case.groups, case.apart, case.stretch)) if case.leavers == 1 else None
        lines.append(
            {
                "task": case.task.label(titles),
                "groups": case.groups,
                "apart": case.apart,
                "merge": "mean" if case.stretch == 1.0 else f"moved x {case.stretch:g}",
                "leavers": case.leavers,
                "rounds": case.rounds,
                "Scratch": case.scratch,
                "share": case.share,
                "reached": f"{case.reached}/{len(case.requests)}",
                "first training (points)": None if difference is None else round(100 * difference, 1),
            }
        )
    return lines


def _requests(rows: Sequence[Row]) -> list[dict[str, Any]]:
    courses = courses_of(rows)
    beside = scratch_beside(courses)
    result = []
    for dataset in datasets_of(rows):
        here = [course for course in courses if course.first["dataset"] == dataset]
        for line in lines_of(here):
            for variant in dict.fromkeys(course.first["variant"] for course in here if course.line == line):
                matching = [course for course in here if course.line == line and course.first["variant"] == variant]
                result.append(_one(dataset, line, variant, matching, [beside(course) for course in matching]))
    empty = [key for key in ("variant", "test") if not any(row[key] for row in result)]
    return [{key: value for key, value in row.items() if key not in empty} for row in result]


def _one(
    dataset: str, line: Line, variant: str, courses: Sequence[Course], scratch: Sequence[Course | None]
) -> dict[str, Any]:
    ratios = [
        other.total / course.total for course, other in zip(courses, scratch, strict=True) if other and course.total
    ]
    levels = sorted({row["level"] for course in courses for row in course.rows})
    return {
        "data": title_of(dataset),
        "method": line.label,
        "variant": variant,
        "seeds": len(courses),
        "rounds": round(statistics.fmean(course.total for course in courses), 1),
        "Scratch / it": statistics.fmean(ratios) if ratios else None,
        "reached": f"{sum(course.reached for course in courses)}/{len(courses)}",
        "retain": _mean([course.rows[-1]["accuracy_retain_after"] for course in courses]),
        "test": _mean([course.rows[-1].get("accuracy_test") for course in courses]),
        "forgotten": _mean([course.forgotten for course in courses]),
        "level": ", ".join(levels),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return statistics.fmean(present) if present else None


def _distances(rows: Sequence[Row]) -> list[dict[str, Any]]:
    result = []
    for dataset in datasets_of(rows):
        measured = [row for row in rows if row["dataset"] == dataset and row["distance"]]
        if not measured:
            continue
        result.append(
            {
                "data": title_of(dataset),
                "settings": len({row["variant"] for row in measured}),
                "measurements": len(measured),
                "above Psi (round)": sum(row["distance"] > row["psi_round"] for row in measured),
                "above Psi (population)": sum(row["distance"] > row["psi_population"] for row in measured),
                "largest alpha/Psi (round)": largest_ratio(measured, "psi_round"),
                "largest alpha/Psi (population)": largest_ratio(measured, "psi_population"),
            }
        )
    return result


def largest_ratio(rows: Sequence[Row], psi: str) -> float:
    """The largest alpha / Psi; above 1 the bound was broken."""
    return max((row["distance"] / row[psi] for row in rows if row[psi]), default=math.nan)
