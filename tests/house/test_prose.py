"""Documents stay short, and the words of a dialect that a native speaker would notice only get fewer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMITS = {
    "README.md": 900,
    "CHANGELOG.md": 550,
    "SECURITY.md": 300,
    "CONTRIBUTING.md": 1000,
    "paper/README.md": 1500,
    "docs/audit.md": 1000,
    "docs/closed-form.md": 1200,
    "docs/console.md": 1400,
    "docs/flower-app.md": 600,
    "docs/flower.md": 2300,
    "docs/frozen-features.md": 650,
    "docs/guide.md": 2500,
    "docs/new-method.md": 600,
    "docs/noise.md": 1200,
    "docs/performance.md": 1200,
    "docs/reliability.md": 1200,
    "docs/security.md": 2500,
    "docs/tuned-networks.md": 1300,
    "docs/your-csv.md": 1100,
}
"""The most words of each document, code and tables included."""
THEORY = "docs" + "/theory.md"  # in two parts, because a citation of the page names a section
WHOLE = {THEORY, "docs/store.md", "docs/api.md"}
"""Two references without a limit, and a page that is made from docstrings."""
MOST_WORDS = 20_000
"""Of all documents with a limit together."""

DIALECT = (
    "nobody",
    "whoever",
    "somebody",
    "so many",
    "by itself",
    "at hand",
    "beside",
    "of its own",
    "goes on",
    "pays",
)
IN_SOURCE = {
    "nobody": 0,
    "whoever": 0,
    "somebody": 0,
    "so many": 0,
    "by itself": 0,
    "at hand": 0,
    "beside": 0,
    "of its own": 0,
    "goes on": 0,
    "pays": 0,
}
"""How often each of them may stand in src: lower a number when you rewrite sentences, never raise one."""
IN_REFERENCES = {
    "nobody": 0,
    "whoever": 0,
    "somebody": 0,
    "so many": 0,
    "by itself": 0,
    "at hand": 0,
    "beside": 0,
    "of its own": 1,
    "goes on": 0,
    "pays": 0,
}
"""The same of the two references without a limit."""
ENDINGS = {".py", ".html", ".toml", ".css", ".js", ".sql"}


def dialect_counts(texts: Iterable[str]) -> dict[str, int]:
    """How often each word of the dialect stands in the texts, line breaks ignored."""
    flat = [re.sub(r"\s+(?:#\s+|\*\s+)?", " ", text) for text in texts]
    return {word: sum(len(re.findall(rf"\b{word}\b", text, re.I)) for text in flat) for word in DIALECT}


def source_texts() -> Iterable[str]:
    for path in sorted((ROOT / "src").rglob("*")):
        if path.suffix in ENDINGS and path.is_file():
            yield path.read_text(encoding="utf-8")


ELSEWHERE = 66
"""How often words of the dialect may stand in tests, benchmarks and the paper's package together: as names of clients
that do not exist, and in this file."""


def texts_elsewhere() -> Iterable[str]:
    for folder in ("tests", "benchmarks", "paper/src", "paper/tests"):
        yield from (path.read_text(encoding="utf-8") for path in sorted((ROOT / folder).rglob("*.py")))


def document(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def words_of(name: str) -> int:
    """Words of a document; the lines of a table and other marks are none."""
    return sum(bool(re.search(r"\w", word)) for word in document(name).split())


@pytest.mark.parametrize("name", LIMITS)
def test_a_document_is_no_longer_than_its_reader_needs(name: str) -> None:
    words = words_of(name)
    assert words <= LIMITS[name], f"{name} has {words} words, {LIMITS[name]} at most: cut, or move tables to a CSV file"


def test_every_document_has_a_limit_and_together_they_stay_short() -> None:
    names = {path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]}
    assert names - WHOLE == set(LIMITS) - {"paper/README.md"}
    assert sum(map(words_of, LIMITS)) <= MOST_WORDS


@pytest.mark.parametrize("name", LIMITS)
def test_documents_are_in_plain_english(name: str) -> None:
    counts = {word: count for word, count in dialect_counts([document(name)]).items() if count}
    assert not counts, f"{name}: rewrite the sentences with {', '.join(counts)} as you would say them to a colleague"


def test_the_dialect_only_gets_rarer_in_source_and_references() -> None:
    references = [document(THEORY), document("docs/store.md")]
    for texts, limits in ((source_texts(), IN_SOURCE), (references, IN_REFERENCES)):
        more = {word: count for word, count in dialect_counts(texts).items() if count > limits[word]}
        assert not more, f"{more}: rewrite the sentences as you would say them to a colleague"


def test_the_dialect_stays_rare_in_tests_and_benchmarks() -> None:
    counts = dialect_counts(texts_elsewhere())
    assert sum(counts.values()) <= ELSEWHERE, f"{counts}: rewrite the sentences as you would say them to a colleague"


def test_control_a_sentence_of_the_dialect_is_seen_over_a_line_break() -> None:
    text = "Nobody knows, so\n    # many say; it stands beside\nwhat goes\non by\n  itself."
    counts = dialect_counts([text])
    assert {word for word, count in counts.items() if count} == {"nobody", "so many", "beside", "goes on", "by itself"}
