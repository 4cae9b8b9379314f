"""Summary of an experiment in one small sorted table, with the same seeds in all rows of a data set."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sifu.plots.style import byte_size
from sifu_paper.comparisons import signed
from sifu_paper.group_trials import MERGES
from sifu_paper.metric_summary import metric_summary
from sifu_paper.plots.courses import Course, Line, labels_of, lines_of, matching_scratch
from sifu_paper.plots.group_cases import Case, cases_of, first_trainings_of
from sifu_paper.plots.growing import settings_of
from sifu_paper.plots.speed import SameSeeds, same_seeds, speed_up
from sifu_paper.reading import courses_of, datasets_of, title_of, trained_like, without
from sifu_paper.settings import Experiment
from sifu_paper.table import Row

SummaryRow = dict[str, Any]
AXES = {"sigma_factor": "sigma"}
"""Names of varied settings in the summary, if they differ from those in the table."""
LIMITED_COLUMNS = {
    "remaining": "accuracy_retain_after",
    "test": "accuracy_test",
    "forgotten": "accuracy_forget_after",
}
"""Columns by which runs of limited time are compared."""


@dataclass(frozen=True)
class Summary:
    """Rows, and a note for the reader."""

    rows: list[SummaryRow]
    note: str = ""


def summary_rows(experiment: Experiment, rows: Sequence[Row]) -> list[SummaryRow]:
    """Return only the rows."""
    return summarise(experiment, rows).rows


def summarise(experiment: Experiment, rows: Sequence[Row]) -> Summary:
    """Return a line for each data set, method and variant (for distances, each data set; for groups, each setting)."""
    if experiment.kind == "groups":
        return _groups(rows)
    if experiment.kind == "distance":
        return Summary(_distances(rows))
    if experiment.kind == "metrics":
        return Summary(*metric_summary(rows))
    if experiment.draw == "scale":
        return _growing(rows)
    if experiment.draw == "time_limited":
        return _limited(rows)
    return _requests(experiment, without(rows, experiment.set_apart), labels_of(courses_of(rows)))


def set_apart(experiment: Experiment, rows: Sequence[Row]) -> Summary:
    """Return the methods in `set_apart`, with Scratch on the same seeds."""
    own = [row for row in rows if row["method"] in experiment.set_apart]
    present = {(row["dataset"], trained_like(row["preset"])) for row in own}
    scratch = [row for row in rows if row["method"] == "scratch"]
    matching = [row for row in scratch if (row["dataset"], trained_like(row["preset"])) in present]
    return _requests(experiment, own + matching, labels_of(courses_of(rows)))


def _requests(experiment: Experiment, rows: Sequence[Row], labels: Mapping[Line, str]) -> Summary:
    """Summarise requests.

    Args:
        experiment: Experiment of the rows. Rounds of different models are not compared.
        rows: Rows to summarise.
        labels: Labels of the lines in the whole experiment, so that both tables name a line alike.
    """
    other_models = {method for method, spec in (experiment.method_spec or {}).items() if "model" in spec}
    result, notes = [], []
    everyone = courses_of(rows)
    for dataset in datasets_of(rows):
        same = same_seeds([course for course in everyone if course.first["dataset"] == dataset])
        if not same.courses:
            continue
        notes.append(_seeds_note(dataset, same, labels))
        lines: list[tuple[Any, SummaryRow]] = []
        varied = any(_numbers(course) for course in same.courses)
        for place, line in enumerate(lines_of(same.courses)):
            own = [course for course in same.courses if course.line == line]
            for axes in dict.fromkeys(_axes(course) for course in own):
                runs = [course for course in own if _axes(course) == axes]
                not_comparable = line.method in other_models and any(run.total for run in runs)
                speed = speed_up(runs, [] if not_comparable else same.courses)
                # With varied settings a method's rows stay together; otherwise the quickest method comes first.
                order = (_words(runs[0]), place if varied else 0, _numbers(runs[0]), speed.rank, place)
                at_once = not speed.runs and all(run.total == 0 for run in runs)  # no rounds to compare
                lines.append((order, _one(dataset, labels[line], axes, runs, "no rounds" if at_once else speed.text())))
        result += [row for _, row in sorted(lines, key=lambda pair: pair[0])]
    return Summary(_without_empty(result), _joined_notes(notes))


def _axes(course: Course) -> tuple[tuple[str, str], ...]:
    """Return the varied settings, without the request sets, which are draws of the same setting."""
    return tuple((AXES.get(name, name), value) for name, value in course.variant.items() if name != "set")


def _numbers(course: Course) -> tuple[float, ...]:
    return tuple(float(value) for _, value in _axes(course) if _is_number(value))


def _words(course: Course) -> tuple[str, ...]:
    return tuple(value for _, value in _axes(course) if not _is_number(value))


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()


def _one(dataset: str, label: str, axes: Sequence[tuple[str, str]], runs: Sequence[Course], speed: str) -> SummaryRow:
    reached = [course.total for course in runs if course.reached]
    sets = len({course.variant.get("set", "0") for course in runs}) > 1
    levels = Counter(row["level"] for course in runs for row in course.rows)
    marks = [row.get("mark_after") for course in runs for row in course.rows]
    return {
        "data": title_of(dataset),
        "method": label,
        **dict(axes),
        ("runs" if sets else "seeds"): len(runs),
        "rounds": round(statistics.median(reached)) if reached else None,
        "speed-up": speed,
        "sent": byte_size(statistics.fmean(sum(row["bytes_sent"] or 0 for row in course.rows) for course in runs)),
        "kept": byte_size(statistics.fmean(max(row["bytes_kept"] or 0 for row in course.rows) for course in runs)),
        "seconds": _seconds(runs),
        "remaining": _median([course.rows[-1]["accuracy_retain_after"] for course in runs]),
        "test": _median([course.rows[-1].get("accuracy_test") for course in runs]),
        "forgotten": _median([course.forgotten for course in runs]),
        "mark": _median(marks),
        "level": ", ".join(f"{count} {level}" for level, count in sorted(levels.items())),
    }


def _seconds(runs: Sequence[Course]) -> str | None:
    """Return the mean seconds of a request on each device that the table names."""
    by_device: dict[str, list[float]] = {}
    for row in (row for course in runs for row in course.rows):
        if row.get("device") and row["seconds"] is not None:
            device = {"cuda": "GPU", "cpu": "CPU"}.get(str(row["device"]), str(row["device"]))
            by_device.setdefault(device, []).append(float(row["seconds"]))
    words = [f"{statistics.fmean(seconds):,.1f} ({device})" for device, seconds in sorted(by_device.items())]
    return ", ".join(words) or None


def _without_empty(rows: list[SummaryRow]) -> list[SummaryRow]:
    """Return rows with the same columns: those that some row has, without those that are empty in all rows."""
    names = dict.fromkeys(name for row in rows for name in row)
    # A varied setting has its position in the row with the most columns.
    order = max((list(row) for row in rows), key=lambda columns: len(columns), default=[])
    columns = [name for name in (*order, *names) if any(row.get(name) is not None for row in rows)]
    return [{name: row.get(name) for name in dict.fromkeys(columns)} for row in rows]


def _seeds_note(dataset: str, same: SameSeeds, labels: Mapping[Line, str]) -> tuple[str, str]:
    by_training = {training: _ranges(seeds) for training, seeds in same.seeds.items()}
    if len(set(by_training.values())) == 1:
        numbers = next(iter(by_training.values()))
    else:
        numbers = ", ".join(f"{numbers} (trained as {training})" for training, numbers in by_training.items())
    words = f"seed{'s' * (not numbers.isdigit())} {numbers}"
    if same.left_out:
        words += f" (too few of them for {', '.join(labels[line] for line in same.left_out)}, left out)"
    return title_of(dataset), words


def _ranges(numbers: Sequence[int]) -> str:
    """Return integers as text, with consecutive ones joined.

    >>> _ranges([1, 2, 3, 7])
    '1 to 3, 7'

    """
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]} to {part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def _joined_notes(notes: Sequence[tuple[str, str]]) -> str:
    by_words: dict[str, list[str]] = {}
    for title, words in notes:
        by_words.setdefault(words, []).append(title)
    if not by_words:
        return ""
    if len(by_words) == 1:
        words = next(iter(by_words))
        return words[0].upper() + words[1:] + "."
    shown = "; ".join(f"{', '.join(names)}: {words}" for words, names in by_words.items())
    return f"{shown}."


def _limited(rows: Sequence[Row]) -> Summary:
    """Return a row for each method: its distance from a full retraining at each limit."""
    everyone = courses_of(rows)
    labels = labels_of(everyone)
    result, notes = [], []
    for dataset in datasets_of(rows):
        same = same_seeds([course for course in everyone if course.first["dataset"] == dataset])
        limited = [course for course in same.courses if "limit" in course.variant]
        if not limited:
            continue
        notes.append(_seeds_note(dataset, same, labels))
        scratch_of = matching_scratch(same.courses)
        limits = sorted({course.variant["limit"] for course in limited}, key=float)
        lines = []
        for line in lines_of(limited):
            seeds = {run.first["seed"] for run in limited if run.line == line}
            row: SummaryRow = {"data": title_of(dataset), "method": labels[line], "seeds": len(seeds)}
            for words, column in LIMITED_COLUMNS.items():
                if not any(run.first.get(column) is not None for run in limited):
                    continue
                for limit in limits:
                    runs = [run for run in limited if run.line == line and run.variant["limit"] == limit]
                    row[f"{words}, {100 * float(limit):.0f} %"] = _gap_words(runs, scratch_of, column)
            lines.append((_furthest(row), row))
        result += [row for _, row in sorted(lines, key=lambda pair: pair[0])]
    note = (
        "Points of accuracy less those of Scratch without a limit, on the clients that stay (`remaining`), on test "
        "samples where the table has them, and on the forgotten, with this share of the rounds of training: median "
        "over seeds. Sorted by the last limit, the nearest to Scratch on those who stay first. "
    )
    return Summary(result, note + _joined_notes(notes) if result else "")


def _gap_words(runs: Sequence[Course], scratch_of: Any, column: str) -> str:
    gaps = []
    for course in runs:
        scratch = scratch_of(course)
        if scratch is not None and course.first.get(column) is not None:
            gaps.append(course.first[column] - scratch.first[column])
    if not gaps:
        return f"diverged ({len(runs)} of {len(runs)})"
    lost = len(runs) - len(gaps)
    return signed(100 * statistics.median(gaps)) + (f", diverged ({lost} of {len(runs)})" if lost else "")


def _furthest(row: SummaryRow) -> tuple[bool, float]:
    last = [value for name, value in row.items() if name.startswith("remaining")][-1]
    return "diverged" in last, 0.0 if last.startswith("diverged") else abs(float(last.split(",")[0]))


def _growing(rows: Sequence[Row]) -> Summary:
    """Compare automatic choices with the best in hindsight, by size of the federation."""
    result = []
    for setting in settings_of(courses_of(rows)):
        tried: int | str = setting.tried
        if setting.hindsight and setting.automatic and setting.hindsight.runs != setting.automatic.runs:
            tried = f"{tried} ({setting.hindsight.runs} draw{'s' * (setting.hindsight.runs != 1)})"
        draws = setting.automatic or setting.hindsight
        result.append(
            {
                "requests": setting.requests,
                "epsilon": setting.epsilon,
                "clients": setting.clients,
                "draws": draws.runs if draws else None,
                "automatic": setting.automatic.text() if setting.automatic else None,
                "best in hindsight": setting.hindsight.text() if setting.hindsight else None,
                "tried": tried if setting.hindsight else None,
                "level": ", ".join(setting.levels),
            }
        )
    return Summary(result, "Sorted by requests, epsilon and clients.")


def _groups(rows: Sequence[Row]) -> Summary:
    first = {
        (line.task, line.groups, line.separate, line.stretch): line.difference for line in first_trainings_of(rows)
    }
    titles = {dataset: title_of(dataset) for dataset in datasets_of(rows)}
    lines = []
    for case in cases_of(rows, MERGES):
        own = (case.task, case.groups, case.separate, case.stretch)
        difference = first.get(own) if case.merge == "mean" else None
        lines.append(
            (
                (list(titles).index(case.task.dataset), case.task.label(titles), case.leavers, case.speed.rank),
                {
                    "task": case.task.label(titles),
                    "leavers": case.leavers,
                    "groups": case.groups,
                    "apart": case.separate,
                    "merge": _merge_words(case),
                    "seeds": len(case.requests),
                    "rounds": case.rounds,
                    "Scratch": case.scratch,
                    "speed-up": case.speed.text(),
                    "first training": None if difference is None else round(100 * difference, 1),
                },
            )
        )
    note = "Sorted by task and leavers, the quickest setting first." + _all_hit_words(rows)
    return Summary([row for _, row in sorted(lines, key=lambda pair: pair[0])], note if lines else "")


def _all_hit_words(rows: Sequence[Row]) -> str:
    """Return a sentence on requests that left no group to merge; they have no row, so the rows show luckier seeds."""
    hit = sum(
        row["method"] == "groups" and row["request"] == 1 and "rebuild" not in row["variant"] and not row["groups_left"]
        for row in rows
    )
    if not hit:
        return ""
    requests = "request left" if hit == 1 else "requests left"
    return (
        f" {hit} {requests} no group without a leaver: there groups are Scratch, and `seeds` counts the other seeds "
        "alone."
    )


def _merge_words(case: Case) -> str:
    moved = "" if case.stretch == 1.0 else f"moved x {case.stretch:g}"
    return f"{case.merge}, {moved}" if case.merge != "mean" and moved else moved or case.merge


def _median(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return statistics.median(present) if present else None


def _distances(rows: Sequence[Row]) -> list[SummaryRow]:
    result = []
    for dataset in datasets_of(rows):
        measured = [row for row in rows if row["dataset"] == dataset and row["distance"]]
        if not measured:
            continue
        result.append(
            {
                "data": title_of(dataset),
                "settings": len({row["variant"] for row in measured}),
                "measurements": len(measured),
                "above Psi (round)": sum(row["distance"] > row["psi_round"] for row in measured),
                "above Psi (population)": sum(row["distance"] > row["psi_population"] for row in measured),
                "largest alpha/Psi (round)": largest_ratio(measured, "psi_round"),
                "largest alpha/Psi (population)": largest_ratio(measured, "psi_population"),
            }
        )
    return result


def largest_ratio(rows: Sequence[Row], psi: str) -> float:
    """Return the largest alpha / Psi; above 1 the bound is violated."""
    return max((row["distance"] / row[psi] for row in rows if row[psi]), default=math.nan)
