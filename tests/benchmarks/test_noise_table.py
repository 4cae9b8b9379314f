"""Comparison of `--sigma auto` with a grid: how the figures are computed from draws, and what the results say."""

from __future__ import annotations

import json
import statistics

import numpy as np
import pytest
from noise_choice import RESULTS, judged_best, table


def test_the_best_of_equals_is_not_judged_by_its_luck() -> None:
    """Among twelve equally good sigmas, the best mean is more than 20 % below the true mean, and the judged mean is
    not.
    """
    rng = np.random.default_rng(1)
    lucky, judged = [], []
    for _ in range(200):
        grid = {str(k): rng.geometric(0.1, size=10).tolist() for k in range(1, 13)}
        lucky.append(min(statistics.mean(rounds) for rounds in grid.values()))
        judged.append(judged_best(grid)[1])
    assert statistics.mean(lucky) < 8.0
    assert statistics.mean(judged) == pytest.approx(10.0, abs=0.5)


def test_single_draws_are_judged_as_they_are() -> None:
    assert judged_best({"0.1": [7], "0.2": [5]}) == (0.2, 5.0)


def test_auto_takes_at_most_a_tenth_more_rounds_than_the_best_of_the_grid() -> None:
    results = json.loads(RESULTS.read_text())["tasks"]
    assert len(results) == 14
    for name, result in results.items():
        assert statistics.mean(result["auto"]) <= 1.1 * judged_best(result["grid"])[1], name
    assert "auto / best" in table(results)
