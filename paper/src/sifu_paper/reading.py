"""Trajectories and data sets from the rows of a results table."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from sifu_paper.plots.courses import Course, Results
from sifu_paper.settings import Experiment, shared_settings
from sifu_paper.table import Row
from sifu_paper.trajectory import TRAINING
from sifu_paper.work import NOISE_AXES, parse_variant, variant_text


def courses_of(rows: Iterable[Row]) -> list[Course]:
    """Return the trajectories of a table in its order, without unfinished ones and rows of training."""
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
    training = trained_like(first["preset"])
    counterfactual = (first["dataset"], first["seed"], training, variant_text(shared))
    return Course(ordered, variant, counterfactual, training)


@cache
def trained_like(preset: str) -> str:
    """Return the first preset with the same training as this one: they differ only in their promises (`privacy`).

    Such presets share their runs of Scratch. An unknown preset has its own.

    >>> trained_like("ours")
    'paper'
    """
    presets = shared_settings().presets
    if preset not in presets:
        return preset
    return next(name for name in presets if _training(presets[name]) == _training(presets[preset]))


def _training(preset: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in preset.items() if key != "privacy"}


def letter_preset(rows: Iterable[Row]) -> str:
    """Return the table's preset closest to the authors' code: with the paper's promises and the most overrides.

    The presets that follow the authors' code override more of our settings than `paper` does.
    """
    return max(population_presets(rows), key=_settings_laid_over, default="paper")


def population_presets(rows: Iterable[Row]) -> list[str]:
    """Return the presets of a table with the paper's promises."""
    return _presets_by(rows, "population")


def honest_presets(rows: Iterable[Row]) -> list[str]:
    """Return the presets of a table by our rules (weights of the round)."""
    return _presets_by(rows, "round")


def _presets_by(rows: Iterable[Row], accounting: str) -> list[str]:
    present, presets = {row["preset"] for row in rows}, shared_settings().presets
    return [name for name in presets if name in present and _accounting(presets[name]) == accounting]


def honest_preset(rows: Iterable[Row]) -> str:
    """Return the preset by our rules (weights of the round), with the training of `letter_preset` if there is one."""
    rows = list(rows)
    ours = honest_presets(rows)
    letter = trained_like(letter_preset(rows))
    return next((name for name in ours if trained_like(name) == letter), next(iter(ours), "ours"))


def _settings_laid_over(preset: str) -> int:
    settings = shared_settings()
    training = settings.trainings.get(str(settings.presets[preset].get("training")))
    return 0 if training is None else _count(training.spec) + _count(training.datasets)


def _accounting(preset: Mapping[str, Any]) -> object:
    return preset.get("privacy", {}).get("accounting")


def _count(table: Mapping[str, object]) -> int:
    return sum(_count(value) if isinstance(value, Mapping) else 1 for value in table.values())


def _requests_of(course: Course) -> tuple[object, ...]:
    return course.first["dataset"], course.variant.get("requests")


def without(rows: Sequence[Row], methods: Collection[str]) -> list[Row]:
    """Return the rows of other methods."""
    return [row for row in rows if row["method"] not in methods]


def results_of(experiment: Experiment, rows: Sequence[Row]) -> Results:
    """Return the data of an experiment's figure; methods in `set_apart` appear only in a table."""
    rows = without(rows, experiment.set_apart) if experiment.set_apart else rows
    datasets = datasets_of(rows)
    return Results(
        experiment.title,
        rows,
        courses_of(rows),
        {dataset: title_of(dataset) for dataset in datasets},
        {dataset: shared_settings().dataset(dataset).sigma for dataset in datasets},
    )


def datasets_of(rows: Iterable[Row]) -> list[str]:
    """Return the data sets in the order of the paper's table."""
    present = {row["dataset"] for row in rows}
    return [name for name in shared_settings().datasets if name in present]


def title_of(dataset: str) -> str:
    """Return the title of a data set for people."""
    return shared_settings().dataset(dataset).title


def before_first_round(row: Mapping[str, Any]) -> bool:
    """Return whether a request of SIFU went back to a model that none of its clients had influenced.

    Its certificate may still be `conditional`: with a fixed number of participants its clients took others' slots.
    """
    return bool(row["level"] == "exact" or row.get("psi") == 0.0)
