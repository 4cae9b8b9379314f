"""The page of results: figures, tables, where they came from, and the paper's statements beside what was measured."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sifu.experiments.figures import write_figures
from sifu.experiments.group_statements import GROUP_STATEMENTS
from sifu.experiments.provenance import FILE, read_record
from sifu.experiments.reading import courses_of, datasets_of, title_of
from sifu.experiments.settings import Experiment, load_experiment
from sifu.experiments.statements import STATEMENTS, verdicts
from sifu.experiments.summary import summary_rows
from sifu.experiments.table import Row, read_table
from sifu.plots.courses import lines_of
from sifu.plots.style import byte_size
from sifu.store.files import write_atomically

PAGE = "README.md"
LONGEST_TABLE = 120
FOLDED_FROM = 30
"""Tables of more lines than this are folded away: the figure above them says the same."""
LONG_CELL = 300
"""Characters from which on a cell is broken into lines where its sentence has a semicolon."""


def write_page(folders: Sequence[Path], out: Path) -> Path:
    """`out`/README.md with the figures and tables of the result folders copied beside it."""
    records = [(folder, read_record(folder)) for folder in folders]
    out.mkdir(parents=True, exist_ok=True)
    tables: dict[str, list[Row]] = {}
    sections = []
    for folder, record in records:
        experiment = load_experiment(record["asked"]["experiment"], record["asked"]["scale"])
        rows = read_table(folder / "results.csv")
        tables[experiment.name] = rows
        sections.append(_section(experiment, record, rows, folder, out))
    parts = [
        "# Results",
        "## What was found",
        findings(tables),
        "## How to read this page",
        _opening(),
        "## The paper and what was measured",
    ]
    smoke = [record["asked"]["experiment"] for _, record in records if record["asked"]["scale"] == "smoke"]
    if smoke:
        parts.append(f"**Smoke runs, whose verdicts mean nothing: {', '.join(smoke)}.**")
    parts.append(statements_table(tables))
    cost = costs_table(next((tables[name] for name in ("sequential", "watermark") if name in tables), []))
    if cost:
        parts += ["## Storage and traffic", COSTS_OPENING, cost]
    path = out / PAGE
    write_atomically(path, ("\n\n".join([*parts, *sections]) + "\n").encode())
    return path


COSTS_OPENING = (
    "Mean over seeds, all requests together. Traffic: a model to each participant of a round and one back. "
    "On disk: what the method keeps beyond the current model to answer the next request (models to go back to, "
    "or client updates), the largest over the requests."
)


def _opening() -> str:
    return (
        "`sifu bench page` wrote it from the tables of `sifu bench run`. `paper` and `ours` are two presets: the "
        "paper's rules (population weights, classical calibration, latest release), and ours (weights of the round, "
        "exact calibration, all releases, sigma chosen at the request). Accuracies are on the clients' training data, "
        "as in the paper; those of `groups` are on test images, which no client holds. Each section ends with the "
        "commands that made it."
    )


def findings(tables: dict[str, list[Row]]) -> str:
    """How many of the paper's statements came out as it says, and which ones did not."""
    judged = [
        (statement.says, verdict.same)
        for statement, verdict in verdicts(tables)
        if not statement.ours and verdict.same is not None
    ]
    others = [says for says, same in judged if not same]
    lines = [
        f"Of the {len(judged)} statements of the paper that these tables can judge, {len(judged) - len(others)} came "
        f"out the same and {len(others)} did not{':' if others else '.'}",
        "",
        *(f"* {says}" for says in others),
        *([""] if others else []),
        "The next table says what was measured, and why; its last rows answer questions of our own.",
    ]
    return "\n".join(lines)


def statements_table(tables: dict[str, list[Row]]) -> str:
    """The paper says, we measured, same or not, and why."""
    lines = ["| the paper says | we measured | same? | why |", "|---|---|---|---|"]
    for statement, verdict in verdicts(tables, (*STATEMENTS, *GROUP_STATEMENTS)):
        says = f"*(we add)* {statement.says}" if statement.ours else statement.says
        measured = verdict.measured
        if len(measured) > LONG_CELL:
            measured = measured.replace("; ", ";<br>")
        lines.append(f"| {says} | {measured} | {verdict.word} | {verdict.why} |")
    return "\n".join(lines)


def costs_table(rows: Sequence[Row]) -> str:
    """Rounds, local steps, traffic and storage of each method, side by side."""
    courses = courses_of(rows)
    if not courses:
        return ""
    lines = [
        "| data | method | rounds | local steps | sent | on disk | seconds |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for dataset in datasets_of(rows):
        here = [course for course in courses if course.first["dataset"] == dataset]
        for line in lines_of(here):
            matching = [course for course in here if course.line == line]

            def mean(name: str, matching: Sequence[Any] = matching) -> float:
                return statistics.fmean(sum(row[name] or 0 for row in course.rows) for course in matching)

            kept = statistics.fmean(max(row["bytes_kept"] or 0 for row in course.rows) for course in matching)
            rounds = statistics.fmean(course.total for course in matching)
            lines.append(
                f"| {title_of(dataset)} | {line.label} | {rounds:,.0f} | {mean('local_steps'):,.0f} | "
                f"{byte_size(mean('bytes_sent'))} | {byte_size(kept)} | {mean('seconds'):,.0f} |"
            )
    return "\n".join(lines)


def _section(experiment: Experiment, record: dict[str, Any], rows: Sequence[Row], folder: Path, out: Path) -> str:
    name = experiment.name
    write_figures(folder)
    for source, target in ((f"{name}.png", f"{name}.png"), ("results.csv", f"{name}.csv"), (FILE, f"{name}.json")):
        if (folder / source).resolve() != (out / target).resolve():
            shutil.copyfile(folder / source, out / target)
    where = f"In the paper: {experiment.paper_figure}." if experiment.paper_figure else "Not in the paper."
    smoke = (
        "\n\n**A smoke run: everything is shrunk, and the numbers mean nothing.**"
        if record["asked"]["scale"] == "smoke"
        else ""
    )
    sessions = "\n".join(
        f"* `{session['command']}` on {session['hardware']}, {session['date']}, commit {session['commit']}, "
        + ", ".join(f"{package} {version}" for package, version in session["versions"].items())
        for session in record["sessions"]
    )
    return "\n\n".join(
        [
            f"## {experiment.title}",
            f"{experiment.question} {where}{smoke}",
            f"![{experiment.title}]({name}.png)",
            f"Every row: [{name}.csv]({name}.csv).",
            _markdown(summary_rows(experiment, rows)),
            _folded("Provenance: commands, hardware and versions", sessions),
        ]
    )


def _folded(summary: str, content: str) -> str:
    return f"<details>\n<summary>{summary}</summary>\n\n{content}\n\n</details>"


def _markdown(rows: Sequence[dict[str, Any]]) -> str:
    if not rows:
        return "No rows yet."
    columns = list(rows[0])
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(row[name]) for name in columns) + " |" for row in rows[:LONGEST_TABLE]]
    more = len(rows) - LONGEST_TABLE
    table = "\n".join(lines) + (f"\n\n{more} more lines can be computed from the table." if more > 0 else "")
    return table if len(rows) <= FOLDED_FROM else _folded(f"The table: {len(rows)} lines", table)


def _cell(value: Any) -> str:
    """A cell as people read it.

    >>> _cell(None), _cell(0.93451), _cell(4924.7), _cell(1e6), _cell("yes")
    ('-', '0.935', '4,925', '1,000,000', 'yes')
    """
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
