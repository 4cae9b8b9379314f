"""Results as figures and tables need them: trajectories with their totals, each beside Scratch of the same seed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from sifu.experiments.settings import shared_settings
from sifu.experiments.table import Row
from sifu.experiments.trajectory import TRAINING
from sifu.experiments.work import NOISE_AXES, parse_variant, variant_text

NAMES = {
    "scratch": "Scratch",
    "noisy_scratch": "Noisy Scratch",
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
        name = NAMES.get(self.method, self.method)
        return f"{name} ({self.preset})" if self.method in ("sifu", "last") else name


@dataclass(frozen=True)
class Course:
    """One trajectory: its rows in the order of the requests."""

    rows: tuple[Row, ...]

    @property
    def first(self) -> Row:
        """Its first row, which names it."""
        return self.rows[0]

    @property
    def line(self) -> Line:
        """The line of a figure it belongs to."""
        return Line(self.first["method"], self.first["preset"])

    @cached_property
    def variant(self) -> dict[str, str]:
        """What was varied."""
        return parse_variant(self.first["variant"])

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


def courses_of(rows: Iterable[Row]) -> list[Course]:
    """The trajectories of a table, in its order; half finished ones and the rows of training are left out."""
    grouped: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        if row["method"] != TRAINING and row["request"]:
            key = tuple(row[name] for name in ("dataset", "seed", "preset", "method", "variant"))
            grouped.setdefault(key, []).append(row)
    made = [Course(tuple(sorted(found, key=lambda row: row["request"]))) for found in grouped.values()]
    longest: dict[tuple[object, ...], int] = {}
    for one in made:
        key = (one.first["dataset"], one.variant.get("requests"))
        longest[key] = max(longest.get(key, 0), len(one.rows))
    return [one for one in made if len(one.rows) == longest[(one.first["dataset"], one.variant.get("requests"))]]


def lines_of(courses: Sequence[Course]) -> list[Line]:
    """The lines of a figure: Scratch first, then what is compared with it; unknown methods last."""
    order = list(NAMES)
    found = dict.fromkeys(one.line for one in courses)
    rank = {"paper": 0, "ours": 1}
    return sorted(
        found,
        key=lambda line: (
            order.index(line.method) if line.method in order else len(order),
            line.method,
            rank.get(line.preset, 2),
        ),
    )


def datasets_of(rows: Iterable[Row]) -> list[str]:
    """Data sets in the order of the paper's table."""
    found = {row["dataset"] for row in rows}
    return [name for name in shared_settings().datasets if name in found]


def title_of(dataset: str) -> str:
    """A data set as people know it."""
    return shared_settings().dataset(dataset).title


def scratch_beside(courses: Sequence[Course]) -> Callable[[Course], Course | None]:
    """Finds Scratch of the same data set, seed and requests, whatever the noise and the time limit."""

    def key(one: Course) -> tuple[object, ...]:
        rest = {name: value for name, value in one.variant.items() if name not in (*NOISE_AXES, "limit")}
        return one.first["dataset"], one.first["seed"], variant_text(rest)

    known = {key(one): one for one in courses if one.first["method"] == "scratch" and "limit" not in one.variant}
    return lambda one: known.get(key(one))


def fewer_than_scratch(courses: Sequence[Course], wanted: Callable[[Course], bool]) -> dict[str, float]:
    """Per data set, the mean over seeds of rounds / rounds of Scratch for the trajectories wanted."""
    beside = scratch_beside(courses)
    ratios: dict[str, list[float]] = {}
    for one in courses:
        scratch = beside(one) if wanted(one) else None
        if scratch is not None and scratch.total:
            ratios.setdefault(one.first["dataset"], []).append(one.total / scratch.total)
    return {name: statistics.fmean(values) for name, values in ratios.items()}


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, least and largest."""
    return statistics.fmean(values), min(values), max(values)


def gains_by_clients(
    found: Sequence[Course], beside: Callable[[Course], Course | None], *, auto: bool
) -> dict[int, tuple[float, float, float]]:
    """Scratch's rounds over theirs at the sigma with the best mean, by number of clients: mean, least, largest.

    A sigma at which some seed missed the target is left out. `auto` looks at the automatic sigma alone.
    """
    ratios: dict[int, dict[str, list[float]]] = {}
    missed: set[tuple[int, str]] = set()
    for one in found:
        sigma, clients, scratch = one.variant["sigma_scale"], int(one.variant["clients"]), beside(one)
        if (sigma == "auto" or not auto) and scratch is not None:
            ratios.setdefault(clients, {}).setdefault(sigma, []).append(scratch.total / max(one.total, 1))
            if not one.reached:
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
