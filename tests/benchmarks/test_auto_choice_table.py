"""Comparison of `--method auto` with every single method: the committed table, and a run of the benchmark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from auto_choice import LARGEST_RATIO, RESULTS, measure, ratio_of
from choices.auto_choice_runs import CASES, DRAWN_RUNS, DRAWN_SEED, drawn_case

from sifu.choices import LEVELS

EXACT_BY_RULE = "20.21 mlp 19x60, one class, poisson(0.5), 7 groups, epsilon 3.5, 3 leave"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide.md"


def test_auto_is_never_far_from_the_best_nor_below_the_level() -> None:
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    cases = [*CASES, *(drawn_case(DRAWN_SEED, number) for number in range(DRAWN_RUNS))]
    assert len(rows) >= 40
    assert set(rows) == {case.name for case in cases}
    beyond = {name: ratio_of(row) for name, row in rows.items() if ratio_of(row) > LARGEST_RATIO}
    # Groups of three clients with one class each: `auto` ranks exact methods by a fixed rule, not by predictions.
    assert beyond == {EXACT_BY_RULE: pytest.approx(49.0 / 34.0)}
    assert rows[EXACT_BY_RULE]["auto"] == "groups"
    for name, row in rows.items():
        assert LEVELS.index(row["level"]) >= LEVELS.index(row["least_level"]), name
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    within = len(rows) - len(beyond)
    assert f"On {len(rows)} small runs" in page
    assert f"at most {LARGEST_RATIO:g} times the rounds of the best method on {within}" in page
    assert f"{ratio_of(rows[EXACT_BY_RULE]):.2f} times on the remaining one" in page


def test_a_drawn_run_depends_on_its_seed_and_number_alone() -> None:
    cases = [drawn_case(3, number) for number in range(60)]
    assert cases == [drawn_case(3, number) for number in range(60)]
    assert len({case.name for case in cases}) == 60
    assert {case.spec["model"]["kind"] for case in cases if "model" in case.spec} == {"mlp", "cnn", "ridge"}
    assert any("groups" in case.spec for case in cases)
    for case in cases:
        assert 1 <= case.leaving <= case.spec["data"]["clients"] // 4
        assert (case.pilot_rounds == 0) == (case.spec.get("model", {}).get("kind") == "ridge")


def test_control_the_slowest_way_is_seen() -> None:
    row = {"auto": "scratch", "rounds": {"scratch": [99], "sifu": [4, 4]}}
    assert ratio_of(row) == pytest.approx(20.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["softmax 50x30 iid", "mlp 40x40, five groups", "ridge 40x40"])
def test_a_run_of_the_table_is_repeated(tmp_path: Path, name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    row = measure(case, tmp_path / "run", draws=3)
    assert ratio_of(row) <= 1.5
    assert LEVELS.index(row["level"]) >= LEVELS.index(row["least_level"])
