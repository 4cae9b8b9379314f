"""Measured trajectories as figures and tables compare them: with their totals, each beside Scratch of the same seed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
METHOD_NAMES = {
    "scratch": "Scratch",
    "noisy_scratch": "Noisy Scratch",
    "closed_form": "Closed form",
    "sifu": "SIFU",
    "fed_eraser": "FedEraser",
    "fed_accum": "FedAccum",
    "fine_tuning": "Fine-Tuning",
    "last": "Last",
    "dp": "DP",
}
"""Methods as people know them, in the order figures show them."""


@dataclass(frozen=True)
class Line:
    """What a figure shows on one line: a method, with its preset where both were run."""

    method: str
    preset: str

    @property
    def label(self) -> str:
        """As it stands in a figure."""
        name = METHOD_NAMES.get(self.method, self.method)
        return f"{name} ({self.preset})" if self.method in ("sifu", "last") else name


@dataclass(frozen=True)
class Course:
    """One trajectory: its rows in the order of the requests, and what was varied.

    `world` is what it shares with the trajectory of Scratch that it is compared with.
    """

    rows: tuple[Row, ...]
    variant: Mapping[str, str]
    world: tuple[object, ...]

    @property
    def first(self) -> Row:
        """Its first row, which names it."""
        return self.rows[0]

    @property
    def line(self) -> Line:
        """The line of a figure it belongs to."""
        return Line(self.first["method"], self.first["preset"])

    @property
    def rounds(self) -> list[int]:
        """Rounds of each request, those of calibration included."""
        return [row["rounds"] + (row["extra_rounds"] or 0) for row in self.rows]

    @property
    def total(self) -> int:
        """Rounds of all requests."""
        return sum(self.rounds)

    @property
    def forgotten(self) -> float | None:
        """Accuracy on everyone forgotten, after the last request; None where training diverged."""
        value: float | None = self.rows[-1]["accuracy_forgotten_after"]
        return value

    @property
    def reached(self) -> bool:
        """Whether every request reached the target."""
        return all(row["reached"] for row in self.rows)


@dataclass(frozen=True)
class Results:
    """What an experiment measured, as figures need it.

    `titles` names the data sets in the order they are shown; `sigmas` holds the paper's noise for each.
    """

    title: str
    rows: Sequence[Row]
    courses: Sequence[Course]
    titles: Mapping[str, str]
    sigmas: Mapping[str, float]

    @property
    def datasets(self) -> list[str]:
        """The data sets in order."""
        return list(self.titles)

    @property
    def lines(self) -> list[Line]:
        """The lines of a figure."""
        return lines_of(self.courses)


def lines_of(courses: Sequence[Course]) -> list[Line]:
    """The lines of a figure: Scratch first, then what is compared with it; unknown methods last."""
    order = list(METHOD_NAMES)
    present = dict.fromkeys(course.line for course in courses)
    rank = {"paper": 0, "ours": 1}
    return sorted(
        present,
        key=lambda line: (
            order.index(line.method) if line.method in order else len(order),
            line.method,
            rank.get(line.preset, 2),
        ),
    )


def scratch_beside(courses: Sequence[Course]) -> Callable[[Course], Course | None]:
    """Finds Scratch of the same data set, seed and requests, whatever the noise and the time limit."""
    scratch = {
        course.world: course
        for course in courses
        if course.first["method"] == "scratch" and "limit" not in course.variant
    }
    return lambda course: scratch.get(course.world)


def fewer_than_scratch(courses: Sequence[Course], wanted: Callable[[Course], bool]) -> dict[str, float]:
    """Per data set, the mean over seeds of rounds / rounds of Scratch for the trajectories wanted."""
    beside = scratch_beside(courses)
    ratios: dict[str, list[float]] = {}
    for course in courses:
        scratch = beside(course) if wanted(course) else None
        if scratch is not None and scratch.total:
            ratios.setdefault(course.first["dataset"], []).append(course.total / scratch.total)
    return {name: statistics.fmean(values) for name, values in ratios.items()}


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, least and largest."""
    return statistics.fmean(values), min(values), max(values)


def gains_by_clients(
    courses: Sequence[Course], beside: Callable[[Course], Course | None], *, auto: bool
) -> dict[int, tuple[float, float, float]]:
    """Scratch's rounds over theirs at the sigma with the best mean, by number of clients: mean, least, largest.

    A sigma at which some seed missed the target is left out. `auto` looks at the automatic sigma alone.
    """
    ratios: dict[int, dict[str, list[float]]] = {}
    missed: set[tuple[int, str]] = set()
    for course in courses:
        sigma, clients, scratch = course.variant["sigma_scale"], int(course.variant["clients"]), beside(course)
        if (sigma == "auto" or not auto) and scratch is not None:
            ratios.setdefault(clients, {}).setdefault(sigma, []).append(scratch.total / max(course.total, 1))
            if not course.reached:
                missed.add((clients, sigma))
    result = {}
    for clients, by_sigma in ratios.items():
        good = [spread(values) for sigma, values in by_sigma.items() if (clients, sigma) not in missed]
        if good:
            result[clients] = max(good)
    return result


def shape_words(shape: str) -> str:
    """`10` and `1x10` in words.

    >>> shape_words("10"), shape_words("1x10")
    ('One request of 10 clients', '10 requests of one client each')
    """
    clients, _, count = shape.partition("x")
    if not count:
        return f"One request of {clients} clients"
    return f"{count} requests of {'one client' if clients == '1' else clients + ' clients'} each"
