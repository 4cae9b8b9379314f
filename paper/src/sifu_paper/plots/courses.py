"""Measured trajectories as figures and tables compare them: with their totals, each with Scratch of the same seed."""

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
"""Methods as people know them, in the order figures show them."""
ALWAYS_WITH_PRESET = ("sifu", "last")
"""Methods that are run under both presets wherever there are two."""
PLAIN_PRESETS = ("", "paper", "ours")
"""Presets under which every other method is the same, so that its name needs none."""
PAPER_RULES = ("paper", "authors", "authors_unclipped")
"""Presets that count by the paper's rules; those that end in `ours` count by ours."""


@dataclass(frozen=True)
class Line:
    """One line of a figure: a method, with its preset where both were run."""

    method: str
    preset: str

    @property
    def label(self) -> str:
        """Label with its preset, for comparisons of several ways of training (see `labels_of`)."""
        name = METHOD_NAMES.get(self.method, self.method.replace("_", " ").capitalize())
        return f"{name} ({self.preset})" if self._named_by_preset else name

    @property
    def honest(self) -> bool:
        """True if it was run by our rules: presets that end in `ours`."""
        return self.preset.endswith("ours")

    @property
    def by_rules(self) -> str:
        """Label with the rules instead of the preset, for runs that are all trained alike.

        >>> Line("sifu", "authors_unclipped_ours").by_rules, Line("scratch", "authors_unclipped").by_rules
        ('SIFU (our rules)', 'Scratch')
        """
        if not (self.honest or self.preset in PAPER_RULES):
            return self.label  # whose rules another project's preset follows is not known here
        name = METHOD_NAMES.get(self.method, self.method.replace("_", " ").capitalize())
        return f"{name} ({self.rules})" if self.method in ALWAYS_WITH_PRESET else name

    @property
    def rules(self) -> str:
        """Name of the rules it was counted by."""
        return "our rules" if self.honest else "paper's rules" if self.preset in PAPER_RULES else self.preset

    @property
    def _named_by_preset(self) -> bool:
        return self.preset not in PLAIN_PRESETS or (self.method in ALWAYS_WITH_PRESET and bool(self.preset))


@dataclass(frozen=True)
class Course:
    """One trajectory: its rows in the order of the requests, and what was varied.

    `counterfactual` is what it shares with the trajectory of Scratch that it is compared with, and `training` names
    the way of training in it: presets that only promise otherwise share one.
    """

    rows: tuple[Row, ...]
    variant: Mapping[str, str]
    counterfactual: tuple[object, ...]
    training: str = ""

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
        """True if every request reached the target."""
        return all(row["reached"] for row in self.rows)


@dataclass(frozen=True)
class Results:
    """Results of an experiment, as figures need them.

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
    """Return the lines of a figure: Scratch first, then what is compared with it; unknown methods last."""
    order = list(METHOD_NAMES)
    present = dict.fromkeys(course.line for course in courses)
    return sorted(
        present,
        key=lambda line: (
            order.index(line.method) if line.method in order else len(order),
            line.method,
            line.honest,  # other people's rules first, then ours
            line.preset,
        ),
    )


def trained_alike(courses: Sequence[Course]) -> bool:
    """Return whether all runs were trained in the same way."""
    return len({course.training for course in courses}) <= 1


def labels_of(courses: Sequence[Course]) -> dict[Line, str]:
    """Return the label of each line in tables, sentences and figures: by preset only if training differs."""
    alike = trained_alike(courses)
    return {line: line.by_rules if alike else line.label for line in lines_of(courses)}


def rules_or_presets(courses: Sequence[Course]) -> Callable[[Line], str]:
    """Return the words that distinguish lines of one method: rules if all runs are trained alike, else presets."""
    alike = trained_alike(courses)
    return lambda line: line.rules if alike else line.preset


def matching_scratch(courses: Sequence[Course]) -> Callable[[Course], Course | None]:
    """Return a finder of Scratch with the same data set, seed, training and requests, for any noise and time limit."""
    scratch = {
        course.counterfactual: course
        for course in courses
        if course.first["method"] == "scratch" and "limit" not in course.variant
    }
    return lambda course: scratch.get(course.counterfactual)


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean, the least and the largest value."""
    return statistics.fmean(values), min(values), max(values)


def shape_words(shape: str) -> str:
    """Return the words for `10` and `1x10`.

    >>> shape_words("10"), shape_words("1x10")
    ('One request of 10 clients', '10 requests of one client each')
    """
    clients, _, count = shape.partition("x")
    if not count:
        return f"One request of {clients} clients"
    return f"{count} requests of {'one client' if clients == '1' else clients + ' clients'} each"
