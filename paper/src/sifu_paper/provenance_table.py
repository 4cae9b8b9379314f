"""Where the tables of a page came from, in one folded table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def folded(summary: str, content: str) -> str:
    """Content that a reader opens."""
    return f"<details>\n<summary>{summary}</summary>\n\n{content}\n\n</details>"


def provenance_table(records: Iterable[Mapping[str, Any]]) -> str:
    """A row for each session of each experiment; a command that was continued the same way stands there once."""
    rows = []
    for record in records:
        for session in record["sessions"]:
            versions = ", ".join(f"{package} {version}" for package, version in session["versions"].items())
            rows.append(
                f"| {record['asked']['experiment']} | `{session['command']}` | {session['hardware']} | "
                f"{session['date']} | {session['commit']} | {versions} |"
            )
    lines = ["| experiment | command | hardware | date | commit | versions |", "|---|---|---|---|---|---|"]
    return folded("Provenance: commands, hardware, dates, commits and versions", "\n".join([*lines, *rows]))
