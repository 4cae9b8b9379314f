"""Documents stay short enough to read: each has a limit on its words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMITS = {
    "README.md": 900,
    "CHANGELOG.md": 350,
    "SECURITY.md": 300,
    "CONTRIBUTING.md": 1000,
    "paper/README.md": 1500,
    "paper/results/README.md": 1250,
    "docs/audit.md": 1250,
    "docs/closed-form.md": 2900,
    "console/README.md": 1400,
    "docs/dpo.md": 1250,
    "docs/flower.md": 2750,
    "docs/guide.md": 2500,
    "docs/index.md": 300,
    "docs/noise.md": 1200,
    "docs/performance.md": 1200,
    "docs/related-work.md": 900,
    "docs/release-noise.md": 900,
    "docs/reliability.md": 590,
    "docs/security.md": 1400,
    "docs/your-csv.md": 1100,
}
"""Largest number of words of each document, including code and tables. A new page needs an entry."""
REFERENCES = {"docs" + "/theory.md", "docs/store.md", "docs/api.md"}
"""Pages without a limit. The first name is in two parts, because a citation of that page names a section."""


def count_words(text: str) -> int:
    """Return the number of words; table rules and other marks do not count."""
    return sum(bool(re.search(r"\w", word)) for word in text.split())


@pytest.mark.parametrize("name", LIMITS)
def test_a_document_is_no_longer_than_its_reader_needs(name: str) -> None:
    words = count_words((ROOT / name).read_text(encoding="utf-8"))
    assert words <= LIMITS[name], f"{name} has {words} words, {LIMITS[name]} at most: cut, or move tables to a CSV file"


def test_every_document_has_a_limit() -> None:
    names = {path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]} | {
        "console/README.md"
    }
    assert names - REFERENCES == {name for name in LIMITS if not name.startswith("paper/")}


def test_control_marks_are_no_words() -> None:
    assert count_words("| a | b-c |\n|---|---|\n* d, `e f`\n") == 5
