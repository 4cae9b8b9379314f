"""The page of results: what was found in five sentences and a figure, then an experiment a section."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sifu.plots.style import figure_bytes
from sifu.research.federations import write_atomically
from sifu_paper.columns import definitions
from sifu_paper.figures import draw_source
from sifu_paper.letter_settings import PRESET_MEANINGS, settings_rows, trained_words
from sifu_paper.overview import standings
from sifu_paper.plots.overview import draw_overview
from sifu_paper.provenance_table import folded, provenance_table
from sifu_paper.reading import courses_of, letter_preset
from sifu_paper.readings import reading_of
from sifu_paper.settings import shared_settings
from sifu_paper.sources import Source, sources_in
from sifu_paper.statements import OWN_STATEMENTS, PAPER_STATEMENTS, verdicts
from sifu_paper.summary import Summary, SummaryRow, set_apart, summarise
from sifu_paper.table import Row
from sifu_paper.top import top_sentences
from sifu_paper.trained_to import training_rows
from sifu_paper.verdict import Statement, Tables

PAGE = "README.md"
OVERVIEW = "overview.png"
LETTER = "letter"
FOLDED_FROM = 30
"""Tables of more lines than this are folded away: the figure above them says the same."""
LONG_CELL = 300
"""Characters from which on a cell is broken into lines where its sentence has a semicolon."""
INTRODUCTION = (
    "Clients of a federation ask to be forgotten: what does it cost to make a trained model forget them, and what is "
    "proven of it? *Scratch*, training again without them, is the yardstick; *the paper* is SIFU (AISTATS 2024), *its "
    "rules* are those it counts and adds noise by, *our rules* those that a proof needs."
)
DEFINITION = (
    "**Speed-up** means the same everywhere on this page: Scratch's rounds over the method's (all requests of a run "
    "together, calibration included) on the same seed, only of seeds on which both reached the target; the median over "
    "seeds (least to largest). Runs that did not reach the target have no ratio and are counted beside it. All rows of "
    "a data set in a table are of the same seeds, but for growing federations and groups, where each row says how many "
    "it has. [Columns](#columns) defines every column."
)


@dataclass(frozen=True)
class Section:
    """An experiment with its table, ready to be written."""

    source: Source
    summary: Summary

    @property
    def name(self) -> str:
        """The experiment's name."""
        return self.source.experiment.name


def write_page(folders: Sequence[Path], out: Path) -> Path:
    """`out`/README.md with figures and tables beside it; `folders` hold results, or are those of an earlier page."""
    sections = [Section(source, summarise(source.experiment, source.rows)) for source in sources_in(folders)]
    out.mkdir(parents=True, exist_ok=True)
    tables: Tables = {section.name: section.source.rows for section in sections}
    write_atomically(out / OVERVIEW, figure_bytes(draw_overview(standings(tables)), "png"))
    for section in sections:
        write_atomically(out / f"{section.name}.png", figure_bytes(draw_source(section.source), "png"))
        for path, kind in ((section.source.table, "csv"), (section.source.origin, "json")):
            if path.resolve() != (out / f"{section.name}.{kind}").resolve():
                shutil.copyfile(path, out / f"{section.name}.{kind}")
    at_a_glance = f"![Every method at a glance]({OVERVIEW})"
    parts = ["# Results", INTRODUCTION, *_opening(sections, tables), at_a_glance, DEFINITION]
    parts += ["## The paper's statements", paper_opening(tables), statements_table(tables, PAPER_STATEMENTS)]
    parts += [_section(section, tables) for section in sections]
    parts += ["## What we add", statements_table(tables, OWN_STATEMENTS)]
    parts += ["## Columns", _columns(sections, tables), "## Where it came from"]
    parts.append(provenance_table([section.source.record for section in sections]))
    path = out / PAGE
    write_atomically(path, ("\n\n".join(parts) + "\n").encode())
    return path


def _opening(sections: Sequence[Section], tables: Tables) -> list[str]:
    smoke = [section.name for section in sections if section.source.smoke]
    warning = [f"**Smoke runs, whose numbers mean nothing: {', '.join(smoke)}.**"] if smoke else []
    sentences = "\n".join(f"* {sentence}" for sentence in top_sentences(tables))
    return [*warning, sentences] if sentences else warning


def paper_opening(tables: Tables) -> str:
    """Which preset the paper's statements are held against, and what the presets are."""
    names = {statement.experiment for statement in PAPER_STATEMENTS}
    held_tables = [rows for name, rows in tables.items() if name in names and rows and rows[0].get("preset")]
    used = sorted({letter_preset(rows) for rows in held_tables})
    present = {row["preset"] for rows in tables.values() for row in rows}
    others = [name for name in shared_settings().presets if name not in ("paper", "ours") and name in present]
    text = (
        "`paper` is the paper's set of rules (population weights, classical calibration, latest release), `ours` the "
        "honest one (weights of the round, exact calibration, all releases, sigma chosen at the request)"
    )
    if others:
        text += "; " + ", ".join(_preset_meaning(name) for name in others) + " ([more](../README.md))"
    held = (
        f" The statements are held against {', '.join(f'`{name}`' for name in used)}, over all seeds." if used else ""
    )
    return f"{text}.{held}"


def _preset_meaning(name: str) -> str:
    return f"`{name}`: {PRESET_MEANINGS[name]}" if name in PRESET_MEANINGS else f"`{name}`"


def statements_table(tables: Tables, statements: Sequence[Statement]) -> str:
    """The sentence, what was measured, same or not, and why."""
    heading = "what was asked" if all(statement.ours for statement in statements) else "the paper says"
    lines = [f"| {heading} | we measured | same? | why |", "|---|---|---|---|"]
    for statement, verdict in verdicts(tables, statements):
        measured = verdict.measured
        if len(measured) > LONG_CELL:
            measured = measured.replace("; ", ";<br>")
        lines.append(f"| {statement.says} | {measured} | {verdict.word} | {verdict.why} |")
    return "\n".join(lines)


def _section(section: Section, tables: Tables) -> str:
    experiment, rows = section.source.experiment, section.source.rows
    apart = set_apart(experiment, rows)
    every_row = f"Every row: [{experiment.name}.csv]({experiment.name}.csv)."
    where = f"In the paper: {experiment.paper_figure}." if experiment.paper_figure else "Not in the paper."
    parts = [
        f"## {experiment.title}",
        " ".join(filter(None, [experiment.question, _all_trained(rows), where])),
        "**A smoke run: everything is shrunk, and the numbers mean nothing.**" if section.source.smoke else "",
        f"![{experiment.title}]({experiment.name}.png)",
        reading_of(experiment, rows),
        *_titled("Settings held against the paper's 52 %, the nearest first.", _settings(section, tables)),
        *_titled("How far the trainings came.", training_rows(experiment, rows)),
        _table(section.summary.rows),
        section.summary.note if apart.rows else "",
        *_titled("The other methods, beside Scratch on the same seeds.", apart.rows),
        " ".join(filter(None, [(apart if apart.rows else section.summary).note, every_row])),
    ]
    return "\n\n".join(part for part in parts if part)


def _all_trained(rows: Sequence[Row]) -> str:
    """How every run of the section was trained, where that is one way and not the paper's; elsewhere rows say it."""
    trainings = {course.training for course in courses_of(rows)} if rows and "rounds" in rows[0] else set()
    words = trained_words(next(iter(trainings))) if len(trainings) == 1 else ""
    return f"Every run is {words} (`{next(iter(trainings))}`)." if words else ""


def _settings(section: Section, tables: Tables) -> list[SummaryRow]:
    return settings_rows(tables) if section.name == LETTER else []


def _titled(title: str, rows: Sequence[SummaryRow]) -> list[str]:
    """A table under a line that says what it is; nothing where it has no rows."""
    return [title, _table(rows)] if rows else []


def _columns(sections: Sequence[Section], tables: Tables) -> str:
    shown = [
        rows
        for section in sections
        for rows in (
            section.summary.rows,
            _settings(section, tables),
            training_rows(section.source.experiment, section.source.rows),
            set_apart(section.source.experiment, section.source.rows).rows,
        )
    ]
    names = [name for rows in shown for row in rows[:1] for name in row]
    return folded("What the columns of the tables mean", "\n".join(f"* {line}" for line in definitions(names)))


def _table(rows: Sequence[SummaryRow]) -> str:
    if not rows:
        return "No rows yet."
    columns = list(rows[0])
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(row[name]) for name in columns) + " |" for row in rows]
    table = "\n".join(lines)
    return table if len(rows) <= FOLDED_FROM else folded(f"The table: {len(rows)} lines", table)


def _cell(value: Any) -> str:
    """A cell as people read it.

    >>> _cell(None), _cell(0.93451), _cell(4924.7), _cell(1e6), _cell("yes"), _cell(731)
    ('-', '0.935', '4,925', '1,000,000', 'yes', '731')
    """
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
