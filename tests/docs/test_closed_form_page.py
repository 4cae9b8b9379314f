"""The figures of networks in docs/closed-form.md and docs/related-work.md are in the tables that were measured."""

from __future__ import annotations

import csv
import re
from pathlib import Path

from backbones_page import read_rows, table_lines, table_on

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


def unmeasured_lines(text: str) -> list[str]:
    """Return the lines of the generated table that no row of backbones.csv gives."""
    _, _, *shown = table_on(text).strip().splitlines(keepends=True)
    assert shown
    return [line for line in shown if line.strip() not in {line.strip() for line in table_lines(read_rows())}]


def test_the_table_of_tuned_backbones_is_what_was_measured() -> None:
    assert differing_cells(page()) == []


def test_the_generated_table_is_what_was_measured() -> None:
    assert unmeasured_lines(page()) == [], "run python benchmarks/backbones_page.py"


def test_related_work_shows_what_was_measured() -> None:
    (last,) = [line for line in page("related-work").splitlines() if line.startswith("| `sifu`, last layer")]
    (deep,) = [line for line in page("related-work").splitlines() if line.startswith("| `sifu`, deep features")]
    measured = tuned_networks()
    expected = [measured[federation, "frozen", "1"] for federation in ("cifar10-0.3", "cifar100-0.3")]
    assert re.findall(r"\b\d\d\.\d\b", last) == expected
    deepest = {
        row["task"]: row["accuracy"]
        for row in read_rows()
        if (row["partition"], row["setup"], row["penalty"], row["leavers"]) == ("dirichlet 0.3", "deep", "0.01", "1")
    }
    for task, figure in zip(("cifar10", "cifar100"), re.findall(r"\b\d\d\.\d\b", deep), strict=False):
        assert figure == deepest[task]


def test_other_figures_are_noticed() -> None:
    """The negative control."""
    assert len(differing_cells(page().replace("90.1, 89.9", "91.1, 89.9"))) == 1
    figure = table_on(page()).strip().splitlines()[-1].split("|")[6].split(",")[0].strip()
    assert unmeasured_lines(page().replace(f"| {figure},", "| 99.9,"))
