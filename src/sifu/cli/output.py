"""Talking to people and to machines: tables and sentences, or one JSON object on stdout; logs go to stderr."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from sifu.cli.options import Format
from sifu.core.ledger import plain_values


def harmless(text: str) -> str:
    """Text without what a terminal takes for a command: names, reasons and files come from strangers."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)


class _Console(Console):
    """Every text passes here before it is styled, those in tables too."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(harmless(text), **options)


out = _Console(soft_wrap=False, highlight=False)
err = _Console(stderr=True, highlight=False)

LEVEL_STYLES = {"exact": "bold green", "proven": "bold green", "conditional": "bold yellow", "none": "bold red"}


def tell(format: Format, values: dict[str, Any], *sentences: str) -> None:
    """What a command did: values for a machine, or sentences for a person."""
    if format is Format.json:
        print_json(values)
        return
    for sentence in sentences:
        out.print(harmless(sentence), markup=False, soft_wrap=True)


def table(*columns: str, title: str | None = None) -> Table:
    """A plain table; figures are right-aligned where the column's name starts with a dash."""
    shown = Table(
        title=title, title_justify="left", box=None, pad_edge=False, title_style="bold", show_header=any(columns)
    )
    for column in columns:
        shown.add_column(column.lstrip("-"), justify="right" if column.startswith("-") else "left", overflow="fold")
    return shown


def print_json(value: Any) -> None:
    """One JSON object on stdout; figures that JSON cannot hold become null."""
    json.dump(plain_values(value), sys.stdout, indent=2)
    sys.stdout.write("\n")


def number(value: float | None, digits: int = 4) -> str:
    """A figure for a table."""
    if value is None:
        return "-"
    return f"{value:.{digits}g}"


def percent(value: float | None) -> str:
    """An accuracy for a table."""
    return "-" if value is None or math.isnan(value) else f"{100 * value:.1f} %"


def level_text(level: str) -> str:
    """A level in its colour."""
    return f"[{LEVEL_STYLES.get(level, '')}]{level}[/]" if level in LEVEL_STYLES else level


def names_text(names: list[str] | tuple[str, ...], most: int = 3, escaped: bool = True) -> str:
    """A few client names, escaped for rich unless they are printed without markup."""
    shown = ", ".join(escape(name) if escaped else name for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
