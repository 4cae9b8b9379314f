"""Figures, statements and the page, from invented tables with known answers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from bench_rows import made_up_rows, write_results

from sifu_paper.figures import write_figures
from sifu_paper.plots.courses import matching_scratch
from sifu_paper.plots.methods import time_limited_message
from sifu_paper.plots.ways import draw_ways
from sifu_paper.reading import courses_of, results_of
from sifu_paper.settings import experiment_names, load_experiment

DRAWN = [name for name in experiment_names() if not name.startswith("letter-")]
"""Experiments to draw; those that override another one are drawn like it."""


@pytest.mark.parametrize("name", DRAWN)
def test_every_experiment_has_a_figure_and_the_same_table_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    folder = write_results(name, tmp_path / name, made_up_rows(name, seeds=2))
    first = [path.read_bytes() for path in write_figures(folder)]
    again = write_figures(folder)
    assert [path.suffix for path in again] == [".png", ".svg"]
    assert first == [path.read_bytes() for path in again]
    assert len(first[0]) > 20_000


def test_requests_of_one_client_and_of_ten_are_drawn_apart_and_rounds_only_where_some_way_takes_any() -> None:
    rows = [row for row in made_up_rows("exact", seeds=2) if row["dataset"] in ("mnist", "cifar10")]
    several = draw_ways(results_of(load_experiment("exact"), rows))
    assert len(several.axes) == 4  # two data sets, rounds and accuracy
    closed = [
        row | {"method": "closed_form", "rounds": 0, "extra_rounds": 0, "variant": f"requests={shape}"}
        for row in rows
        if row["method"] == "scratch"
        for shape in ("10x3", "1x50")
    ]
    alone = draw_ways(results_of(load_experiment("exact"), closed))
    assert [axes.get_xlabel() for axes in alone.axes] == ["test accuracy, %"] * 2
    labels = [label.get_text() for label in alone.axes[0].get_yticklabels()]
    assert [label.split(",\n")[1] for label in labels] == [
        "3 requests of 10 clients each",
        "50 requests of one client each",
    ]


@pytest.mark.parametrize("name", DRAWN)
def test_a_table_without_rows_says_so(name: str, tmp_path: Path) -> None:
    write_figures(write_results(name, tmp_path / name, []))


def test_half_finished_trajectories_are_left_out() -> None:
    rows = made_up_rows("sequential", seeds=1)
    half = [row for row in rows if not (row["method"] == "sifu" and row["dataset"] == "mnist" and row["request"] == 3)]
    courses = [course for course in courses_of(half) if course.first["method"] == "sifu"]
    assert {course.first["dataset"] for course in courses} == {"fashion_mnist", "cifar10", "cifar100", "celeba"}


def test_a_method_that_diverges_is_not_judged_by_its_other_seeds() -> None:
    limited = made_up_rows("time-limited")
    for row in limited:
        if (row["method"], row["preset"], row["dataset"]) == ("sifu", "paper", "cifar10") and row["seed"] != 1:
            row["accuracy_retain_after"] = row["accuracy_forget_after"] = None
    courses = [course for course in courses_of(limited) if "limit" in course.variant]
    assert "diverged in" in time_limited_message(courses, matching_scratch(courses_of(limited)))
