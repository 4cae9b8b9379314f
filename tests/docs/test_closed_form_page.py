"""Accuracies of tuned networks in the documents agree with the committed tables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from backbones_page import PAGES, read_rows

ROOT = Path(__file__).resolve().parents[2]


def percents(text: str) -> list[str]:
    """Return the accuracies that the section on tuned backbones states."""
    return re.findall(r"(\d+\.\d) %", text.partition("**When is it worth it?**")[2].partition("## ")[0])


def measured(task: str, setup: str) -> str:
    """Return the accuracy of a setup after training."""
    (row,) = [row for row in read_rows() if (row["task"], row["setup"], row["leavers"]) == (task, setup, "0")
              and row["partition"] == "dirichlet 0.3"]  # fmt: skip
    return row["accuracy"]


def test_the_worth_of_tuning_is_what_was_measured() -> None:
    setups = ("cifar10 blocks", "cifar10 deep", "cifar100 blocks", "cifar100 deep", "cifar100 blocks 4096")
    text = (ROOT / "docs" / "closed-form.md").read_text(encoding="utf-8")
    assert percents(text) == [measured(*name.split(" ", 1)) for name in setups]
    assert percents(text.replace("92.5 %", "93.5 %")) != percents(text)


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
