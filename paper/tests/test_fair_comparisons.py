"""Comparisons on the page use the same runs, and name what they leave out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from bench_rows import made_up_rows

from sifu_paper.plots.growing import settings_of
from sifu_paper.reading import courses_of
from sifu_paper.settings import load_experiment
from sifu_paper.summary import summarise

NONE_AFTER_DIVERGING = {"accuracy_retain_after": None, "accuracy_forget_after": None, "level": "diverged"}


def limited_rows(sifu_diverges: bool) -> list[dict[str, Any]]:
    """Return FashionMNIST with two seeds: SIFU may diverge with seed 2; Scratch is 10 points below, 40 with seed 1."""
    rows = []
    for row in made_up_rows("time-limited", seeds=2):
        if row["dataset"] != "fashion_mnist" or (row["method"], row["preset"]) not in (
            ("sifu", "paper"),
            ("scratch", "paper"),
        ):
            continue
        limited, first = bool(row["variant"]), row["seed"] == 1
        below = 0.05 if row["method"] == "sifu" else 0.40 if first else 0.10
        row |= {"accuracy_retain_after": 0.9 - (below if limited else 0.0), "accuracy_forget_after": 0.0}
        rows.append(row | (NONE_AFTER_DIVERGING if sifu_diverges and row["method"] == "sifu" and not first else {}))
    return rows


def test_the_best_sigma_in_hindsight_is_of_the_draws_that_all_sigmas_have() -> None:
    rows = [
        row for row in made_up_rows("scale", seeds=4) if row["seed"] == 1 or "sigma_scale=0.7" not in row["variant"]
    ]
    for setting in settings_of(courses_of(rows)):
        assert setting.automatic is not None
        assert setting.hindsight is not None
        assert (setting.automatic.runs, setting.hindsight.runs) == (4, 1)
    table = summarise(load_experiment("scale"), rows).rows
    assert {(row["draws"], row["tried"]) for row in table} == {(4, "4 (1 draw)")}


def test_requests_that_left_no_group_are_counted_below_the_table() -> None:
    rows = made_up_rows("groups", seeds=2)
    assert "no group without a leaver" not in summarise(load_experiment("groups"), rows).note
    hit = [row for row in rows if row["method"] == "groups" and row["leavers"] == 5 and row["seed"] == 2]
    hit[0]["groups_left"] = 0
    summary = summarise(load_experiment("groups"), rows)
    assert "1 request left no group without a leaver" in summary.note
    assert {row["seeds"] for row in summary.rows} == {1, 2}
