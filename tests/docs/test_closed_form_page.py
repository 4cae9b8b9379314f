"""Measured figures of backbones in the documents agree with the committed tables."""

from __future__ import annotations

from pathlib import Path

import pytest
from backbones_page import PAGES, read_rows

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", PAGES)
def test_figures_of_backbones_are_those_of_the_committed_rows(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert PAGES[name](text, read_rows()) == text, "run python benchmarks/backbones_page.py"


@pytest.mark.parametrize("name", PAGES)
def test_other_figures_are_noticed(name: str) -> None:
    """Negative control: changed figures are noticed."""
    text = (ROOT / name).read_text(encoding="utf-8")
    others = [row | {"accuracy": "12.3"} for row in read_rows()]
    assert PAGES[name](text, others) != text
