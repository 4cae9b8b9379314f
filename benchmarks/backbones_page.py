"""Tables of benchmarks/results/backbones.csv in the documents.

python benchmarks/backbones_page.py      # writes README.md, docs/closed-form.md and docs/related-work.md
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "backbones.csv"
BEGIN, END = "<!-- begin: benchmarks/backbones_page.py -->\n", "<!-- end: benchmarks/backbones_page.py -->\n"
HEADER = (
    "| data | clients | features | penalty | runs | accuracy | level | seconds a request | MB on disk |\n"
    "|---|---|---|---|---|---|---|---|---|\n"
)
LEAVERS = ("0", "1", "5", "20")
DEEP = ("dirichlet 0.3", "deep", "0.01")
"""Partition, setup and penalty of the figures in README.md and docs/related-work.md."""
Rows = list[dict[str, str]]


def read_rows() -> Rows:
    """Return the rows of the committed table."""
    with RESULTS.open(encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def by_leavers(rows: Rows) -> dict[tuple[str, ...], dict[str, dict[str, str]]]:
    """Return the rows by task, partition, setup and penalty, then by the number of clients that left."""
    measured: dict[tuple[str, ...], dict[str, dict[str, str]]] = defaultdict(dict)
    for row in rows:
        measured[row["task"], row["partition"], row["setup"], row["penalty"]][row["leavers"]] = row
    return measured


def table_lines(rows: Rows) -> list[str]:
    """Return one line of the table in docs/closed-form.md for each task, partition, setup and penalty."""
    return [
        f"| {' | '.join(key)} | {after['0']['seeds']} | "
        f"{', '.join(after[leavers]['accuracy'] if leavers in after else '-' for leavers in LEAVERS)} | "
        f"{after['1']['level']} | {after['1']['forget_seconds'] or '-'} | {after['0']['megabytes']} |\n"
        for key, after in by_leavers(rows).items()
        if {"0", "1"} <= after.keys()
    ]


def between(page: str, text: str) -> str:
    """Return the page with `text` between its two markers."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}{text}{END}{rest.partition(END)[2]}"


def in_guide(page: str, rows: Rows) -> str:
    """Return docs/closed-form.md with the table of all rows."""
    return between(page, f"\n{HEADER}{''.join(table_lines(rows))}\n")


def in_readme(page: str, rows: Rows) -> str:
    """Return README.md with the figures for one client that leaves CIFAR-10."""
    after = by_leavers(rows)["cifar10", *DEEP]
    seeds = "one seed" if after["1"]["seeds"] == "1" else f"{after['1']['seeds']} seeds"
    figures = (
        f"| held-out accuracy, one round of training | {after['0']['accuracy']} % |\n"
        f"| held-out accuracy after one client was forgotten | {after['1']['accuracy']} % |\n"
        f"| rounds, seconds and level of that request | 0, {after['1']['forget_seconds']}, `{after['1']['level']}` |\n"
    )
    source = f"[measured](docs/closed-form.md#how-accurate-how-fast), {seeds}, {after['1']['hardware']}"
    return between(page, f"\n| CIFAR-10, 100 clients, frozen public backbone | {source} |\n|---|---|\n{figures}\n")


def in_related_work(page: str, rows: Rows) -> str:
    """Return docs/related-work.md with the row of deep features after one client left."""
    measured = by_leavers(rows)
    cells = [measured[task, *DEEP].get("1", {}).get("accuracy", "") for task in ("cifar10", "cifar100")]
    return re.sub(
        r"(?m)^(\| `sifu`, deep features.*\| EfficientNet-Lite0 \| 1 \|).*$",
        lambda match: f"{match[1]} {cells[0]} | {cells[1]} |",
        page,
    )


PAGES: dict[str, Callable[[str, Rows], str]] = {
    "README.md": in_readme,
    "docs/closed-form.md": in_guide,
    "docs/related-work.md": in_related_work,
}
"""Functions that write the measured figures into each document."""


def write_pages() -> None:
    """Write the figures of the committed rows into the documents."""
    for name, written in PAGES.items():
        path = ROOT / name
        path.write_text(written(path.read_text(encoding="utf-8"), read_rows()), encoding="utf-8")


if __name__ == "__main__":
    write_pages()
