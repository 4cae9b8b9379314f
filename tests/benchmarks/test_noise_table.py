"""Comparison of `--sigma auto` with a grid: how the figures are computed from draws."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import pytest
from choices.noise_choice_table import Line, judged_best, mean_total, table
from noise_choice import needs_more


def draws(rounds: list[int], predicted: int = 10) -> list[list[dict[str, Any]]]:
    row = {"sigma": 0.1, "rollback_to": 5, "predicted": predicted, "interval": [5, 20], "level": "proven"}
    return [[row | {"rounds": taken, "planning": 0.1}] for taken in rounds]


def test_the_best_of_equals_is_not_judged_by_its_luck() -> None:
    """Among twelve equally good sigmas, the best mean is more than 20 % below the true mean, and the judged mean is
    not.
    """
    rng = np.random.default_rng(1)
    lucky, judged = [], []
    for _ in range(200):
        grid = {k: draws(rng.geometric(0.1, size=10).tolist()) for k in range(1, 13)}
        lucky.append(min(mean_total(repeats) for repeats in grid.values()))
        judged.append(judged_best(grid)[1])
    assert statistics.mean(lucky) < 8.0
    assert statistics.mean(judged) == pytest.approx(10.0, abs=0.5)


def test_single_draws_are_judged_as_they_are() -> None:
    assert judged_best({0.1: draws([7]), 0.2: draws([5])}) == (0.2, 5.0)


def test_draws_go_on_until_the_mean_is_known() -> None:
    assert needs_more(draws([5] * 9), 10)
    assert not needs_more(draws([5] * 10), 10)
    assert needs_more(draws([1, 20] * 5), 10)
    assert not needs_more(draws([1, 20] * 15), 10)
    assert not needs_more(draws([1]), 1)


def test_a_line_of_the_table() -> None:
    result = {
        "task": "a task",
        "scratch": draws([40]),
        "grid": {"0.1": draws([8, 8, 8, 8]), "0.2": draws([30])},
        "auto": draws([6, 10, 24], predicted=10),
    }
    line = Line.of(result)
    assert (line.scratch, line.best, line.best_sigma) == (40.0, 8.0, 0.1)
    assert line.auto == pytest.approx(40 / 3)
    assert (line.within, line.predictions) == (1, 1)
    assert line.covered == pytest.approx(2 / 3)
    text = table([line])
    assert "| a task | 40 | 8.0 (0.1) | 13.3 (0.1) | 1.67 | 0.33 |" in text
    assert "predictions within a factor 1.5: 1 of 1" in text
