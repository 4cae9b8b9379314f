"""Runs of an experiment, and their speed-up: Scratch's rounds over a method's, on the same data set and seed.

All requests of a run count together, calibration included, and only seeds on which both reached the target at every
request. "52 % fewer rounds" is 1 - 1/speed-up.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from sifu_paper.experiment import parse_variant
from sifu_paper.methods import METHODS
from sifu_paper.settings import PRESETS, dataset_title
from sifu_paper.table import Row

PLAIN = ("paper", "ours")
"""Presets with the training of the paper's table, which labels leave out."""


@dataclass(frozen=True)
class Line:
    """A method under a preset, as figures and tables show it."""

    method: str
    preset: str

    @property
    def ours(self) -> bool:
        """True if influence is counted by our rules."""
        return self.preset.endswith("ours")

    @property
    def label(self) -> str:
        """Name for people.

        >>> Line("sifu", "paper").label, Line("scratch", "paper").label, Line("scratch", "authors").label
        ("SIFU (paper's rules)", 'Scratch', 'Scratch (authors)')
        """
        method = METHODS[self.method]
        if self.preset not in PLAIN:
            return f"{method.title} ({self.preset})"
        rules = "our rules" if self.ours else "paper's rules"
        return f"{method.title} ({rules})" if method.by_rules else method.title


@dataclass(frozen=True)
class Course:
    """The requests of one method on one data set and seed, in order."""

    line: Line
    rows: tuple[Row, ...]

    @property
    def rounds(self) -> int:
        """Rounds of all requests, calibration included."""
        return sum(row["rounds"] + row["extra_rounds"] for row in self.rows)

    @property
    def reached(self) -> bool:
        """True if every request reached the target."""
        return all(row["reached"] for row in self.rows)

    @property
    def last(self) -> Row:
        """Row of the last request."""
        return self.rows[-1]

    @property
    def variant(self) -> dict[str, float]:
        """Values of the grid."""
        return parse_variant(self.last["variant"])

    @property
    def counterfactual(self) -> tuple[object, ...]:
        """Key that it shares with the run of Scratch that it is compared with."""
        training = PRESETS[self.line.preset].training
        return self.last["dataset"], self.last["seed"], training, self.variant.get("set")


def courses_of(rows: Sequence[Row]) -> list[Course]:
    """Return the runs in a table, in the order of the methods."""
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        if row["number"] and row["method"] in METHODS:
            key = tuple(row[name] for name in ("dataset", "seed", "preset", "method", "variant"))
            found.setdefault(key, []).append(row)
    courses = [Course(Line(own[0]["method"], own[0]["preset"]), tuple(own)) for own in found.values()]
    methods, presets = list(METHODS), list(PRESETS)
    return sorted(courses, key=lambda one: (methods.index(one.line.method), presets.index(one.line.preset)))


@dataclass(frozen=True)
class SpeedUp:
    """Speed-ups of the seeds on which both reached the target, and the number of runs that missed it."""

    ratios: tuple[float, ...]
    missed: int

    def text(self) -> str:
        """Return the median with the smallest and the largest.

        >>> SpeedUp((2.0, 1.5, 3.0), 0).text(), SpeedUp((), 3).text()
        ('2x (1.5 to 3)', '3 missed the target')
        """
        missed = f"{self.missed} missed the target" if self.missed else ""
        if not self.ratios:
            return missed
        median, low, high = statistics.median(self.ratios), min(self.ratios), max(self.ratios)
        return f"{median:.3g}x ({low:.3g} to {high:.3g})" + (f", {missed}" if missed else "")


def speed_up(mine: Sequence[Course], everyone: Sequence[Course]) -> SpeedUp:
    """Return the speed-up of some runs over the matching runs of Scratch without a limit of time."""
    scratch = {
        one.counterfactual: one for one in everyone if one.line.method == "scratch" and "limit" not in one.variant
    }
    pairs = [(one, scratch[one.counterfactual]) for one in mine if one.counterfactual in scratch]
    ratios = (other.rounds / max(one.rounds, 1) for one, other in pairs if one.reached and other.reached)
    return SpeedUp(tuple(ratios), sum(not one.reached for one, _ in pairs))


def summary(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Return a line of text cells for each data set, method and variant, as medians over seeds."""
    courses, lines = courses_of(rows), []
    for dataset in dict.fromkeys(one.last["dataset"] for one in courses):
        here = [one for one in courses if one.last["dataset"] == dataset]
        for line, variant in dict.fromkeys((one.line, one.last["variant"]) for one in here):
            mine = [one for one in here if (one.line, one.last["variant"]) == (line, variant)]
            lines.append(
                {
                    "data": dataset_title(dataset),
                    "method": line.label,
                    "variant": variant,
                    "seeds": str(len(mine)),
                    "rounds": f"{statistics.median(one.rounds for one in mine):g}",
                    "speed-up": speed_up(mine, here).text(),
                    "remaining": _median(mine, "retain"),
                    "forgotten": _median(mine, "forgotten"),
                    "test": _median(mine, "test"),
                }
            )
    return lines


def _median(courses: Sequence[Course], column: str) -> str:
    values = [one.last[column] for one in courses if one.last[column] is not None]
    return f"{statistics.median(values):.3f}" if values else "-"
