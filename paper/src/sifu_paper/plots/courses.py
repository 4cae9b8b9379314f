"""Measured trajectories for figures and tables: their totals, each with Scratch of the same seed."""

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
    "groups": "Groups",
    "sifu": "SIFU",
    "fed_eraser": "FedEraser",
    "fed_accum": "FedAccum",
    "fine_tuning": "Fine-Tuning",
    "last": "Last",
    "dp": "DP",
    "not_forgotten": "Not forgotten",
}
"""Names of methods for people, in the order of figures."""
ALWAYS_WITH_PRESET = ("sifu", "last")
"""Methods that are run under both presets if there are two."""
PLAIN_PRESETS = ("", "paper", "ours")
"""Presets under which every other method is the same, so that its name omits them."""
PAPER_RULES = ("paper", "authors", "authors_unclipped")
"""Presets that count by the paper's rules; presets that end in `ours` count by ours."""


@dataclass(frozen=True)
class Line:
    """Line of a figure: a method, with its preset if both were run."""

    method: str
    preset: str

    @property
    def label(self) -> str:
        """Label with its preset, for comparisons of several kinds of training (see `labels_of`)."""
        name = METHOD_NAMES.get(self.method, self.method.replace("_", " ").capitalize())
        return f"{name} ({self.preset})" if self._named_by_preset else name

    @property
    def honest(self) -> bool:
        """True if it was run by our rules, in a preset that ends in `ours`."""
        return self.preset.endswith("ours")

    @property
    def by_rules(self) -> str:
        """Label with the rules instead of the preset, for runs with the same training.

        >>> Line("sifu", "authors_unclipped_ours").by_rules, Line("scratch", "authors_unclipped").by_rules
        ('SIFU (our rules)', 'Scratch')

        """
        if not (self.honest or self.preset in PAPER_RULES):
            return self.label  # the rules of another project's preset are unknown
        name = METHOD_NAMES.get(self.method, self.method.replace("_", " ").capitalize())
        return f"{name} ({self.rules})" if self.method in ALWAYS_WITH_PRESET else name

    @property
    def rules(self) -> str:
        """Name of the rules by which it was counted."""
        return "our rules" if self.honest else "paper's rules" if self.preset in PAPER_RULES else self.preset

    @property
    def _named_by_preset(self) -> bool:
        return self.preset not in PLAIN_PRESETS or (self.method in ALWAYS_WITH_PRESET and bool(self.preset))


@dataclass(frozen=True)
class Course:
    """One trajectory: its rows in the order of the requests, and its varied settings.

    `counterfactual` is the key that it shares with its trajectory of Scratch, and `training` names the training in it:
    presets that differ only in their promises share one.
    """

    rows: tuple[Row, ...]
    variant: Mapping[str, str]
    counterfactual: tuple[object, ...]
    training: str = ""

    @property
    def first(self) -> Row:
        """First row, which identifies the trajectory."""
        return self.rows[0]

    @property
    def line(self) -> Line:
        """Line of a figure that it belongs to."""
        return Line(self.first["method"], self.first["preset"])

    @property
    def rounds(self) -> list[int]:
        """Rounds of each request, including calibration."""
        return [row["rounds"] + (row["extra_rounds"] or 0) for row in self.rows]

    @property
    def total(self) -> int:
        """Rounds of all requests."""
        return sum(self.rounds)

    @property
    def forgotten(self) -> float | None:
        """Accuracy on all forgotten clients after the last request; None if training diverged."""
        value: float | None = self.rows[-1]["accuracy_forgotten_after"]
        return value

    @property
    def reached(self) -> bool:
        """True if every request reached the target."""
        return all(row["reached"] for row in self.rows)


@dataclass(frozen=True)
class Results:
    """Results of an experiment for figures.

    `titles` names the data sets in their order; `sigmas` maps each to the paper's noise.
    """

    title: str
    rows: Sequence[Row]
    courses: Sequence[Course]
    titles: Mapping[str, str]
    sigmas: Mapping[str, float]

    @property
    def datasets(self) -> list[str]:
        """Data sets in order."""
        return list(self.titles)

    @property
    def lines(self) -> list[Line]:
        """Lines of a figure."""
        return lines_of(self.courses)


def lines_of(courses: Sequence[Course]) -> list[Line]:
    """Return the lines of a figure: Scratch first, then the methods compared with it, unknown ones last."""
    order = list(METHOD_NAMES)
    present = dict.fromkeys(course.line for course in courses)
    return sorted(
        present,
        key=lambda line: (
            order.index(line.method) if line.method in order else len(order),
            line.method,
            line.honest,  # other rules first, then ours
            line.preset,
        ),
    )


def trained_alike(courses: Sequence[Course]) -> bool:
    """Return whether all runs have the same training."""
    return len({course.training for course in courses}) <= 1


def labels_of(courses: Sequence[Course]) -> dict[Line, str]:
    """Return the label of each line in tables, sentences and figures: with presets only if training differs."""
    alike = trained_alike(courses)
    return {line: line.by_rules if alike else line.label for line in lines_of(courses)}


def rules_or_presets(courses: Sequence[Course]) -> Callable[[Line], str]:
    """Return a function that names a line's rules if all runs have the same training, else its preset."""
    alike = trained_alike(courses)
    return lambda line: line.rules if alike else line.preset


def matching_scratch(courses: Sequence[Course]) -> Callable[[Course], Course | None]:
    """Return a function that finds Scratch with the same data set, seed, training and requests, at any noise and time
    limit.
    """
    scratch = {
        course.counterfactual: course
        for course in courses
        if course.first["method"] == "scratch" and "limit" not in course.variant
    }
    return lambda course: scratch.get(course.counterfactual)


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean, the smallest and the largest value."""
    return statistics.fmean(values), min(values), max(values)


def shape_words(shape: str) -> str:
    """Return a description of a request shape such as `10` or `1x10`.

    >>> shape_words("10"), shape_words("1x10")
    ('One request of 10 clients', '10 requests of one client each')

    """
    clients, _, count = shape.partition("x")
    if not count:
        return f"One request of {clients} clients"
    return f"{count} requests of {'one client' if clients == '1' else clients + ' clients'} each"
