"""The five sentences at the top of the page, computed from the tables."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from sifu_paper.comparisons import by_dataset, complete, mean_fewer, our_line, paper_line, reached_gaps, spread_words
from sifu_paper.group_statements import (
    by_rule,
    cases_everywhere,
    first_training_words,
    full_name,
    saves_half,
    trainings_of,
)
from sifu_paper.letter_settings import nearest_sentence
from sifu_paper.overview import LARGE, large_federations
from sifu_paper.plots.courses import METHOD_NAMES, Course, Line
from sifu_paper.plots.growing import Setting, settings_of
from sifu_paper.plots.speed import fewer_words, times
from sifu_paper.reading import before_first_round, courses_of
from sifu_paper.statements import PAPER_STATEMENTS, verdicts
from sifu_paper.table import Row
from sifu_paper.verdict import Tables

CERTIFIED = ("exact", "proven", "conditional")
GAINS = 1.1
"""A speed-up from which on a method is worth its trouble."""


def top_sentences(tables: Tables) -> list[str]:
    """The four questions a newcomer has, and the paper's claim; only those that the tables can answer."""
    sentences = (_forgets(tables), _costs(tables), _proven(tables), _choice(tables), _paper(tables))
    return [sentence for sentence in sentences if sentence]


def _sequential(tables: Tables) -> Sequence[Row]:
    return tables.get("sequential") or tables.get("watermark") or ()


def _forgets(tables: Tables) -> str:
    rows = _sequential(tables)
    parts = []
    gaps, _ = reached_gaps(rows, our_line(rows))
    if gaps:
        levels = {row["level"] for course in courses_of(rows) if course.line == our_line(rows) for row in course.rows}
        proof = (
            "that proves it" if levels <= {"exact", "proven"} else "whose certificate says what it proves and assumes"
        )
        parts.append(
            f"Yes, with a method {proof}: on the data of the forgotten, SIFU by our rules (honest weights, exact "
            f"noise) ends {_points(statistics.median(gaps))} Scratch (the model trained again without them; median of "
            f"{len(gaps)} runs, {100 * min(gaps):+.0f} to {100 * max(gaps):+.0f})"
        )
    kept, _ = reached_gaps(rows, paper_line("fine_tuning", rows))
    if kept:
        parts.append(f"Fine-Tuning, which only trains on, stays {_points(statistics.median(kept))} it")
    return f"**Does it forget?** {'; '.join(parts)}." if parts else ""


def _points(gap: float) -> str:
    """A difference of accuracies in words.

    >>> _points(0.371), _points(0.001), _points(-0.02)
    ('37 points above', '0 points from', '2 points below')
    """
    points = round(100 * gap)
    return f"{abs(points)} point{'s' * (abs(points) != 1)} {'above' if points > 0 else 'below' if points else 'from'}"


def _costs(tables: Tables) -> str:
    parts = []
    rows = _sequential(tables)
    speeds = complete(by_dataset(rows, our_line(rows)))
    mean = mean_fewer(speeds)
    if mean is not None:
        runs = [course for course in courses_of(rows) if course.line == our_line(rows)]
        before = sum(before_first_round(row) for run in runs for row in run.rows)
        requests = sum(len(run.rows) for run in runs)
        medians = [speed.median for speed in speeds.values() if speed.median is not None]
        parts.append(
            f"in the paper's federations of 100 clients SIFU by our rules takes {fewer_words(mean)} than Scratch "
            f"(speed-up {spread_words(medians)} over {len(speeds)} data sets), since in {before} of {requests} "
            "requests it had to go back to before the clients' first round"
        )
    large = _large_settings(tables)
    if large:
        medians = [setting.automatic.median for setting in large if setting.automatic and setting.automatic.median]
        epsilons = sorted({float(setting.epsilon) for setting in large})
        draws = sum(setting.automatic.runs for setting in large if setting.automatic)
        over_sizes = [standing.median for standing in large_federations(tables["scale"]) if standing.median]
        parts.append(
            f"on a convex task with {LARGE:,} clients and more its speed-up is {times(over_sizes[0])}x (median over "
            f"the sizes of each one's median run, as in the figure; {spread_words(medians)} over {len(large)} "
            f"settings at epsilon {epsilons[0]:g} to {epsilons[-1]:g}, {draws} draws of the noise, which vary)"
        )
    cases = [case for case in by_rule(tables.get("groups", ())) if case.speed.median]
    if cases:
        medians = [case.speed.median for case in cases if case.speed.median]
        tasks = cases_everywhere(tables.get("groups", ()))
        failing = [full_name(case.task) for case in tasks if not saves_half(case)]
        parts.append(
            f"groups, which are for networks, reach {spread_words(medians)} on {len(cases)} tasks with ten groups "
            f"where everyone takes part, below 2x or not on every seed as accurate as Scratch on {len(failing)} of all "
            f"{len(tasks)} tasks" + (f" ({'; '.join(failing)})" if failing else "")
        )
    closed = [course for course in _exact_courses(tables) if course.first["method"] == "closed_form"]
    if closed:
        total = sum(course.total for course in closed)
        count = sum(len(course.rows) for course in closed)
        rounds = "no rounds" if total == 0 else f"{total} rounds"
        parts.append(f"a head in closed form took {rounds} for {count} requests")
    return f"**What does it cost?** {_capital('; '.join(parts))}." if parts else ""


def _exact_courses(tables: Tables) -> list[Course]:
    return courses_of([*tables.get("exact", ()), *_sequential(tables)])


def _large_settings(tables: Tables) -> list[Setting]:
    """One request of several clients, in the largest federations, at the automatic sigma."""
    return [
        setting
        for setting in settings_of(courses_of(tables.get("scale", ())))
        if setting.clients >= LARGE and setting.automatic and setting.automatic.median and "x" not in setting.requests
    ]


def _proven(tables: Tables) -> str:
    levels: Counter[str] = Counter()
    nothing: set[str] = set()
    forced, fresh = True, 0
    for row in (row for rows in tables.values() for row in rows if row.get("level") and row["request"]):
        method, line = str(row["method"]), Line(str(row["method"]), str(row["preset"]))
        if method == "sifu" and line.honest:
            levels[row["level"]] += 1
            forced = forced and (row["level"] != "diverged" or "sigma_factor=" in row["variant"])
        elif method in ("sifu", "last"):
            fresh += row["level"] == "exact"
        elif row["level"] == "none":
            nothing.add(METHOD_NAMES.get(method, method))
    certified = sum(levels[level] for level in CERTIFIED)
    if not certified:
        return ""
    text = (
        f"of {sum(levels.values()):,} requests by SIFU under our rules {levels['exact']:,} are exact (the model never "
        f"saw the clients), {levels['proven']:,} proven (epsilon and delta from measured premises) and "
        f"{levels['conditional']:,} conditional (on a premise that is assumed)"
    )
    if levels["diverged"]:
        text += f", {levels['diverged']:,} diverged"
        text += " under a sigma that an experiment forced on them" if forced else ""
    if nothing:
        text += f"; the paper's own rules and {', '.join(sorted(nothing))} prove nothing"
        text += (
            f" (under a sigma that sent them back to before the clients' first round the paper's rules are exact, too: "
            f"{fresh:,} request{'s' * (fresh != 1)})"
            if fresh
            else ""
        )
    return f"**What is proven?** {_capital(text)}."


def _choice(tables: Tables) -> str:
    parts = []
    closed = [course for course in _exact_courses(tables) if course.first["method"] == "closed_form"]
    if closed:
        parts.append("a head on fixed features: **closed form**, exact and without rounds")
    large = _large_settings(tables)
    gaining = [setting for setting in large if setting.automatic and (setting.automatic.median or 0) >= GAINS]
    if gaining:
        least = min(setting.clients for setting in gaining)
        parts.append(f"a convex model and {least:,} clients or more: **SIFU**, proven")
    cases = by_rule(tables.get("groups", ()))
    if any((case.speed.median or 0) >= GAINS for case in cases):
        tasks = cases_everywhere(tables.get("groups", ()))
        trainings = trainings_of(tasks, tables.get("groups", ()))
        price = f"; the first training {first_training_words(trainings)}" if trainings else ""
        where = "" if all(map(saves_half, tasks)) else ", where a group by itself sees enough of the task"
        parts.append(f"a network: **groups**, exact{where}{price}")
    rest = by_dataset(_sequential(tables), our_line(_sequential(tables)))
    medians = [speed.median for speed in rest.values() if speed.median is not None]
    if medians:
        best = max(medians)
        parts.append(
            f"everything else: **Scratch**; SIFU by our rules and the automatic sigma gains at most {best:.2f}x there"
            if best < 1.5
            else f"everything else: **SIFU** by our rules, up to {best:.2f}x"
        )
    return f"**Which method should I take?** {_capital('; '.join(parts))}." if parts else ""


def _paper(tables: Tables) -> str:
    judged = [verdict.same for _, verdict in verdicts(tables, PAPER_STATEMENTS) if verdict.same is not None]
    if not judged:
        return ""
    text = f"{sum(judged)} of its {len(judged)} statements that these tables can judge came out the same"
    near = nearest_sentence(tables)
    text += f"; {near}" if near else ""
    return f"**Does the paper hold?** {_capital(text)}."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
