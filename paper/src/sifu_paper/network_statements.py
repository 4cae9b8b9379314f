"""The paper on networks, with watermarks and with little time, held against the tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from sifu_paper.comparisons import CONVEX, paper_line
from sifu_paper.plots.courses import METHOD_NAMES, Course, Line, scratch_beside
from sifu_paper.plots.speed import speed_up
from sifu_paper.reading import courses_of, datasets_of, letter_preset, title_of
from sifu_paper.table import Row
from sifu_paper.verdict import NEAR, Statement, Verdict

NOT_COMPARED = ("fine_tuning", "noisy_scratch")
"""Fine-Tuning does not forget; Noisy Scratch is our control and not in the paper's comparison."""
Run = tuple[int, str]
"""A seed and a limit of rounds."""
Gap = tuple[float, float]
ALSO_NOT = ("closed_form", "groups")
"""Exact methods of ours: they train otherwise, and the paper does not have them."""


def _best_on_networks(rows: Sequence[Row]) -> Verdict | None:
    """Figure 2: on each network, does anything else that reaches the target and forgets the mark take fewer rounds?"""
    beaten, by_control, compared = [], [], []
    sifu, control, preset = paper_line("sifu", rows), paper_line("noisy_scratch", rows), letter_preset(rows)
    courses = courses_of(rows)
    for dataset in (name for name in datasets_of(rows) if name not in CONVEX):
        here = [course for course in courses if course.first["dataset"] == dataset]
        medians: dict[Line, float] = {}
        for line in dict.fromkeys(course.line for course in here):
            speed = speed_up([course for course in here if course.line == line], here)
            if speed.complete and speed.median is not None:
                medians[line] = speed.median
        if not any(course.line == sifu for course in here):
            continue
        compared.append(dataset)
        own = medians.get(sifu)
        quicker = [line for line, median in medians.items() if own is None or median > own]
        rivals = [
            METHOD_NAMES.get(line.method, line.method)
            for line in quicker
            if line.preset == preset and line.method not in (*NOT_COMPARED, *ALSO_NOT, "sifu")
        ]
        if rivals:
            beaten.append(f"{', '.join(rivals)} on {title_of(dataset)}")
        if control in quicker:
            by_control.append(title_of(dataset))
    if not compared:
        return None
    text = f"fewest rounds of all that forget on {len(compared) - len(beaten)} of {len(compared)} networks"
    why = f"Noisy Scratch, which the paper does not have, is quicker on {', '.join(by_control)}" if by_control else ""
    return Verdict(text + (f"; quicker: {', '.join(beaten)}" if beaten else ""), not beaten, why)


def _trade_off(rows: Sequence[Row]) -> Verdict | None:
    """Figure 1: among the methods that forget, is SIFU nearest to a full retraining on the remaining clients?"""
    preset, sifu, control = letter_preset(rows), paper_line("sifu", rows), paper_line("noisy_scratch", rows)
    courses = courses_of(rows)
    parts, best = [], []
    for dataset in (name for name in datasets_of(rows) if name not in CONVEX):
        here = [course for course in courses if course.first["dataset"] == dataset and course.line.preset == preset]
        gaps = _gaps_to_full(here)
        own = {run: gap for run, gap in gaps.get(sifu, {}).items() if gap is not None}
        if not own:
            continue
        # Others are held against SIFU on the runs in which it has an accuracy; who has none in one of them is left out.
        beside = {line: [by_run.get(run) for run in own] for line, by_run in gaps.items()}
        rivals = {
            line: statistics.fmean(gap[0] for gap in shared if gap)
            for line, shared in beside.items()
            if line not in (control, sifu)
            and None not in shared
            and statistics.fmean(gap[1] for gap in shared if gap) <= NEAR
        }
        below, runs = statistics.fmean(gap for gap, _ in own.values()), len(gaps[sifu])
        text = f"on {title_of(dataset)} SIFU {100 * below:.0f}"
        if len(own) < runs:
            text += f" (in {len(own)} of {runs} runs; the others diverged)"
        if rivals:
            nearest = min(rivals, key=lambda line: rivals[line])
            other = METHOD_NAMES.get(nearest.method, nearest.method)
            where = " in the same runs" if len(own) < runs else ""
            text += f", the nearest other that forgets, {other}, {100 * rivals[nearest]:.0f}{where}"
        forgets = statistics.fmean(forgot for _, forgot in own.values()) <= NEAR
        best.append(len(own) == runs and forgets and all(below < gap for gap in rivals.values()))
        parts.append(text)
    if not parts:
        return None
    why = "" if all(best) else "see its figure"
    text = "points below a full retraining on the clients that stay, by the paper's rules, mean over the limits: "
    return Verdict(text + "; ".join(parts), all(best), why)


def _gaps_to_full(courses: Sequence[Course]) -> dict[Line, dict[Run, Gap | None]]:
    """Remaining clients: points below a full retraining; forgotten: points above it. None for a run that diverged."""
    beside = scratch_beside(courses)
    gaps: dict[Line, dict[Run, Gap | None]] = {}
    for course in courses:
        full = beside(course)
        if "limit" not in course.variant or full is None:
            continue
        after, forgot = course.first["accuracy_retain_after"], course.first["accuracy_forget_after"]
        diverged = after is None or forgot is None
        gap = (
            None
            if diverged
            else (full.first["accuracy_retain_after"] - after, forgot - full.first["accuracy_forget_after"])
        )
        gaps.setdefault(course.line, {})[course.first["seed"], course.variant["limit"]] = gap
    return gaps


NETWORK_STATEMENTS = (
    Statement(
        "in limited time SIFU alone keeps accuracy on the rest and forgets, on every network",
        "time-limited",
        _trade_off,
    ),
    Statement("with watermarks SIFU outperforms every other method on every network", "watermark", _best_on_networks),
)
