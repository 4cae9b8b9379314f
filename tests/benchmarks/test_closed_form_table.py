"""The accuracies on the page about closed-form heads equal the committed rows."""

from __future__ import annotations

import csv
import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TITLES = {
    "mnist": "MNIST",
    "fashion_mnist": "FashionMNIST",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "celeba": "CelebA",
}


DATASETS = tuple(TITLES)


def measured(table: str) -> list[dict[str, str]]:
    with (ROOT / f"paper/results/{table}.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def trainings(name: str, kind: str) -> list[dict[str, str]]:
    rows = [row for row in measured("exact") if (row["dataset"], row["method"]) == (name, "training")]
    return [row for row in rows if row["variant"] == f"kind={kind}"]


def accuracies(name: str, kind: str) -> list[float]:
    return [100.0 * float(row["accuracy_test"]) for row in trainings(name, kind)]


def spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.1f} ({min(values):.1f} to {max(values):.1f})"


@pytest.mark.parametrize("name", DATASETS)
def test_the_table_is_that_of_the_rows(name: str) -> None:
    page = (ROOT / "docs/closed-form.md").read_text()
    networks = trainings(name, "shared")
    assert len(networks) == 3
    assert {row["reached"] for row in networks} == {"yes"}
    rounds = statistics.median(int(row["training_rounds"]) for row in networks)
    (head,) = set(accuracies(name, "closed_form"))
    assert f"| {TITLES[name]} | {spread(accuracies(name, 'shared'))} | {rounds:,.0f} | {head:.1f} |" in page


def test_the_sentences_beside_it_hold() -> None:
    page = " ".join((ROOT / "docs/closed-form.md").read_text().split())
    (celeba,) = set(accuracies("celeba", "closed_form"))
    assert "more accurate on all five data sets on average" in page
    for name in DATASETS:
        assert accuracies(name, "closed_form")[0] > statistics.mean(accuracies(name, "shared"))
        assert name == "celeba" or accuracies(name, "closed_form")[0] > max(accuracies(name, "shared"))
    assert "on CelebA one network was better" in page
    assert sum(accuracy > celeba for accuracy in accuracies("celeba", "shared")) == 1


HOSPITALS = {"cleveland": "Cleveland", "hungarian": "Budapest", "switzerland": "Zurich", "va": "Long Beach"}


def test_hospitals_and_patients_leave_as_the_page_says() -> None:
    page = " ".join((ROOT / "docs/closed-form.md").read_text().split())
    measured = json.loads((ROOT / "benchmarks/results/hospitals.json").read_text())["rows"]
    assert len(measured) == 2 * len(HOSPITALS)
    assert all(row["same_as_never"] and row["verified"] for row in measured)
    assert {(row["level"], row["rounds"]) for row in measured} == {("exact", 0)}
    sentence = page.split("After Cleveland leaves it is ")[1].split(". Every certificate is `exact`, in no round")[0]
    hospitals, patients = sentence.split("; after one patient of any of them ")
    shown = dict(zip(HOSPITALS, re.findall(r"0\.\d{3}", hospitals), strict=True))
    for row in measured:
        *patient, name = row["leaves"].split(" of ")
        areas = patients.split(" or ") if patient else [shown[name]]
        # tolerance for rounding twice
        assert any(abs(float(area) - row["area_after"]) <= 0.00051 for area in areas), row["leaves"]
    for title in list(HOSPITALS.values())[1:]:
        assert f"after {title} " in hospitals


def test_the_costs_are_those_of_the_benchmark() -> None:
    page = (ROOT / "docs/closed-form.md").read_text()
    measured = json.loads((ROOT / "benchmarks/results/closed_form.json").read_text())
    fixed, chosen, sums = measured["runs"]

    def seconds(part: dict[str, Any], what: str) -> str:
        return f"{part[what]['processor_seconds']:.1f}"

    for line, figure in (
        ("features and statistics of all 100 clients, first time", seconds(fixed, "features_and_statistics_of_all")),
        ("the same with kept features", seconds(chosen, "features_and_statistics_of_all")),
        ("forget ten clients, certificate included, r fixed", seconds(fixed, "forget_ten_with_certificate")),
        ("forget ten clients, certificate included, r by", seconds(chosen, "forget_ten_with_certificate")),
        ('forget ten clients with `keep.statistics = "sum"`', seconds(sums, "forget_ten_with_certificate")),
    ):
        shown = next(row for row in page.splitlines() if row.startswith(f"| {line}"))
        assert shown.endswith(f" {figure} |"), line
    assert fixed["features_and_statistics_of_all"]["processor_seconds"] < 60.0
    assert (fixed["rounds"], chosen["rounds"], sums["rounds"]) == (0, 0, 1)
    assert {run["level"] for run in (*measured["runs"], *measured["sums"])} == {"exact"}


def test_requests_of_the_head_stand_next_to_those_of_the_network() -> None:
    page = " ".join((ROOT / "docs/closed-form.md").read_text().split())

    def requests(table: str, method: str, column: str, value: str) -> dict[str, list[dict[str, str]]]:
        rows = [row for row in measured(table) if (row["method"], row[column]) == (method, value)]
        return {name: [row for row in rows if row["dataset"] == name] for name in DATASETS}

    head = requests("exact", "closed_form", "variant", "requests=10x3")
    for rows in head.values():
        assert {(row["rounds"], row["bytes_sent"], row["level"]) for row in rows} == {("0", "0", "exact")}
    seconds = [statistics.median(float(row["seconds"]) for row in rows) for rows in head.values()]
    assert f"a median of {min(seconds):.1f} to {max(seconds):.1f} seconds" in page
    # The network's rows belong to another experiment and may be measured again; only their magnitude matters here.
    network = requests("sequential", "scratch", "preset", "paper")
    for column, unit, pattern in (
        ("rounds", 1.0, r"takes ([\d,]+) to ([\d,]+) rounds per request"),
        ("bytes_sent", 1e9, r"sends ([\d.]+) to ([\d.]+) GB"),
    ):
        means = [statistics.mean(float(row[column]) for row in rows) / unit for rows in network.values()]
        match = re.search(pattern, page)
        assert match is not None
        least, most = (float(number.replace(",", "")) for number in match.groups())
        assert least == pytest.approx(min(means), rel=0.5, abs=0.1)
        assert most == pytest.approx(max(means), rel=0.5, abs=0.1)
