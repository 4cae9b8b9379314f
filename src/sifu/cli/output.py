"""Output of commands: tables and sentences for people, or one JSON object for programs; logs go to stderr."""

from __future__ import annotations

import enum
import json
import math
import sys
import time
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.progress import TaskID


def harmless(text: str) -> str:
    """Return text without terminal control characters, because names, reasons and files are not trusted."""
    return "".join(char if char.isprintable() or char in "\n\t" else "?" for char in text)


class _Console(Console):
    """Console that removes control characters from every text before styling, including text in tables."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(harmless(text), **options)


out = _Console(soft_wrap=False, highlight=False)
err = _Console(stderr=True, highlight=False)


class Format(enum.StrEnum):
    """Output format of results."""

    text = "text"
    json = "json"


class Answer:
    """Result of a command.

    Args:
        values: Values for JSON, or a function that returns them.
        *shown: Text output: sentences, tables, or functions that print.
        code: Exit code.
    """

    format = Format.text
    """Output format of the current command."""

    def __init__(self, values: Any, *shown: Any, code: int = 0) -> None:
        self.values, self.shown, self.code = values, shown, code

    def print(self, format: Format) -> None:
        """Print the result in an output format."""
        if format is Format.json:
            print_json(self.values() if callable(self.values) else self.values)
            return
        for part in self.shown:
            if isinstance(part, str):
                out.print(harmless(part), markup=False, soft_wrap=True)
            elif callable(part):
                part()
            else:
                out.print(part)


LEVEL_STYLES = {"exact": "bold green", "proven": "bold green", "conditional": "bold yellow", "none": "bold red"}


def table(*columns: str, title: str | None = None) -> Table:
    """Return a plain table; a column whose name starts with a dash is right-aligned."""
    shown = Table(
        title=title, title_justify="left", box=None, pad_edge=False, title_style="bold", show_header=any(columns)
    )
    for column in columns:
        shown.add_column(column.lstrip("-"), justify="right" if column.startswith("-") else "left", overflow="fold")
    return shown


def print_json(value: Any) -> None:
    """Print one JSON object on stdout; numbers that JSON cannot represent become null."""
    from sifu.core.ledger import plain_values

    json.dump(plain_values(value), sys.stdout, indent=2)
    sys.stdout.write("\n")


def number(value: float | None, digits: int = 4) -> str:
    """Return a number as a table cell."""
    return "-" if value is None else f"{value:.{digits}g}"


def percent(value: float | None) -> str:
    """Return an accuracy as a table cell."""
    return "-" if value is None or math.isnan(value) else f"{100 * value:.1f} %"


def level_text(level: str) -> str:
    """Return a level in its colour."""
    return f"[{LEVEL_STYLES[level]}]{level}[/]" if level in LEVEL_STYLES else level


class ShownBar:
    """Progress bar for one step at a time, shown on a terminal unless the command prints JSON."""

    def __init__(self, text: str, width: int = 16) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._shown = err.is_terminal and Answer.format is not Format.json
        columns = TextColumn(f"{{task.description:<{width}}}"), BarColumn(bar_width=18), TextColumn(text)
        self._bar = Progress(*columns, TimeElapsedColumn(), console=err, transient=True, disable=not self._shown)
        self._step: TaskID | None = None
        self._phase = ""

    def begin(self, phase: str, total: float) -> bool:
        """Start the bar of a step if it differs from the current one, and return whether it does."""
        if phase == self._phase:
            return False
        if self._step is not None:
            self._bar.remove_task(self._step)
        self._step = self._bar.add_task(phase, total=total, text="") if self._shown else None
        self._phase = phase
        return True

    def update(self, done: float, total: float, text: str = "") -> None:
        """Update the progress of the step."""
        if self._step is not None:
            self._bar.update(self._step, completed=done, total=total, text=text)

    def __enter__(self) -> Self:
        self._bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.__exit__(*error)


LINE_EVERY = 30.0
"""Interval between two progress lines if the output is not a terminal, in seconds."""


class RoundsProgress(ShownBar):
    """Progress bar for rounds, with the target and the remaining time."""

    def __init__(self) -> None:
        super().__init__("{task.fields[text]}")
        self._told = time.monotonic()
        self._started = 0.0

    def __call__(self, update: object) -> None:
        """Show a `sifu.run.training.Progress`."""
        phase, rounds = update.phase, update.rounds  # type: ignore[attr-defined]
        accuracy, target, most = update.accuracy, update.target, update.max_rounds  # type: ignore[attr-defined]
        if self.begin(phase, most):
            self._started = time.monotonic()
        speed = rounds / max(time.monotonic() - self._started, 1e-3)
        limit = "at most" if target > 0 else "about"
        left = f", {limit} {duration((most - rounds) / speed)} left" if speed and most > rounds else ""
        text = f"{update.unit} {rounds}"  # type: ignore[attr-defined]
        if target > 0 and not math.isnan(accuracy):
            text += f", {100 * accuracy:.1f} % of {100 * target:g} %"
        if self._shown:
            self.update(rounds, most, text + left)
        elif time.monotonic() - self._told >= LINE_EVERY:
            self._told = time.monotonic()
            err.print(f"{phase}: {text}{left}", markup=False, highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """Return a duration in a readable unit.

    >>> duration(0.21), duration(75.0), duration(180.0), duration(7200.0)
    ('0.21 s', '75 s', '3 min', '2.0 h')
    """
    if seconds < 90:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
