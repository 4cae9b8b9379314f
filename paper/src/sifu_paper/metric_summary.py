"""Table of the published metrics: a row for each method, with Scratch's distance to itself first."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from sifu.plots.style import byte_size
from sifu_paper.plots.courses import Line
from sifu_paper.reading import datasets_of, title_of
from sifu_paper.table import Row


def metric_summary(rows: Sequence[Row]) -> tuple[list[dict[str, Any]], str]:
    """Return a table of methods ordered by distance to Scratch, and a note about it."""
    result = []
    for dataset in datasets_of(rows):
        here = [row for row in rows if row["dataset"] == dataset]
        overall = largest_of(here)
        scratch = [row for row in here if row["method"] == "scratch" and row["request"]]
        for row in sorted(overall, key=_distance):
            runs = [run for run in here if run["method"] == row["method"] and run["request"]]
            result.append(_one(dataset, row, runs, scratch))
    note = (
        "Sorted by KLoM on the forgotten. Scratch is compared with other runs of Scratch, and shows what this number "
        "of models makes of no difference at all. Every method is held against those, and a head in closed form "
        "against the head of those who stay."
    )
    return result, note if result else ""


def largest_of(rows: Sequence[Row]) -> list[Row]:
    """Return, for each method, its row over the most models."""
    best: dict[str, Row] = {}
    for row in rows:
        if not row["request"] and (row["method"] not in best or row["models"] > best[row["method"]]["models"]):
            best[row["method"]] = row
    return list(best.values())


def _distance(row: Row) -> tuple[float, str]:
    return row["klom_forgotten"], row["method"]


def _one(dataset: str, row: Row, runs: Sequence[Row], scratch: Sequence[Row]) -> dict[str, Any]:
    levels = Counter(run["level"] for run in runs if run["level"])
    relearn = [math.inf if run["relearn_rounds"] is None else run["relearn_rounds"] for run in runs]
    median = statistics.median(relearn) if relearn else math.inf
    heads = row["method"] == "closed_form"
    return {
        "data": title_of(dataset),
        "method": Line(row["method"], "").label,
        "models": row["models"],
        "KLoM forgotten": f"{row['klom_forgotten']:.2f} ({row['klom_forgotten_95']:.2f})",
        "KLoM remaining": _two(row["klom_remaining"]),
        "KLoM test": _two(row["klom_test"]),
        "epsilon": "inf" if math.isinf(row["epsilon_median"]) else _two(row["epsilon_median"]),
        "quality": _two(row["forgetting_quality"]),
        "TPR at 1 % FPR": None if row["tpr_at_1"] is None else f"{100 * row['tpr_at_1']:.1f} %",
        "relearn": None if heads else "never" if math.isinf(median) else f"{median:g}",
        "gap forgotten": None if heads else _gap(runs, scratch, "accuracy_forgotten_after"),
        "gap test": None if heads else _gap(runs, scratch, "accuracy_test"),
        "rounds": _median(runs, "rounds"),
        "seconds": _median(runs, "seconds"),
        "sent": byte_size(_median(runs, "bytes_sent") or 0),
        "level": ", ".join(f"{count} {level}" for level, count in sorted(levels.items())) or "-",
    }


def _two(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"


def _median(rows: Sequence[Row], name: str) -> float | None:
    values = [row[name] for row in rows if row[name] is not None]
    return statistics.median(values) if values else None


def _gap(runs: Sequence[Row], scratch: Sequence[Row], name: str) -> str | None:
    ours, theirs = _median(runs, name), _median(scratch, name)
    return None if ours is None or theirs is None else f"{100 * (ours - theirs):+.1f}"
