"""Table of the results of `noise_choice.py`, and its figure in docs/noise.md."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FIGURE = Path(__file__).resolve().parents[2] / "docs" / "images" / "noise-choice.png"


def total(rows: list[dict[str, Any]]) -> int:
    """Return the total rounds of a sequence."""
    return sum(row["rounds"] for row in rows)


def mean_total(repeats: list[list[dict[str, Any]]]) -> float:
    """Return the mean over repeats of the total rounds of a sequence."""
    return float(statistics.mean(total(repeat) for repeat in repeats))


def judged_best(grid: dict[float, list[list[dict[str, Any]]]]) -> tuple[float, float]:
    """Return sigma and mean rounds of the grid's best, chosen by half of the draws and judged by
    the other, both ways.
    """
    repeated = {sigma: repeats for sigma, repeats in grid.items() if len(repeats) > 1}
    chosen = min(repeated or grid, key=lambda sigma: (mean_total(grid[sigma]), sigma))
    if not repeated:
        return chosen, mean_total(grid[chosen])
    halves = []
    for first in (0, 1):
        best = min(repeated, key=lambda sigma: (mean_total(repeated[sigma][first::2]), sigma))
        halves.append(mean_total(repeated[best][1 - first :: 2]))
    return chosen, statistics.mean(halves)


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    task: str
    scratch: float
    best_sigma: float
    best: float
    auto_sigma: float
    auto: float
    predicted: float | None
    within: int
    predictions: int
    covered: float
    planning: float

    @staticmethod
    def of(result: dict[str, Any]) -> Line:
        """Summarise the measurements of a task."""
        tried = {float(sigma): repeats for sigma, repeats in result["grid"].items() if repeats}
        best_sigma, best = judged_best(tried) if tried else (float("nan"), float("nan"))
        autos = [row for rows in result["auto"] for row in rows]
        inside = [auto["interval"][0] <= auto["rounds"] <= auto["interval"][1] for auto in autos if auto["interval"]]
        pairs = [
            (statistics.mean(row["predicted"] for row in request), statistics.mean(row["rounds"] for row in request))
            for request in zip(*result["auto"], strict=True)
            if all(row["predicted"] is not None for row in request)
        ]
        within = sum(1 for guess, real in pairs if ratio_within(guess, real))
        sums = [sum(row["predicted"] or 0 for row in rows) for rows in result["auto"]]
        return Line(
            result["task"],
            mean_total(result["scratch"]),
            best_sigma,
            best,
            autos[0]["sigma"],
            mean_total(result["auto"]),
            statistics.median(sums) if pairs else None,
            within,
            len(pairs),
            statistics.mean(inside) if inside else float("nan"),
            statistics.median(auto["planning"] for auto in autos if "planning" in auto),
        )


def ratio_within(guess: float, real: float, factor: float = 1.5) -> bool:
    """Return whether a prediction is within a factor of the truth; a difference of one round is always accepted."""
    low, high = sorted((max(guess, 1.0), max(real, 1.0)))
    return high <= factor * low or high - low <= 1.0


def table(lines: list[Line]) -> str:
    """Return the table in Markdown."""
    rows = [
        "| task | Scratch | best of grid (sigma) | auto (first sigma) | auto / best | auto / Scratch | predicted "
        "| within 1.5x | in interval | planning |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        rows.append(
            f"| {line.task} | {line.scratch:g} "
            f"| {line.best:.1f} ({line.best_sigma:.3g}) "
            f"| {line.auto:.1f} ({line.auto_sigma:.3g}) "
            f"| {line.auto / max(line.best, 1):.2f} | {line.auto / max(line.scratch, 1):.2f} "
            f"| {line.predicted if line.predicted is not None else '-'} | {line.within} of {line.predictions} "
            f"| {line.covered:.0%} | {line.planning:.2f} s |"
        )
    ratios = sorted(line.auto / max(line.best, 1.0) for line in lines)
    if ratios:
        within, all_ = sum(line.within for line in lines), sum(line.predictions for line in lines)
        rows += [
            "",
            f"auto / best: median {statistics.median(ratios):.2f}, worst {ratios[-1]:.2f}; auto / Scratch: worst "
            f"{max(line.auto / max(line.scratch, 1) for line in lines):.2f}; predictions within a factor 1.5: "
            f"{within} of {all_}.",
        ]
    return "\n".join(rows)


def draw(results: list[dict[str, Any]], file: Path) -> None:
    """Draw rounds against sigma, one panel per task: means of fixed sigmas, Scratch, and auto with its spread."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    columns = min(4, len(results))
    lines = -(-len(results) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(3.6 * columns, 2.7 * lines), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(results) :]:
        axis.set_visible(False)
    for axis, result in zip(axes.flat, results, strict=False):
        whole = {
            float(sigma): [rows for rows in repeats if not rows[0].get("stopped")]
            for sigma, repeats in result["grid"].items()
        }
        # A stopped sigma has no mean: a gap in the line.
        means = {sigma: mean_total(repeats) if repeats else math.nan for sigma, repeats in sorted(whole.items())}
        axis.plot(list(means), list(means.values()), "o-", color="#4477aa", ms=4, lw=1, label="fixed sigma")
        axis.axhline(mean_total(result["scratch"]), color="#888888", ls="--", lw=1, label="Scratch")
        totals = [total(rows) for rows in result["auto"]]
        chosen = statistics.median(rows[0]["sigma"] for rows in result["auto"]) or min(whole)
        low, high = np.quantile(totals, [0.1, 0.9])
        axis.plot([chosen, chosen], [max(low, 1), max(high, 1)], color="#cc3311", lw=2, alpha=0.5)
        axis.plot([chosen], [statistics.mean(totals)], "*", color="#cc3311", ms=12, label="auto (bar: 10 to 90 %)")
        axis.set(xscale="log", yscale="log", title=result["task"], xlim=(min(whole) / 1.3, max(whole) * 1.3))
        axis.title.set_fontsize(9)
        axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.grid(alpha=0.2)
    axes.flat[0].legend(fontsize=7, loc="best")
    figure.supxlabel("sigma (of the first request)", fontsize=10)
    figure.supylabel("rounds to the target, mean", fontsize=10)
    figure.savefig(file, dpi=130)
    plt.close(figure)
