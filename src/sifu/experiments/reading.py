"""The rows of a results table as trajectories and data sets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sifu.experiments.settings import Experiment, shared_settings
from sifu.experiments.table import Row
from sifu.experiments.trajectory import TRAINING
from sifu.experiments.work import NOISE_AXES, parse_variant, variant_text
from sifu.plots.courses import Course, Results


def courses_of(rows: Iterable[Row]) -> list[Course]:
    """The trajectories of a table, in its order; half finished ones and the rows of training are left out."""
    grouped: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        if row["method"] != TRAINING and row["request"]:
            key = tuple(row[name] for name in ("dataset", "seed", "preset", "method", "variant"))
            grouped.setdefault(key, []).append(row)
    courses = [_course(group) for group in grouped.values()]
    longest: dict[tuple[object, ...], int] = {}
    for course in courses:
        longest[_requests_of(course)] = max(longest.get(_requests_of(course), 0), len(course.rows))
    return [course for course in courses if len(course.rows) == longest[_requests_of(course)]]


def _course(rows: Sequence[Row]) -> Course:
    ordered = tuple(sorted(rows, key=lambda row: row["request"]))
    first = ordered[0]
    variant = parse_variant(first["variant"])
    shared = {name: value for name, value in variant.items() if name not in (*NOISE_AXES, "limit")}
    return Course(ordered, variant, (first["dataset"], first["seed"], variant_text(shared)))


def _requests_of(course: Course) -> tuple[object, ...]:
    return course.first["dataset"], course.variant.get("requests")


def results_of(experiment: Experiment, rows: Sequence[Row]) -> Results:
    """Everything the figure of an experiment is drawn from."""
    datasets = datasets_of(rows)
    return Results(
        experiment.title,
        rows,
        courses_of(rows),
        {dataset: title_of(dataset) for dataset in datasets},
        {dataset: shared_settings().dataset(dataset).sigma for dataset in datasets},
    )


def datasets_of(rows: Iterable[Row]) -> list[str]:
    """Data sets in the order of the paper's table."""
    present = {row["dataset"] for row in rows}
    return [name for name in shared_settings().datasets if name in present]


def title_of(dataset: str) -> str:
    """A data set as people know it."""
    return shared_settings().dataset(dataset).title
