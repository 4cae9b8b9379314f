"""Two sentences on each experiment, computed from its table: what a reader should take from the figure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from sifu_paper.comparisons import (
    by_dataset,
    complete,
    mean_fewer,
    our_line,
    paper_line,
    reached_gaps,
    signed,
    spread_words,
    titles,
)
from sifu_paper.group_statements import (
    by_rule,
    cases_everywhere,
    first_training_words,
    full_name,
    saves_half,
    task_name,
    trainings_of,
)
from sifu_paper.metric_summary import largest_of
from sifu_paper.network_statements import NETWORK_STATEMENTS
from sifu_paper.plots.courses import METHOD_NAMES, Course, Line, labels_of, lines_of, shape_words
from sifu_paper.plots.growing import settings_of
from sifu_paper.plots.speed import fewer_words, speed_up, times
from sifu_paper.reading import before_first_round, courses_of, datasets_of, honest_presets, population_presets, title_of
from sifu_paper.round_statements import BOUND_STATEMENTS
from sifu_paper.settings import Experiment
from sifu_paper.table import Row
from sifu_paper.verdict import Verdict

Sentences = list[str]
Reader = Callable[[Sequence[Row]], Sentences]
NOT_FORGOTTEN = "not_forgotten"
FAR_ABOVE = 0.05
"""Accuracy on the forgotten that is higher than Scratch's by more than this is said to be higher."""


def reading_of(experiment: Experiment, rows: Sequence[Row]) -> str:
    """At most two sentences."""
    reader = READERS.get(experiment.draw, _rounds)
    return " ".join(reader(rows)[:2])


def _rounds(rows: Sequence[Row]) -> Sentences:
    return [sentence for sentence in (_sifu_against_scratch(rows), _who_remembers(rows)) if sentence]


def _sifu_against_scratch(rows: Sequence[Row]) -> str:
    parts = []
    several = len(population_presets(rows)) > 1
    for line in (Line("sifu", preset) for preset in (*population_presets(rows), *honest_presets(rows))):
        words = "by ours" if line.honest else "by the paper's rules"
        words += f" (`{line.preset}`)" if several else ""
        speeds = by_dataset(rows, line)
        sure = complete(speeds)
        mean = mean_fewer(sure)
        if mean is not None:
            where = "" if len(sure) == len(speeds) else f" on {titles(sure)}, where it always reached the target"
            parts.append(f"{words} {fewer_words(mean)} on average{where}")
        elif speeds:
            parts.append(f"{words} it did not always reach the target on any data set")
    return f"SIFU takes, against Scratch on the same seeds, {_listed(parts)}." if parts else ""


def _listed(parts: Sequence[str]) -> str:
    return ", and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _who_remembers(rows: Sequence[Row]) -> str:
    keep: list[str] = []
    forget: list[str] = []
    for line, label in labels_of(courses_of(rows)).items():
        gaps, _ = reached_gaps(rows, line)
        if gaps and line.method != "scratch":
            gap = statistics.median(gaps)
            shown = f"{label} {signed(100 * gap)}"
            if gap > FAR_ABOVE:
                keep.append(shown)
            else:
                forget.append(shown + _higher_somewhere(rows, line))
    text = "Accuracy on the forgotten is near Scratch's (within 5 points above it) with " + ", ".join(forget)
    if not forget:
        return ""
    higher = f"; it is higher with {', '.join(keep)}" if keep else ""
    return f"{text}{higher} (points, median over the runs that reached the target)."


def _higher_somewhere(rows: Sequence[Row], line: Line) -> str:
    """Data sets that a median over all of them would hide: where the forgotten are remembered all the same."""
    parts = []
    for dataset in datasets_of(rows):
        gaps, _ = reached_gaps([row for row in rows if row["dataset"] == dataset], line)
        if gaps and statistics.median(gaps) > FAR_ABOVE:
            parts.append(f"{title_of(dataset)} {100 * statistics.median(gaps):+.0f}")
    return f" (but {', '.join(parts)})" if parts else ""


def _watermark(rows: Sequence[Row]) -> Sentences:
    marks: dict[str, float] = {}
    courses = courses_of(rows)
    for line, label in labels_of(courses).items():
        own = [
            mark
            for course in courses
            if course.line == line and course.reached
            for row in course.rows
            if (mark := row.get("mark_after")) is not None
        ]
        if own:
            marks[label] = statistics.median(own)
    ordered = sorted(marks, key=lambda label: marks[label])
    shown = ", ".join(f"{label} {100 * marks[label]:+.1f}" for label in ordered)
    price = _measured(NETWORK_STATEMENTS[1].check(rows), "SIFU by the paper's rules takes the ")
    sentences = [price or _sifu_against_scratch(rows)]
    if shown:
        sentences.append(f"After the request the mark is worth this many points of accuracy (median): {shown}.")
    return [sentence for sentence in sentences if sentence]


def _limited(rows: Sequence[Row]) -> Sentences:
    verdict = NETWORK_STATEMENTS[0].check(rows)
    own = [course for course in courses_of(rows) if "limit" in course.variant and course.line == our_line(rows)]
    sentences = [f"{verdict.measured[0].upper()}{verdict.measured[1:]}." if verdict else ""]
    before = sum(before_first_round(course.first) for course in own)
    if own:
        like_scratch = ", and so does nearly what Scratch does in the same time" if 2 * before > len(own) else ""
        sentences.append(
            f"By our rules a request went back to before the clients' first round in {before} of {len(own)} runs"
            f"{like_scratch}."
        )
    return [sentence for sentence in sentences if sentence]


def _sigma(rows: Sequence[Row]) -> Sentences:
    courses = courses_of(rows)
    at_table, best = [], []
    for dataset in dict.fromkeys(course.first["dataset"] for course in courses):
        here = [course for course in courses if course.first["dataset"] == dataset]
        own = [course for course in here if course.line == paper_line("sifu", rows)]
        factors = sorted(
            {course.variant["sigma_factor"] for course in own if "sigma_factor" in course.variant}, key=float
        )
        if not factors:
            continue
        speeds = {
            factor: speed_up([course for course in own if course.variant.get("sigma_factor") == factor], here)
            for factor in factors
        }
        quickest = min(factors, key=lambda factor: speeds[factor].rank)
        if "1" in speeds:
            at_table.append(f"{title_of(dataset)} {speeds['1'].text()}")
        best.append(f"{title_of(dataset)} {speeds[quickest].text()} at {quickest} times the paper's sigma")
    sentences = []
    if at_table:
        sentences.append(f"At the paper's own sigma and by its rules the speed-up is: {', '.join(at_table)}.")
    if best:
        sentences.append(f"In hindsight, at the best of the sigmas tried, it is: {', '.join(best)}.")
    return sentences


def _scale(rows: Sequence[Row]) -> Sentences:
    settings = settings_of(courses_of(rows))
    automatic = [setting for setting in settings if setting.automatic and setting.automatic.median is not None]
    sentences = []
    if automatic:
        size = max(setting.clients for setting in automatic)
        at_size = [setting for setting in automatic if setting.clients == size]
        shown = ", ".join(
            f"{setting.automatic.text()} at epsilon {setting.epsilon}" for setting in at_size if setting.automatic
        )
        draws = {setting.automatic.runs for setting in at_size if setting.automatic}
        counted = f"{min(draws)}" if len(draws) == 1 else f"{min(draws)} to {max(draws)}"
        drawn = "one draw of the noise stands" if draws == {1} else f"{counted} draws of the noise stand"
        sentences.append(
            f"With the automatic sigma and {size:,} clients the speed-up is {shown} "
            f"({shape_words(at_size[0].requests).lower()}); {drawn} behind each number."
        )
    hindsight = [setting for setting in settings if setting.hindsight and setting.hindsight.median is not None]
    if hindsight:
        lucky = max(hindsight, key=lambda setting: (setting.hindsight.median or 0.0) if setting.hindsight else 0.0)
        assert lucky.hindsight is not None
        sentences.append(
            f"The largest number in hindsight, {times(lucky.hindsight.median or 0.0)}x at {lucky.clients:,} clients "
            f"and epsilon {lucky.epsilon}, is the best of {lucky.tried} sigmas over {lucky.hindsight.runs} "
            f"draw{'s' * (lucky.hindsight.runs > 1)} and no promise."
        )
    return sentences


def _bound(rows: Sequence[Row]) -> Sentences:
    honest, population = (statement.check(rows) for statement in reversed(BOUND_STATEMENTS))
    return [
        sentence
        for sentence in (
            _measured(honest, "With the weights of the round "),
            _measured(population, "With population weights "),
        )
        if sentence
    ]


def _groups(rows: Sequence[Row]) -> Sentences:
    sentences = []
    alone, together = by_rule(rows, 1), by_rule(rows, 5)
    medians = [[case.speed.median for case in cases if case.speed.median] for cases in (alone, together)]
    if all(medians):
        named = ", ".join(task_name(case.task) for case in alone)
        sentences.append(
            f"With ten groups and everyone taking part the speed-up over Scratch is {spread_words(medians[0])} for one "
            f"leaver and {spread_words(medians[1])} for five at once ({named}; "
            f"{min(len(case.requests) for case in alone)} seeds each)."
        )
    cases = cases_everywhere(rows)
    trainings = trainings_of(cases, rows)
    failing = [f"{full_name(case.task)}: {case.speed.text()}" for case in cases if not saves_half(case)]
    if trainings:
        sentences.append(
            f"On all {len(cases)} tasks together the first training {first_training_words(trainings)} of the same "
            f"length, and one leaver does not save half of Scratch's rounds on {len(failing)}"
            + (f" ({'; '.join(failing)})." if failing else ".")
        )
    return sentences


def _ways(rows: Sequence[Row]) -> Sentences:
    """Only of the requests and data sets that every way was tried on: medians over different tasks do not compare."""
    tasks: dict[Line, set[tuple[str, str]]] = {}
    for course in courses_of(rows):
        tasks.setdefault(course.line, set()).add(_task(course))
    shared = set.intersection(*tasks.values()) if tasks else set()
    compared = [course for course in courses_of(rows) if _task(course) in shared]
    parts, accuracies = [], []
    for line in lines_of(compared):
        runs = [course for course in compared if course.line == line]
        name = METHOD_NAMES.get(line.method, line.method)
        parts.append(f"{name} {statistics.median(_each(runs)):,.0f}")
        tests = [run.rows[-1].get("accuracy_test") for run in runs]
        measured = [value for value in tests if value is not None]
        if measured:
            accuracies.append(f"{name} {100 * statistics.median(measured):.1f} %")
    if not parts:
        return []
    where = ", ".join(title_of(name) for name in dict.fromkeys(course.first["dataset"] for course in compared))
    sentences = [f"Rounds a request takes (median, on {where}, which every way was tried on): {', '.join(parts)}."]
    if accuracies:
        sentences.append(f"Test accuracy there (median), of models that differ: {', '.join(accuracies)}.")
    return sentences


def _task(course: Course) -> tuple[str, str]:
    """The data set and who asked."""
    return course.first["dataset"], course.variant.get("requests", "")


def _each(runs: Sequence[Course]) -> list[int]:
    return [rounds for run in runs for rounds in run.rounds]


def _measured(verdict: Verdict | None, opening: str) -> str:
    if verdict is None:
        return ""
    return f"{opening}{verdict.measured}{f'; {verdict.why}' if verdict.why else ''}."


def _metrics(rows: Sequence[Row]) -> Sentences:
    overall = {row["method"]: row for row in largest_of(rows)}
    if not {"scratch", NOT_FORGOTTEN} <= set(overall):
        return []
    others = [row for row in overall.values() if row["method"] != "scratch"]
    order = sorted(others, key=lambda row: row["klom_forgotten"])
    floor = overall["scratch"]
    shown = ", ".join(f"{Line(row['method'], '').label} {row['klom_forgotten']:.2f}" for row in order)
    first = (
        "KLoM, how far the predictions are from Scratch's (0: not at all), on the forgotten's samples is "
        f"{floor['klom_forgotten']:.2f} between {floor['models']} runs of Scratch and as many "
        f"others of it, which is the floor; then {shown}."
    )
    told = ", ".join(f"{Line(row['method'], '').label} {100 * (row['tpr_at_1'] or 0.0):.0f} %" for row in order)
    return [first, f"An attack that is wrong about 1 % of Scratch's models tells those of a method from them: {told}."]


def _sets(rows: Sequence[Row]) -> Sentences:
    courses = courses_of(rows)
    sets = len({course.variant.get("set", "0") for course in courses})
    seeds = len({course.first["seed"] for course in courses})
    parts = []
    for line in (paper_line("sifu", rows), our_line(rows)):
        speeds = by_dataset(rows, line)
        shown = [f"{speed.text()}{f' on {title_of(name)}' * (len(speeds) > 1)}" for name, speed in speeds.items()]
        if shown:
            parts.append(f"by {line.rules if line.honest else f'the {line.rules}'} {', '.join(shown)}")
    first = f"Over {sets} sets of ten clients and {seeds} seeds the speed-up of SIFU is {_listed(parts)}."
    return [sentence for sentence in (first if parts else "", _who_remembers(rows)) if sentence]


READERS: dict[str, Reader] = {
    "rounds": _rounds,
    "request_sets": _sets,
    "watermark": _watermark,
    "time_limited": _limited,
    "sigma": _sigma,
    "scale": _scale,
    "psi_alpha": _bound,
    "groups": _groups,
    "ways": _ways,
    "metrics": _metrics,
}
"""By the figure an experiment is drawn with; an unknown one is read like `rounds`."""
