"""Final accuracies of trainings, for readers of experiments that skip requests on trainings below the target."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sifu_paper.plots.courses import METHOD_NAMES
from sifu_paper.reading import datasets_of, title_of, trained_like
from sifu_paper.settings import Experiment, shared_settings
from sifu_paper.table import Row
from sifu_paper.trajectory import TRAINING
from sifu_paper.work import SHARED_TRAINING

KINDS = (SHARED_TRAINING, "dp")
"""Kinds of training with separate rounds; a training that keeps updates equals `shared` bit for bit."""


@dataclass(frozen=True)
class TrainedTo:
    """Trainings of one data set and kind under one preset and limit of rounds, with the number that
    reached the target.
    """

    dataset: str
    preset: str
    kind: str
    seeds: int
    reached: int
    rounds: tuple[int, ...]
    accuracies: tuple[float, ...]
    test: tuple[float, ...]
    target: float


def trainings_of(rows: Sequence[Row]) -> list[TrainedTo]:
    """Return the trainings that methods start from, by data set, preset and kind; most methods use `shared`."""
    result = []
    trainings = [row for row in rows if row["method"] == TRAINING]
    for dataset, preset, kind in itertools.product(datasets_of(trainings), shared_settings().presets, KINDS):
        place = (dataset, preset, f"kind={kind}")
        there = [row for row in trainings if (row["dataset"], row["preset"], row["variant"]) == place]
        for own in _by_limit(there):
            result.append(
                TrainedTo(
                    dataset,
                    preset,
                    kind,
                    len(own),
                    sum(bool(row["reached"]) for row in own),
                    tuple(sorted(row["rounds"] for row in own)),
                    _present(own, "accuracy_retain_after"),
                    _present(own, "accuracy_test"),
                    own[0]["target"],
                )
            )
    return result


def _by_limit(rows: Sequence[Row]) -> list[list[Row]]:
    """Group trainings by their limit of rounds, the highest limit first.

    A training that ended below its target ended at its limit. A training that reached it belongs to the lowest limit
    that is not below its rounds, or to the highest limit.
    """
    limits = sorted({row["rounds"] for row in rows if not row["reached"]})
    groups: dict[int, list[Row]] = {}
    for row in rows:
        fits = [limit for limit in limits if limit >= row["rounds"]] or limits[-1:] or [0]
        groups.setdefault(fits[0], []).append(row)
    return [groups[limit] for limit in sorted(groups, reverse=True)]


def _present(rows: Sequence[Row], column: str) -> tuple[float, ...]:
    return tuple(sorted(row[column] for row in rows if row.get(column) is not None))


def below_target(rows: Sequence[Row], preset: str) -> list[str]:
    """Return descriptions of data sets with shared trainings below the target: how many seeds, at which limit."""
    missed: dict[str, list[str]] = {}
    for training in trainings_of(rows):
        if (training.preset, training.kind) == (preset, SHARED_TRAINING) and training.reached < training.seeds:
            count = (
                f"{training.seeds - training.reached} of {training.seeds} seeds after {max(training.rounds):,} rounds"
            )
            missed.setdefault(title_of(training.dataset), []).append(count)
    return [f"{title} ({', '.join(counts)})" for title, counts in missed.items()]


def training_rows(experiment: Experiment, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a line for each data set and kind of training; presets with the same training appear as the first of them.

    The result is empty unless the experiment skips requests on trainings below the target.
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
                "trained as": f"`{training.preset}`" + _kind_words(training.kind),
                "seeds": training.seeds,
                "target": training.target,
                "reached": f"{training.reached} of {training.seeds}",
                "rounds of training": _range(training.rounds, "{:,}"),
                "accuracy": _range(training.accuracies, "{:.3f}"),
                "test": statistics.median(training.test) if training.test else None,
            }
        )
    return lines


def _kind_words(kind: str) -> str:
    return "" if kind == SHARED_TRAINING else f" for {METHOD_NAMES[kind]}"


def _range(values: Sequence[float], pattern: str) -> str | None:
    """Return the range of values in words.

    >>> _range([880, 991], "{:,}"), _range([10000, 10000], "{:,}"), _range([], "{}")
    ('880 to 991', '10,000', None)

    """
    if not values:
        return None
    low, high = pattern.format(min(values)), pattern.format(max(values))
    return low if low == high else f"{low} to {high}"
