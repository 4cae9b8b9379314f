"""The rows of benchmarks/results/backbones.csv as the table of docs/closed-form.md.

python benchmarks/backbones_page.py      # writes the table between the two markers of the page
"""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "backbones.csv"
PAGE = ROOT / "docs" / "closed-form.md"
BEGIN = "<!-- begin: benchmarks/backbones_page.py -->\n"
END = "<!-- end: benchmarks/backbones_page.py -->\n"
HEADER = (
    "\n| data | clients | features | penalty | seeds | accuracy | level | seconds a request | MB on disk |\n"
    "|---|---|---|---|---|---|---|---|---|\n"
)
LEAVERS = ("0", "1", "5", "20")


def table_lines(rows: list[dict[str, str]]) -> list[str]:
    """Return one line of the table for each task, partition, setup and penalty."""
    measured: dict[tuple[str, ...], dict[str, dict[str, str]]] = defaultdict(dict)
    for row in rows:
        measured[row["task"], row["partition"], row["setup"], row["penalty"]][row["leavers"]] = row
    return [
        f"| {' | '.join(key)} | {after['0']['seeds']} | "
        f"{', '.join(after[leavers]['accuracy'] if leavers in after else '-' for leavers in LEAVERS)} | "
        f"{after['1']['level']} | {after['1']['forget_seconds']} | {after['0']['megabytes']} |\n"
        for key, after in measured.items()
        if {"0", "1"} <= after.keys()
    ]


def read_rows() -> list[dict[str, str]]:
    """Return the rows of the committed table."""
    with RESULTS.open(encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def table_on(page: str) -> str:
    """Return what the page has between the two markers."""
    return page.partition(BEGIN)[2].partition(END)[0]


def write_page() -> None:
    """Write the table of the committed rows into the page."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}{HEADER}{''.join(table_lines(read_rows()))}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    write_page()
