"""The figures of networks in docs/closed-form.md and docs/related-work.md occur in the measured tables."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
from backbones_page import PAGES, read_rows

ROOT = Path(__file__).resolve().parents[2]
FEDERATIONS = {
    "CIFAR-10, Dirichlet 0.3": "cifar10-0.3",
    "CIFAR-10, iid": "cifar10-iid",
    "CIFAR-10, Dirichlet 0.1": "cifar10-0.1",
    "CIFAR-100, iid": "cifar100-iid",
    "CIFAR-100, Dirichlet 0.3": "cifar100-0.3",
    "FashionMNIST, Dirichlet 0.3": "fashion-0.3",
    "CelebA by people": "celeba",
}
COLUMNS = ("frozen", "blocks", "merge", "tuned again", "tuned again + ridge")


def page(name: str = "closed-form") -> str:
    """Return the text of a page."""
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def tuned_networks() -> dict[tuple[str, str, str], str]:
    """Return the measured accuracy for each federation, column and number of leavers."""
    with (ROOT / "benchmarks" / "results" / "tuned_networks.csv").open(encoding="utf-8") as stream:
        return {(row["federation"], row["way"], row["leavers"]): row["test_accuracy"] for row in csv.DictReader(stream)}


def differing_cells(text: str) -> list[str]:
    """Return the cells of the table of tuned backbones that differ from the CSV file."""
    measured = tuned_networks()
    differing, seen = [], 0
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        name = cells[0].partition(" (")[0]
        if len(cells) != 1 + len(COLUMNS) or name not in FEDERATIONS:
            continue
        seen += 1
        for column, cell in zip(COLUMNS, cells[1:], strict=True):
            expected = [measured[FEDERATIONS[name], column, leavers] for leavers in ("1", "5")]
            if re.findall(r"\d+\.\d", cell) != expected:
                differing.append(f"{name}, {column}: {cell} on the page, {', '.join(expected)} measured")
    assert seen == len(FEDERATIONS)
    return differing


def test_the_table_of_tuned_backbones_is_what_was_measured() -> None:
    assert differing_cells(page()) == []


@pytest.mark.parametrize("name", PAGES)
def test_figures_of_backbones_are_those_of_the_committed_rows(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert PAGES[name](text, read_rows()) == text, "run python benchmarks/backbones_page.py"


def test_related_work_shows_the_frozen_last_layer() -> None:
    (shown,) = [line for line in page("related-work").splitlines() if line.startswith("| `sifu`, last layer")]
    measured = tuned_networks()
    expected = [measured[federation, "frozen", "1"] for federation in ("cifar10-0.3", "cifar100-0.3")]
    assert re.findall(r"\b\d\d\.\d\b", shown) == expected


@pytest.mark.parametrize("name", PAGES)
def test_other_figures_are_noticed(name: str) -> None:
    """Negative control: changed figures are noticed."""
    assert len(differing_cells(page().replace("90.1, 89.9", "91.1, 89.9"))) == 1
    text = (ROOT / name).read_text(encoding="utf-8")
    others = [row | {"accuracy": "12.3"} for row in read_rows()]
    assert PAGES[name](text, others) != text
