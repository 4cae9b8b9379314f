"""Every script, table and image that a document names exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(
    r"(?<![\w/.-])((?:benchmarks|tests|src|examples|paper|docs|\.ci)/[\w./-]+\.(?:py|csv|md|json|toml|png|svg|ipynb))"
)


def missing_paths(text: str, home: Path = ROOT) -> Iterator[str]:
    """Yield named files that exist neither in the repository nor in the folder of the document."""
    for name in NAMED.findall(text):
        if not (ROOT / name).exists() and not (home / name).exists():
            yield name


def test_every_named_file_exists() -> None:
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "Makefile", ROOT / "paper" / "README.md"]
    missing = {
        f"{document.relative_to(ROOT)}: {name}"
        for document in documents
        for name in missing_paths(document.read_text(encoding="utf-8"), document.parent)
    }
    assert not missing


def test_every_test_that_shows_a_defence_exists() -> None:
    """The threat model names its tests relative to the folder of tests."""
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(?:tests/)?(\w+(?:/\w+)*/test_\w+\.py)`", text))
    assert len(named) > 30
    assert sorted(name for name in named if not (ROOT / "tests" / name).exists()) == []


def test_control_a_deleted_script_is_noticed() -> None:
    assert list(missing_paths("see `python benchmarks/never_was.py`")) == ["benchmarks/never_was.py"]
