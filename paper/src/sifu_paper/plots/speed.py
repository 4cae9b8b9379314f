"""Definition of speed-up: Scratch's rounds over a method's on the same seed, if both reached the target."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sifu_paper.plots.courses import Course, Line, matching_scratch

FEWEST_SEEDS = 3
"""A line that shares fewer seeds than this with the others is left out, so that the others keep theirs."""


@dataclass(frozen=True)
class SpeedUp:
    """Speed-up over Scratch: the ratio of rounds, seed by seed.

    `ratios` are Scratch's rounds over the method's (all requests of a run together, including calibration), for the
    seeds on which both reached the target at every request; infinite if the method took no round. `runs` counts the
    method's runs with a matching run of Scratch, and `missed` those of them that missed the target.
    """

    ratios: tuple[float, ...]
    runs: int
    missed: int

    @property
    def median(self) -> float | None:
        """Median over seeds; None if no pair of runs reached the target."""
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def complete(self) -> bool:
        """True if every run reached the target."""
        return self.runs > 0 and self.missed == 0

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key: quickest first, and methods that missed the target in at least half of their runs last."""
        usable = self.median is not None and 2 * self.missed < self.runs
        return not usable, -(self.median or 0.0)

    def text(self) -> str:
        """Return the speed-up as text for the table.

        >>> SpeedUp((2.0, 1.5, 3.0), 3, 0).text()
        '2x (1.5 to 3)'
        >>> SpeedUp((1.3, 0.95, math.inf), 3, 0).text()
        '1.3x (0.95 to no rounds)'
        >>> SpeedUp((2.0,), 3, 2).text()
        '2x, did not reach the target (2 of 3)'
        >>> SpeedUp((), 3, 3).text(), SpeedUp((math.inf, math.inf), 2, 0).text(), SpeedUp((), 0, 0).text()
        ('did not reach the target (3 of 3)', 'no rounds', '-')

        """
        missed = f"did not reach the target ({self.missed} of {self.runs})" if self.missed else ""
        if self.median is None:
            return missed or "-"
        shown = "no rounds" if math.isinf(self.median) else f"{times(self.median)}x"
        if times(min(self.ratios)) != times(max(self.ratios)):
            most = "no rounds" if math.isinf(max(self.ratios)) else times(max(self.ratios))
            shown += f" ({times(min(self.ratios))} to {most})"
        return f"{shown}, {missed}" if missed else shown

    @property
    def fewer(self) -> float | None:
        """Rounds saved as a share of Scratch's: 1 - 1/median; negative if the method takes more.

        >>> SpeedUp((2.0,), 1, 0).fewer
        0.5

        """
        return None if self.median is None else 1.0 - 1.0 / self.median


def times(ratio: float) -> str:
    """Return a ratio as formatted text.

    >>> times(1572.3), times(30.25), times(1.234), times(0.07), times(2.0)
    ('1,572', '30.2', '1.23', '0.07', '2')

    """
    if math.isinf(ratio):
        return "infinitely many "
    if ratio >= 100:
        return f"{ratio:,.0f}"
    return f"{ratio:.{1 if ratio >= 10 else 2}f}".rstrip("0").rstrip(".")


def fewer_words(share: float) -> str:
    """Return the rounds saved as a share of Scratch's, in words.

    >>> fewer_words(0.52), fewer_words(-0.12), fewer_words(0.0)
    ('52 % fewer rounds', '12 % more rounds', 'as many rounds')
    """
    percents = round(100 * share)
    return "as many rounds" if percents == 0 else f"{abs(percents)} % {'fewer' if percents > 0 else 'more'} rounds"


def speed_up(courses: Iterable[Course], everyone: Sequence[Course]) -> SpeedUp:
    """Return the speed-up of some runs over Scratch's among `everyone`."""
    scratch_of = matching_scratch(everyone)
    return speed_up_of((course, scratch_of(course)) for course in courses)


def speed_up_of(pairs: Iterable[tuple[Course, Course | None]]) -> SpeedUp:
    """Return the speed-up of runs over the matching runs of Scratch."""
    compared = [(course, scratch) for course, scratch in pairs if scratch is not None]
    ratios = [
        scratch.total / course.total if course.total else math.inf
        for course, scratch in compared
        if course.reached and scratch.reached
    ]
    return SpeedUp(tuple(ratios), len(compared), sum(not course.reached for course, _ in compared))


@dataclass(frozen=True)
class SameSeeds:
    """Runs of one table and data set on the seeds that all lines of a training share.

    `seeds` is keyed by training; `left_out` lists the lines with too few seeds.
    """

    courses: tuple[Course, ...]
    seeds: dict[str, tuple[int, ...]]
    left_out: tuple[Line, ...]


def same_seeds(courses: Sequence[Course]) -> SameSeeds:
    """Keep the seeds on which every line was run; leave out and name lines that would leave fewer than three.

    Each kind of training has its own Scratch, and so its own seeds. Scratch, the reference, is never left out.
    """
    kept: list[Course] = []
    seeds: dict[str, tuple[int, ...]] = {}
    left_out: list[Line] = []
    for training in dict.fromkeys(course.training for course in courses):
        here = [course for course in courses if course.training == training]
        common, lacking = _common_seeds(here)
        seeds[training] = tuple(sorted(common))
        left_out += dict.fromkeys(run.line for run in here if run.line.label in lacking)
        kept += [run for run in here if run.first["seed"] in common and run.line.label not in lacking]
    return SameSeeds(tuple(kept), seeds, tuple(left_out))


def _common_seeds(courses: Sequence[Course]) -> tuple[set[int], list[str]]:
    seeds_of: dict[str, set[int]] = {}
    for course in courses:
        seeds_of.setdefault(course.line.label, set()).add(course.first["seed"])
    of_scratch = {course.first["seed"] for course in courses if course.line.method == "scratch"}
    common: set[int] = of_scratch or set().union(*seeds_of.values())
    lacking = []
    for label, seeds in sorted(seeds_of.items(), key=lambda item: -len(item[1])):
        if len(common & seeds) >= min(FEWEST_SEEDS, len(common)):
            common &= seeds
        else:
            lacking.append(label)
    return common, lacking
