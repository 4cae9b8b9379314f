"""Appendix of results: for each experiment its figure, and its tables as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sifu.plots.style import figure_bytes
from sifu.store.files import write_atomically
from sifu_paper.figures import draw_source
from sifu_paper.letter_settings import settings_rows
from sifu_paper.overview import standings
from sifu_paper.plots.overview import draw_overview
from sifu_paper.sources import Source, sources_in
from sifu_paper.summary import SummaryRow, set_apart, summarise
from sifu_paper.table import Row
from sifu_paper.trained_to import training_rows

OVERVIEW = "overview.png"
TABLES = "tables"
LETTER = "letter"


def write_appendix(folders: Sequence[Path], out: Path) -> list[Path]:
    """Write `out`/NAME.md with figures and tables for each experiment; `folders` contain results or an old appendix."""
    sources = sources_in(folders)
    (out / TABLES).mkdir(parents=True, exist_ok=True)
    rows_of = {source.experiment.name: source.rows for source in sources}
    write_atomically(out / OVERVIEW, figure_bytes(draw_overview(standings(rows_of)), "png"))
    pages = []
    for source in sources:
        name = source.experiment.name
        write_atomically(out / f"{name}.png", figure_bytes(draw_source(source), "png"))
        for path, kind in ((source.table, "csv"), (source.origin, "json")):
            if path.resolve() != (out / f"{name}.{kind}").resolve():
                shutil.copyfile(path, out / f"{name}.{kind}")
        for title, rows in tables_of(source, rows_of).items():
            write_atomically(out / TABLES / f"{title}.csv", csv_text(rows).encode())
        pages.append(out / f"{name}.md")
        write_atomically(pages[-1], page_of(source, rows_of).encode())
    return pages


def tables_of(source: Source, rows_of: Mapping[str, Sequence[Row]]) -> dict[str, list[SummaryRow]]:
    """Return the tables of an experiment by file name, without empty ones."""
    experiment, rows = source.experiment, source.rows
    tables = {
        experiment.name: summarise(experiment, rows).rows,
        f"{experiment.name}-other-methods": set_apart(experiment, rows).rows,
        f"{experiment.name}-trainings": training_rows(experiment, rows),
        f"{experiment.name}-settings": settings_rows(rows_of) if experiment.name == LETTER else [],
        f"{experiment.name}-provenance": provenance_rows(source.record),
    }
    return {name: table for name, table in tables.items() if table}


def provenance_rows(record: Mapping[str, Any]) -> list[SummaryRow]:
    """Return a row for each session of an experiment."""
    return [
        {
            "command": f"`{session['command']}`",
            "hardware": session["hardware"],
            "date": session["date"],
            "commit": session["commit"],
            "versions": ", ".join(f"{package} {version}" for package, version in session["versions"].items()),
        }
        for session in record["sessions"]
    ]


def page_of(source: Source, rows_of: Mapping[str, Sequence[Row]]) -> str:
    """Return the appendix of one experiment: its question, its figure, its tables."""
    experiment = source.experiment
    where = f"In the paper: {experiment.paper_figure}." if experiment.paper_figure else "Not in the paper."
    parts = [
        f"# {experiment.title}",
        f"{experiment.question} {where} [columns.md](columns.md) defines the columns, "
        f"[{experiment.name}.csv]({experiment.name}.csv) has every row.",
        "**A smoke run: everything is shrunk, and the numbers mean nothing.**" if source.smoke else "",
        f"![{experiment.title}]({experiment.name}.png)",
    ]
    notes = {
        experiment.name: summarise(experiment, source.rows).note,
        f"{experiment.name}-other-methods": set_apart(experiment, source.rows).note,
    }
    for name, rows in tables_of(source, rows_of).items():
        parts += [f"## [{name}.csv]({TABLES}/{name}.csv)", markdown_table(rows), notes.get(name, "")]
    return "\n\n".join(part for part in parts if part) + "\n"


def csv_text(rows: Sequence[SummaryRow]) -> str:
    """Return a table as CSV, with unformatted numbers."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def markdown_table(rows: Sequence[SummaryRow]) -> str:
    """Return a table as Markdown, with formatted numbers."""
    columns = list(rows[0])
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(row[name]) for name in columns) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    """Return a cell with its number formatted.

    >>> _cell(None), _cell(0.93451), _cell(4924.7), _cell(1e6), _cell("yes"), _cell(731)
    ('-', '0.935', '4,925', '1,000,000', 'yes', '731')

    """
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
