"""The paper on rounds, forgetting and the bound, held against the tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from sifu_paper.comparisons import (
    by_dataset,
    complete,
    fewer_by_dataset,
    mean_fewer,
    paper_line,
    reached_gaps,
    signed,
    titles,
)
from sifu_paper.plots.courses import METHOD_NAMES, Course, Line
from sifu_paper.plots.speed import fewer_words, speed_up, times
from sifu_paper.reading import courses_of, datasets_of, title_of
from sifu_paper.summary import largest_ratio
from sifu_paper.table import Row
from sifu_paper.trained_to import below_target
from sifu_paper.verdict import NEAR, Statement, Verdict

HARDER = ("cifar10", "cifar100")
PAPER_SAVES = (0.35, 0.65)
"""Shares of rounds saved that are called the paper's 52 %."""


def _sifu_halves(rows: Sequence[Row]) -> Verdict | None:
    return _halves(rows, paper_line("sifu", rows))


def _halves_under(preset: str) -> Callable[[Sequence[Row]], Verdict | None]:
    """The same claim of one preset; where training never reaches the target it does not hold either."""

    def check(rows: Sequence[Row]) -> Verdict | None:
        verdict, untrained = _halves(rows, Line("sifu", preset)), below_target(rows, preset)
        if verdict is None or not untrained:
            return verdict
        why = f"training ended below the target on {', '.join(untrained)}"
        return replace(verdict, same=False, why="; ".join(filter(None, [verdict.why, why])))

    return check


def _halves(rows: Sequence[Row], line: Line) -> Verdict | None:
    speeds = by_dataset(rows, line)
    if not speeds:
        return None
    sure = complete(speeds)
    mean = mean_fewer(sure)
    low, high = PAPER_SAVES
    same = len(sure) == len(speeds) and mean is not None and low <= mean <= high
    where = "" if len(sure) == len(speeds) else f" on the data sets where every run reached the target ({titles(sure)})"
    average = f"{fewer_words(mean)} on average{where}" if mean is not None else "no data set where every run reached it"
    missed = sum(speed.missed for speed in speeds.values())
    why = ""
    if missed:
        runs = sum(speed.runs for speed in speeds.values())
        where = titles([name for name, speed in speeds.items() if speed.missed])
        why = f"{missed} of {runs} runs ({where}) did not reach the target after the paper's noise"
    return Verdict(f"{average}: {fewer_by_dataset(speeds)}", same, why)


def _eraser_costs_more(rows: Sequence[Row]) -> Verdict | None:
    speeds = by_dataset(rows, paper_line("fed_eraser", rows))
    mean = mean_fewer(complete(speeds))
    if mean is None:
        return None
    why = "" if mean < 0.0 else "the paper does not state the interval between kept rounds; see updates_every"
    return Verdict(f"{fewer_words(mean)} on average, calibration counted: {fewer_by_dataset(speeds)}", mean < 0.0, why)


def _do_not_forget(rows: Sequence[Row]) -> Verdict | None:
    parts, forgets = [], []
    for method in ("fine_tuning", "fed_accum"):
        gaps, runs = reached_gaps(rows, paper_line(method, rows))
        if gaps:
            gap = statistics.median(gaps)
            parts.append(f"{METHOD_NAMES[method]} {signed(100 * gap)} points ({len(gaps)} of {runs} runs)")
            if gap <= NEAR:
                forgets.append(METHOD_NAMES[method])
    if not parts:
        return None
    text = "accuracy on the forgotten less Scratch's, median over the runs that reached the target: "
    why = f"where it reached the target, {' and '.join(forgets)} forgot" if forgets else ""
    return Verdict(text + "; ".join(parts), not forgets, why)


def _fail_on_harder(rows: Sequence[Row]) -> Verdict | None:
    parts, failed, missing = [], [], []
    for method in ("last", "dp"):
        line, name = paper_line(method, rows), METHOD_NAMES[method]
        courses = [course for course in courses_of(rows) if course.line == line and course.first["dataset"] in HARDER]
        if courses:
            missed = sum(not course.reached for course in courses)
            where = [title_of(dataset) for dataset in HARDER if any(run.first["dataset"] == dataset for run in courses)]
            parts.append(f"{name} missed the target in {missed} of {len(courses)} runs on {', '.join(where)}")
            failed.append(2 * missed >= len(courses))
        else:
            missing.append(name)
    if not parts:
        return None
    return Verdict("; ".join(parts) + "".join(f"; {name} not measured there" for name in missing), all(failed))


def _sigma_ends(rows: Sequence[Row]) -> Verdict | None:
    courses = courses_of(rows)
    sifu = [
        course for course in courses if course.line == paper_line("sifu", rows) and "sigma_factor" in course.variant
    ]
    if not sifu:
        return None
    factors = [float(course.variant["sigma_factor"]) for course in sifu]
    lowest = [course for course in sifu if float(course.variant["sigma_factor"]) == min(factors)]
    speed = speed_up(lowest, courses)
    if speed.fewer is None:
        return None
    text = f"lowest sigma: {fewer_words(speed.fewer)} than Scratch, {speed.text()}, {speed.runs} runs"
    same = abs(speed.fewer) <= NEAR
    high = []
    for course in sifu:
        last = _last_beside(courses, course)
        if float(course.variant["sigma_factor"]) == max(factors) and last is not None:
            # A request that diverged has no node; two that diverged have ended alike.
            high.append(course.rows[0]["node"] == last.rows[0]["node"])
    if high:
        text += (
            "; highest sigma: at the first request back to the same model as Last, or diverged like it, in "
            f"{sum(high)} of {len(high)} runs"
        )
        same = same and 2 * sum(high) >= len(high)
    return Verdict(text, same)


def _last_beside(courses: Sequence[Course], course: Course) -> Course | None:
    for other in courses:
        place = [other.first[key] == course.first[key] for key in ("dataset", "seed", "preset")]
        if other.first["method"] == "last" and all(place):
            return other
    return None


def _bound_holds(accounting: str) -> Callable[[Sequence[Row]], Verdict | None]:
    def check(rows: Sequence[Row]) -> Verdict | None:
        measured = [row for row in rows if row["distance"] and row[accounting]]
        if not measured:
            return None
        broken = sum(row["distance"] > row[accounting] for row in measured)
        text = (
            f"alpha, the true distance, is above Psi in {broken:,} of {len(measured):,} measurements on "
            f"{len(datasets_of(measured))} data sets, at most {times(largest_ratio(measured, accounting))} times Psi"
        )
        why = ""
        if broken:
            why = (
                "a client's share of the whole federation is used although only some clients were averaged"
                if accounting == "psi_population"
                else "B = 1 is an assumption: with momentum, or rates above 2/beta, a round may expand distances"
            )
        return Verdict(text, broken == 0, why)

    return check


ROUND_STATEMENTS = (
    Statement("SIFU takes 52 % fewer rounds than Scratch on average", "sequential", _sifu_halves),
    Statement("FedEraser takes 12 % more rounds than Scratch on average", "sequential", _eraser_costs_more),
    Statement("Fine-Tuning and FedAccum do not forget", "sequential", _do_not_forget),
    Statement("DP and Last do not reach the target on the harder data sets", "sequential", _fail_on_harder),
    Statement("with low sigma SIFU is Scratch, with high sigma it is Last", "sigma", _sigma_ends),
)
LETTER_STATEMENTS = (
    Statement(
        "trained to the letter (the authors' networks, scaling, clipping to 0.5), does SIFU take 52 % fewer rounds?",
        "letter",
        _halves_under("authors"),
        ours=True,
    ),
    Statement(
        "the same without clipping, as in the authors' script for CIFAR-10",
        "letter",
        _halves_under("authors_unclipped"),
        ours=True,
    ),
)
BOUND_STATEMENTS = (
    Statement(
        "Psi >= alpha with B = 1 (population weights, as in the authors' code)",
        "psi-alpha",
        _bound_holds("psi_population"),
    ),
    Statement("Psi >= alpha with B = 1 (weights of the round)", "psi-alpha", _bound_holds("psi_round")),
)
