"""The loops against the program that made the results, on the digits with three seeds.

`old_results.json` has mean, smallest and largest of what that program measured at commit 40586ff7: the rounds of all
requests, and accuracies after the last one. A mean of the loops has to be within smallest and largest, widened by a
fifth of their distance on either side. Draws are keyed alike, so most values are equal. By our rules only `sequential`
is compared: that program drew such noise from the operating system, and chose sigma by another rule.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sifu_paper import jobs
from sifu_paper.experiment import Options
from sifu_paper.methods import METHODS
from sifu_paper.table import Row

OLD = json.loads(Path(__file__).with_name("old_results.json").read_text(encoding="utf-8"))
WIDENED = 0.2
ASKED: dict[str, dict[str, Any]] = {
    "sequential": {"presets": ("paper", "ours")},
    "letter": {"presets": ("authors", "authors_unclipped"), "methods": ("sifu", "scratch", "fed_eraser")},
    "watermark": {"presets": ("paper",), "methods": ("sifu", "scratch", "fine_tuning")},
    "time-limited": {"presets": ("paper",), "methods": ("sifu", "fed_accum"), "where": {"limit": (0.25, 0.5)}},
    "sigma": {"presets": ("paper",), "methods": ("sifu",), "where": {"sigma_factor": (0.01, 1.0)}},
    "request-sets": {"presets": ("paper",), "methods": ("sifu", "noisy_scratch"), "where": {"set": (3.0,)}},
    "psi-alpha": {"where": {"rate_factor": (1.0,), "momentum": (0.9,), "steps": (1.0, 5.0)}},
}


def measured_by_the_loops(name: str, out: Path) -> list[Row]:
    chosen = Options(name, out, seeds=(1, 2, 3), datasets=("digits",))
    result = jobs.run(replace(chosen, **ASKED[name]), ("sifu-bench",), say=lambda text: None)
    assert not result.failures, result.failures
    return result.rows


def by_line(rows: Sequence[Row]) -> dict[str, list[list[Row]]]:
    """Return the rows of each seed, by preset, method and variant."""
    found: dict[str, dict[int, list[Row]]] = {}
    for row in rows:
        place = (row["preset"], row["method"], row["variant"])
        key = " | ".join(place) if row["method"] else row["variant"]
        found.setdefault(key, {}).setdefault(row["seed"], []).append(row)
    return {key: list(seeds.values()) for key, seeds in found.items()}


def outside(old: Mapping[str, Sequence[float]], seeds: Sequence[Sequence[Row]]) -> list[str]:
    """Return the columns whose mean over seeds is outside the old range, widened."""
    wrong = []
    for column, (_, low, high) in old.items():
        if column == "rounds":
            values = [float(sum(row["rounds"] + row["extra_rounds"] for row in rows)) for rows in seeds]
        else:
            values = [rows[-1][column] for rows in seeds]
        mean, room = sum(values) / len(values), WIDENED * (high - low) + 1e-3
        if not low - room <= mean <= high + room:
            wrong.append(f"{column}: {mean:.4g} is not in {low:.4g} to {high:.4g}")
    return wrong


@pytest.mark.parametrize("name", sorted(ASKED))
def test_the_loops_measure_what_the_old_program_did(name: str, tmp_path: Path) -> None:
    lines = by_line(measured_by_the_loops(name, tmp_path / "out"))
    assert set(lines) <= set(OLD[name])
    assert all(len(seeds) == 3 for seeds in lines.values())
    wrong = {key: found for key, seeds in lines.items() if (found := outside(OLD[name][key], seeds))}
    assert not wrong
    if name == "sequential":
        assert {key.split(" | ")[1] for key in lines} >= set(METHODS)


def test_control_another_method_is_noticed(tmp_path: Path) -> None:
    """Fine-Tuning in place of Scratch: its rounds and accuracies are not those of Scratch."""
    chosen = Options("sequential", tmp_path / "out", (1, 2, 3), datasets=("digits",), presets=("paper",))
    rows = jobs.run(replace(chosen, methods=("fine_tuning",)), ("sifu-bench",), say=lambda text: None).rows
    assert len(outside(OLD["sequential"]["paper | scratch | "], by_line(rows)["paper | fine_tuning | "])) >= 3
