"""Every script, table and image that a document names exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(
    r"(?<![\w/.-])((?:benchmarks|console|tests|src|examples|paper|docs|\.ci)/[\w./-]+\.(?:py|csv|md|json|toml|png|svg|ipynb))"
)


def missing_paths(text: str, home: Path = ROOT) -> Iterator[str]:
    """Yield named files that exist neither in the repository nor in the folder of the document."""
    for name in NAMED.findall(text):
        if not (ROOT / name).exists() and not (home / name).exists():
            yield name


def test_every_named_file_exists() -> None:
    documents = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        ROOT / "Makefile",
        ROOT / "console" / "README.md",
        ROOT / "paper" / "README.md",
        *ROOT.glob("src/**/*.py"),
        *ROOT.glob("console/src/**/*.py"),
    ]
    missing = {
        f"{document.relative_to(ROOT)}: {name}"
        for document in documents
        for name in missing_paths(document.read_text(encoding="utf-8"), document.parent)
    }
    assert not missing


def defences(text: str) -> list[str]:
    """Return the test that each row of the threat model names, as `file.py::function`, or an empty string."""
    table = text.split("| threat | defence | test |\n|---|---|---|\n")[1].split("\n\n")[0]
    return ["".join(re.findall(r"`([\w/]+\.py::\w+)` \|$", row)) for row in table.splitlines()]


def test_every_row_of_the_threat_model_names_a_test_that_exists() -> None:
    named = defences((ROOT / "docs" / "security.md").read_text(encoding="utf-8"))
    assert len(named) <= 25
    for name in named:
        file, _, function = name.partition("::")
        path = ROOT / file if file.startswith("console/") else ROOT / "tests" / file
        assert f"\ndef {function}(" in path.read_text(encoding="utf-8"), name


def test_control_a_row_without_a_test_is_noticed() -> None:
    assert defences("| threat | defence | test |\n|---|---|---|\n| a | b | `x.py` |\n| a | b | `y.py::z` |\n\n") == [
        "",
        "y.py::z",
    ]


def test_control_a_deleted_script_is_noticed() -> None:
    assert list(missing_paths("see `python benchmarks/never_was.py`")) == ["benchmarks/never_was.py"]
