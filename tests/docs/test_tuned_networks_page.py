"""The figures of docs/tuned-networks.md stand in the table that was measured."""

from __future__ import annotations

import csv
import re
from pathlib import Path

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
WAYS = ("frozen", "blocks", "merge", "tuned again", "tuned again + ridge")


def differing_cells(page: str) -> list[str]:
    """Cells of the page's table that are not those of the CSV file."""
    with (ROOT / "benchmarks" / "results" / "tuned_networks.csv").open(encoding="utf-8") as stream:
        measured = {
            (row["federation"], row["way"], row["leavers"]): row["test_accuracy"] for row in csv.DictReader(stream)
        }
    differing, seen = [], 0
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        name = cells[0].partition(" (")[0]
        if len(cells) != 1 + len(WAYS) or name not in FEDERATIONS:
            continue
        seen += 1
        for way, cell in zip(WAYS, cells[1:], strict=True):
            expected = [measured[FEDERATIONS[name], way, leavers] for leavers in ("1", "5")]
            if re.findall(r"\d+\.\d", cell) != expected:
                differing.append(f"{name}, {way}: {cell} on the page, {', '.join(expected)} measured")
    assert seen == len(FEDERATIONS)
    return differing


def test_the_table_is_what_was_measured() -> None:
    assert differing_cells((ROOT / "docs" / "tuned-networks.md").read_text(encoding="utf-8")) == []


def test_another_figure_is_noticed() -> None:
    """The negative control."""
    page = (ROOT / "docs" / "tuned-networks.md").read_text(encoding="utf-8").replace("90.1, 89.9", "91.1, 89.9")
    assert len(differing_cells(page)) == 1
