"""The table of docs/release-noise.md equals the measurements, and so does its stated cost of noise."""

from __future__ import annotations

import csv
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _measured() -> dict[tuple[str, str, float], dict[str, float]]:
    with (ROOT / "benchmarks/results/release_noise.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    figures = ("accuracy", "without_noise", "best", "distance", "noise")
    return {
        (row["task"], row["hides"], float(row["epsilon"])): {name: float(row[name]) for name in figures} for row in rows
    }


def test_the_page_quotes_the_measurements() -> None:
    page = (ROOT / "docs/release-noise.md").read_text(encoding="utf-8")
    quoted = re.findall(r"(?m)^\| [^|]+((?:\| \d+\.\d )+)\|$", page)
    shown = {tuple(float(figure) for figure in re.findall(r"\d+\.\d", row)) for row in quoted}
    measured = _measured()
    expected = set()
    for task in {task for task, _, _ in measured}:
        record = measured[task, "record", 3.0]
        clients = [measured[task, "client", epsilon] for epsilon in (3.0, 10.0)]
        figures = [record["best"], record["without_noise"], record["accuracy"], *(each["accuracy"] for each in clients)]
        expected.add(tuple(round(100.0 * figure, 1) for figure in figures))
    assert shown == expected


def test_noise_alone_hides_a_record_for_at_most_two_points() -> None:
    for (task, hides, epsilon), row in _measured().items():
        if (hides, epsilon) == ("record", 3.0):
            assert row["without_noise"] - row["accuracy"] <= 0.02, task
