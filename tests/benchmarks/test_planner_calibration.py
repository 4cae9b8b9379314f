"""Predicted rounds on tasks drawn by a seed: the committed report, and a few tasks drawn and measured again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from choices.planner_calibration import RESULTS, Calibration, draw_task, measure, summary

PAGE = Path(__file__).resolve().parents[2] / "docs" / "noise.md"


def test_the_committed_report_holds_what_the_page_says() -> None:
    content = json.loads(RESULTS.read_text(encoding="utf-8"))
    report = Calibration.of(content["4"]["rows"])
    assert report.tasks >= 40
    assert 0.75 <= report.coverage <= 0.90
    assert 0.9 <= report.median_ratio <= 1.1
    page = PAGE.read_text(encoding="utf-8")
    for seed, part in content.items():
        assert summary(int(seed), part["rows"]) in page, seed


def test_a_task_depends_on_its_seed_and_number_alone() -> None:
    assert draw_task(7, 3, data=False) == draw_task(7, 3, data=False)
    assert len({draw_task(7, number, data=False).clients for number in range(20)}) > 10
    for number in range(200):
        task = draw_task(11, number, data=True)
        assert 50 <= task.clients <= 1000
        assert 1.0 <= task.epsilon <= 10.0
        assert 1 <= task.leaving <= 10 < task.clients


def test_control_hopeful_predictions_are_seen() -> None:
    rows = [{"predicted": 10, "interval": [8, 12], "rounds": [15, 16, 17]}] * 40
    hopeful = Calibration.of(rows)
    assert hopeful.coverage == 0.0
    assert hopeful.median_ratio == pytest.approx(1.6)


@pytest.mark.slow
def test_intervals_hold_on_newly_drawn_tasks(tmp_path: Path) -> None:
    """The intervals hold on ten new tasks of digits and synthetic data with two draws each; the thresholds only catch a
    broken forecast.
    """
    rows = [measure(draw_task(29, number, data=False), tmp_path, None, 2) for number in range(10)]
    report = Calibration.of(rows)
    assert report.tasks >= 8
    assert report.coverage >= 0.55
    assert 0.6 <= report.median_ratio <= 1.6
