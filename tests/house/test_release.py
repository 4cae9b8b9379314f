"""The version, its date and its changelog agree, so that any commit can be tagged for a release."""

from __future__ import annotations

import re
from pathlib import Path

import sifu

ROOT = Path(__file__).resolve().parents[2]


def test_changelog_citation_and_package_name_the_same_release() -> None:
    version, date = re.search(r"^## (\S+) \((\d{4}-\d\d-\d\d)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M).groups()  # type: ignore[union-attr]
    citation = (ROOT / "CITATION.cff").read_text()
    assert version == sifu.__version__
    assert f"\nversion: {version}\n" in citation
    assert f"\ndate-released: {date}\n" in citation


def test_the_pages_name_the_wheel_of_this_version() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    wheels = {name for page in pages for name in re.findall(r"sifu_unlearning-[\w.-]+\.whl", page.read_text())}
    assert wheels == {f"sifu_unlearning-{sifu.__version__}-py3-none-any.whl"}
