"""How far trainings came: where requests wait for a target, a reader must know which trainings never reached it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sifu.experiments.reading import datasets_of, title_of, trained_like
from sifu.experiments.settings import Experiment, shared_settings
from sifu.experiments.table import Row
from sifu.experiments.trajectory import TRAINING
from sifu.experiments.work import SHARED_TRAINING


@dataclass(frozen=True)
class TrainedTo:
    """The trainings of one data set under one preset: how many reached the target, after how many rounds."""

    dataset: str
    preset: str
    seeds: int
    reached: int
    rounds: tuple[int, ...]
    accuracies: tuple[float, ...]
    test: tuple[float, ...]
    target: float


def trainings_of(rows: Sequence[Row]) -> list[TrainedTo]:
    """The trainings that all methods of a preset start from, by data set and preset."""
    result = []
    shared = [row for row in rows if row["method"] == TRAINING and row["variant"] == f"kind={SHARED_TRAINING}"]
    for dataset in datasets_of(shared):
        for preset in shared_settings().presets:
            own = [row for row in shared if (row["dataset"], row["preset"]) == (dataset, preset)]
            if own:
                result.append(
                    TrainedTo(
                        dataset,
                        preset,
                        len(own),
                        sum(bool(row["reached"]) for row in own),
                        tuple(sorted(row["rounds"] for row in own)),
                        tuple(
                            sorted(
                                row["accuracy_retain_after"] for row in own if row["accuracy_retain_after"] is not None
                            )
                        ),
                        tuple(sorted(row["accuracy_test"] for row in own if row.get("accuracy_test") is not None)),
                        own[0]["target"],
                    )
                )
    return result


def _present(rows: Sequence[Row], column: str) -> tuple[float, ...]:
    return tuple(sorted(row[column] for row in rows if row.get(column) is not None))


def training_rows(experiment: Experiment, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A line for each data set and way of training; presets that train alike are one, the first.

    Only of experiments that leave out requests on trainings below the target: there the reader must know of them.
    """
    if not experiment.only_reached:
        return []
    lines = []
    for training in trainings_of(rows):
        if trained_like(training.preset) != training.preset:
            continue
        lines.append(
            {
                "data": title_of(training.dataset),
                "trained as": f"`{training.preset}`",
                "seeds": training.seeds,
                "target": training.target,
                "reached": f"{training.reached} of {training.seeds}",
                "rounds of training": _range(training.rounds, "{:,}"),
                "accuracy": _range(training.accuracies, "{:.3f}"),
                "test": statistics.median(training.test) if training.test else None,
            }
        )
    return lines


def _range(values: Sequence[float], pattern: str) -> str | None:
    """Least to largest.

    >>> _range([880, 991], "{:,}"), _range([10000, 10000], "{:,}"), _range([], "{}")
    ('880 to 991', '10,000', None)
    """
    if not values:
        return None
    low, high = pattern.format(min(values)), pattern.format(max(values))
    return low if low == high else f"{low} to {high}"
