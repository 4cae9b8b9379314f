"""Definition of speed-up, compared with numbers counted by hand."""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from bench_rows import made_up_rows

from sifu_paper.plots.courses import Line
from sifu_paper.plots.speed import SpeedUp, same_seeds, speed_up
from sifu_paper.reading import courses_of, letter_preset, trained_like
from sifu_paper.settings import load_experiment
from sifu_paper.summary import summarise

ROUNDS = {"scratch": (100, 200, 300), "sifu": (50, 50, 300)}


def one_request(rounds: dict[str, tuple[int, ...]] = ROUNDS) -> list[dict[str, object]]:
    """Return the first request of each method by the paper's rules on MNIST, three seeds."""
    rows = [row for row in made_up_rows("sequential") if row["dataset"] == "mnist" and row["request"] == 1]
    return [
        row | {"rounds": rounds[row["method"]][row["seed"] - 1], "extra_rounds": 0}
        for row in rows
        if row["method"] in rounds and row["preset"] == "paper"
    ]


def of(rows: list[dict[str, object]], method: str) -> SpeedUp:
    courses = courses_of(rows)
    return speed_up([course for course in courses if course.first["method"] == method], courses)


def test_it_is_the_median_of_the_ratios_on_equal_seeds() -> None:
    speed = of(one_request(), "sifu")
    assert sorted(speed.ratios) == [1.0, 2.0, 4.0]  # 300/300, 100/50, 200/50
    assert speed.text() == "2x (1 to 4)"
    assert speed.fewer == 0.5
    # It is neither the mean of ratios nor the ratio of means.
    assert speed.median not in (statistics.fmean(speed.ratios), 600 / 400)


def test_rounds_of_calibration_count() -> None:
    rows = [row | {"extra_rounds": 50 if row["method"] == "sifu" else 0} for row in one_request()]
    assert sorted(of(rows, "sifu").ratios) == pytest.approx([300 / 350, 1.0, 2.0])


@pytest.mark.parametrize("method", ["sifu", "scratch"])
def test_a_run_that_did_not_reach_the_target_has_no_ratio(method: str) -> None:
    rows = [row | {"reached": (row["method"], row["seed"]) != (method, 2)} for row in one_request()]
    speed = of(rows, "sifu")
    assert sorted(speed.ratios) == [1.0, 2.0]
    assert speed.missed == (1 if method == "sifu" else 0)
    assert ("did not reach the target (1 of 3)" in speed.text()) == (method == "sifu")


def test_what_never_reached_the_target_has_words_instead_of_a_number() -> None:
    rows = [row | {"reached": row["method"] == "scratch"} for row in one_request()]
    assert of(rows, "sifu").text() == "did not reach the target (3 of 3)"
    (row,) = [
        row for row in summarise(load_experiment("sequential"), rows).rows if row["method"] == "SIFU (paper's rules)"
    ]
    assert row["speed-up"] == "did not reach the target (3 of 3)"
    assert row["rounds"] is None


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 10_000), st.integers(0, 10_000), st.booleans()), min_size=1, max_size=3))
def test_it_agrees_with_another_way_of_counting(runs: list[tuple[int, int, bool]]) -> None:
    rows = []
    for row in one_request({"scratch": (1, 1, 1), "sifu": (1, 1, 1)}):
        if row["seed"] <= len(runs):  # type: ignore[operator]
            scratch, own, reached = runs[row["seed"] - 1]  # type: ignore[operator]
            mine = row["method"] == "sifu"
            rows.append(row | {"rounds": own if mine else scratch, "reached": reached or not mine})
    speed = of(rows, "sifu")
    ratios = sorted(scratch / own if own else math.inf for scratch, own, reached in runs if reached)
    middle = len(ratios) // 2
    expected = None if not ratios else ratios[middle] if len(ratios) % 2 else sum(ratios[middle - 1 : middle + 1]) / 2
    assert speed.median == (None if expected is None else pytest.approx(expected))
    assert (speed.runs, speed.missed) == (len(runs), sum(not reached for *_, reached in runs))


def test_every_row_of_a_data_set_has_the_same_seeds() -> None:
    rows = [row for row in made_up_rows("sequential", seeds=5) if row["preset"] != "ours" or row["seed"] in (2, 3, 4)]
    summary = summarise(load_experiment("sequential"), rows)
    assert {row["seeds"] for row in summary.rows} == {3}
    assert summary.note == "Seeds 2 to 4."
    elsewhere = [row | {"preset": "authors"} for row in made_up_rows("sequential", seeds=5) if row["preset"] != "ours"]
    both = summarise(load_experiment("sequential"), [*rows, *elsewhere])
    seeds = {row["method"]: row["seeds"] for row in both.rows}
    assert (seeds["Scratch"], seeds["Scratch (authors)"]) == (3, 5)  # each kind of training has its own seeds
    assert both.note == "Seeds 2 to 4 (trained as paper), 1 to 5 (trained as authors)."


def test_a_method_with_too_few_seeds_is_left_out_and_named() -> None:
    rows = [row for row in made_up_rows("sequential", seeds=5) if row["method"] != "dp" or row["seed"] == 1]
    same = same_seeds([course for course in courses_of(rows) if course.first["dataset"] == "mnist"])
    assert (same.seeds, [line.method for line in same.left_out]) == ({"paper": (1, 2, 3, 4, 5)}, ["dp"])
    summary = summarise(load_experiment("sequential"), rows)
    assert all(row["method"] != "DP" for row in summary.rows)
    assert "too few of them for DP, left out" in summary.note


def test_scratch_is_never_left_out() -> None:
    """Without Scratch no row would have a speed-up, so the table uses the seeds that Scratch has."""
    rows = [row for row in made_up_rows("sequential", seeds=3) if row["method"] != "scratch" or row["seed"] != 3]
    summary = summarise(load_experiment("sequential"), rows)
    assert {row["seeds"] for row in summary.rows} == {2}
    assert summary.note == "Seeds 1 to 2."
    assert all(row["speed-up"] != "-" for row in summary.rows)


def test_the_quickest_stands_first_and_what_missed_the_target_last() -> None:
    rows = summarise(load_experiment("sequential"), made_up_rows("sequential")).rows
    methods = [row["method"] for row in rows if row["data"] == "CIFAR-10"]
    assert methods[0] == "Fine-Tuning"
    assert methods.index("SIFU (paper's rules)") < methods.index("Scratch") < methods.index("FedEraser")
    assert set(methods[-3:]) == {"Last (paper's rules)", "Last (our rules)", "DP"}


def test_scratch_of_another_training_is_no_yardstick() -> None:
    rows = one_request() + [row | {"preset": "elsewhere"} for row in one_request() if row["method"] == "sifu"]
    courses = courses_of(rows)
    foreign = speed_up([course for course in courses if course.line == Line("sifu", "elsewhere")], courses)
    assert foreign.runs == 0
    own = rows + [row | {"preset": "elsewhere", "rounds": 500} for row in one_request() if row["method"] == "scratch"]
    courses = courses_of(own)
    speed = speed_up([course for course in courses if course.line == Line("sifu", "elsewhere")], courses)
    assert sorted(speed.ratios) == pytest.approx([500 / 300, 10.0, 10.0])
    assert Line("scratch", "elsewhere").label == "Scratch (elsewhere)"


def test_presets_that_only_promise_otherwise_share_scratch() -> None:
    assert trained_like("ours") == trained_like("paper") == "paper"
    assert trained_like("authors_ours") == trained_like("authors") == "authors"
    rows = one_request()
    assert letter_preset(rows) == "paper"
    several = [*rows, *({**row, "preset": preset} for row in rows for preset in ("authors_unclipped", "authors"))]
    assert letter_preset(several) == "authors"
