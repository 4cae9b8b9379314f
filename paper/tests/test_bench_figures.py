"""Figures, statements and the page, from made-up tables whose answers are known."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from bench_rows import made_up_rows, write_results

from sifu_paper.figures import write_figures
from sifu_paper.plots.courses import scratch_beside
from sifu_paper.plots.methods import time_limited_message
from sifu_paper.plots.ways import draw_ways
from sifu_paper.reading import courses_of, results_of
from sifu_paper.settings import experiment_names, load_experiment
from sifu_paper.statements import STATEMENTS, verdicts

DRAWN = [name for name in experiment_names() if not name.startswith("letter-")]
"""Those that are laid over another one are drawn like it."""


@pytest.mark.parametrize("name", DRAWN)
def test_every_experiment_has_a_figure_and_the_same_table_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    folder = write_results(name, tmp_path / name, made_up_rows(name, seeds=2))
    first = [path.read_bytes() for path in write_figures(folder)]
    assert [path.suffix for path in write_figures(folder)] == [".png", ".svg"]
    assert first == [path.read_bytes() for path in write_figures(folder)]
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


def verdict_of(says: str, name: str, rows: list[dict[str, object]]) -> str:
    return next(verdict.word for statement, verdict in verdicts({name: rows}) if statement.says.startswith(says))


def test_statements_recognise_the_papers_own_results() -> None:
    rows = made_up_rows("sequential")
    for says in ("SIFU takes 52 %", "FedEraser takes 12 %", "Fine-Tuning and FedAccum", "DP and Last"):
        assert verdict_of(says, "sequential", rows) == "same"
    distances = made_up_rows("psi-alpha")
    assert verdict_of("Psi >= alpha with B = 1 (weights of the round)", "psi-alpha", distances) == "same"
    assert verdict_of("Psi >= alpha with B = 1 (population", "psi-alpha", distances) == "not the same"


def test_statements_on_limited_time_and_watermarks() -> None:
    limited, marked = made_up_rows("time-limited"), made_up_rows("watermark")
    for row in limited:
        if row["method"] == "sifu" and "limit" in row["variant"]:
            row["accuracy_retain_after"] += 0.005
    outperforms, alone = "with watermarks SIFU outperforms", "in limited time SIFU alone"
    for row in marked:  # Fed-Accum of the made-up table forgets nothing; here it is slow
        if row["method"] == "fed_accum":
            row["rounds"] *= 10
    assert verdict_of(outperforms, "watermark", marked) == "same"
    assert verdict_of(alone, "time-limited", limited) == "same"
    for row in marked:
        if row["method"] == "fed_eraser" and row["dataset"] == "celeba":
            row["rounds"], row["extra_rounds"] = 1, 0
    assert verdict_of(outperforms, "watermark", marked) == "not the same"
    for row in limited:
        if row["method"] == "sifu":
            row["accuracy_retain_after"] -= 0.5
    assert verdict_of(alone, "time-limited", limited) == "not the same"


def test_statements_recognise_the_opposite() -> None:
    rows = made_up_rows("sequential")
    for row in rows:
        row["accuracy_forgotten_after"] = 0.1
        row["reached"] = True
        if row["method"] in ("sifu", "fed_eraser"):
            row["rounds"] = {"sifu": row["training_rounds"], "fed_eraser": 10}[row["method"]]
    for says in ("SIFU takes 52 %", "FedEraser takes 12 %", "Fine-Tuning and FedAccum", "DP and Last"):
        assert verdict_of(says, "sequential", rows) == "not the same"


def test_what_was_not_measured_is_said_to_be() -> None:
    assert all("not measured" in verdict.measured for _, verdict in verdicts({}))
    partly = [row for row in made_up_rows("sequential") if row["method"] in ("sifu", "scratch")]
    verdict_of = dict(
        zip(
            (statement.says for statement in STATEMENTS),
            (verdict for _, verdict in verdicts({"sequential": partly})),
            strict=True,
        )
    )
    assert "not measured" in verdict_of["FedEraser takes 12 % more rounds than Scratch on average"].measured


def test_the_share_of_the_control_is_what_it_is() -> None:
    rows = [row for row in made_up_rows("sequential", seeds=1) if row["request"] == 1]
    rounds = {"scratch": 100, "noisy_scratch": 70, "sifu": 50}
    chosen = [row | {"rounds": rounds[str(row["method"])]} for row in rows if row["method"] in rounds]
    text = next(
        v.measured
        for statement, v in verdicts({"sequential": chosen})
        if statement.says.startswith("how much of the gain")
    )
    assert "30 % fewer rounds, 60 % of what SIFU saves" in text


def test_half_finished_trajectories_are_left_out() -> None:
    rows = made_up_rows("sequential", seeds=1)
    half = [row for row in rows if not (row["method"] == "sifu" and row["dataset"] == "mnist" and row["request"] == 3)]
    courses = [course for course in courses_of(half) if course.first["method"] == "sifu"]
    assert {course.first["dataset"] for course in courses} == {"fashion_mnist", "cifar10", "cifar100", "celeba"}


def measured(says: str, name: str, rows: list[dict[str, object]]) -> str:
    return next(verdict.measured for statement, verdict in verdicts({name: rows}) if statement.says.startswith(says))


def test_a_method_that_diverges_is_not_judged_by_its_other_seeds() -> None:
    limited = made_up_rows("time-limited")
    alone = "in limited time SIFU alone"
    for row in limited:
        if row["method"] == "sifu" and "limit" in str(row["variant"]):
            row["accuracy_retain_after"] += 0.005  # type: ignore[operator]
    assert verdict_of(alone, "time-limited", limited) == "same"
    for row in limited:
        if (row["method"], row["preset"], row["dataset"]) == ("sifu", "paper", "cifar10") and row["seed"] != 1:
            row["accuracy_retain_after"] = row["accuracy_forget_after"] = None
    assert verdict_of(alone, "time-limited", limited) == "not the same"
    assert "the others diverged" in measured(alone, "time-limited", limited)
    courses = [course for course in courses_of(limited) if "limit" in course.variant]
    assert "diverged in" in time_limited_message(courses, scratch_beside(courses_of(limited)))


def test_a_statement_names_the_data_sets_a_method_was_run_on() -> None:
    rows = [row for row in made_up_rows("sequential") if (row["method"], row["dataset"]) != ("dp", "cifar10")]
    text = measured("DP and Last", "sequential", rows)
    assert "runs on CIFAR-10, CIFAR-100; DP" in text
    assert text.endswith("runs on CIFAR-100")


def test_averages_say_what_they_are_without_the_data_sets_that_missed() -> None:
    rows = made_up_rows("sequential")
    for row in rows:
        if (row["method"], row["preset"], row["dataset"]) == ("sifu", "paper", "celeba"):
            row["reached"], row["rounds"] = False, 5000
    verdict = next(v for statement, v in verdicts({"sequential": rows}) if statement.says.startswith("SIFU takes 52 %"))
    where = "on the data sets where every run reached the target (MNIST, FashionMNIST, CIFAR-10, CIFAR-100)"
    assert f"% fewer rounds on average {where}" in verdict.measured
    assert "CelebA did not reach the target (3 of 3)" in verdict.measured
    assert verdict.word == "not the same"  # no average over five data sets was measured
    assert verdict.why == "3 of 15 runs (CelebA) did not reach the target after the paper's noise"
