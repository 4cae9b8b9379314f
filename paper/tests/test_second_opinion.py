"""Runs with requests by baselines, checked by the second verifier."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.verify.test_independent_verifier import Runs, make_run

import sifu
from sifu_verifier import verify

pytestmark = pytest.mark.long
RUNS: Runs = {
    "fed_eraser, again, then sifu": (
        {"keep": {"updates_every": 2}, "server": {"participation": "poisson(0.3)", "rate": 0.8}},
        [
            (0, 2, {"method": "fed_eraser"}),
            (2, 1, {"method": "fed_eraser", "max_rounds": 3, "retention": "strict"}),
            (3, 2, {"method": "fed_accum"}),
            (5, 1, {}),
            (6, 1, {"sigma": 0.4}),
        ],
    ),
    "scratch, then fed_accum": (
        {"keep": {"updates_every": 1}, "model": {"dtype": "float32"}},
        [
            (0, 1, {"method": "scratch"}),
            (1, 2, {"method": "fed_accum", "unit": "joint"}),
            (3, 1, {"method": "fed_eraser"}),
        ],
    ),
    "every method on one history": (
        {},
        [
            (0, 1, {"method": "fine_tuning"}),
            (1, 2, {"sigma": 0.6}),
            (3, 1, {"method": "last"}),
            (4, 2, {"method": "last", "unit": "joint", "sigma": 500.0}),
            (6, 1, {"method": "fine_tuning", "retention": "strict"}),
            (7, 1, {"sigma": 0.4}),
            (8, 1, {"method": "noisy_scratch", "sigma": 0.3}),
            (9, 1, {"method": "noisy_scratch"}),
            (10, 1, {}),
        ],
    ),
    "replays between methods with noise and without": (
        {"keep": {"updates_every": 2}, "server": {"clip": 0.4, "noise": 3.0}},
        [
            (0, 1, {"method": "fine_tuning"}),
            (1, 1, {"method": "fed_eraser"}),
            (2, 1, {"method": "dp", "level": "none"}),
            (3, 1, {"method": "fine_tuning", "retention": "strict"}),
            (4, 1, {"sigma": 0.5}),
            (5, 1, {"method": "fed_accum"}),
            (6, 1, {"method": "fine_tuning"}),
            (7, 1, {"method": "noisy_scratch", "sigma": 0.2}),
            (8, 1, {"method": "dp", "level": "none"}),
        ],
    ),
    "dp, weights of unequal size": (
        {"data": {"clients": 16, "samples_per_client": 0, "partition": "dirichlet", "alpha": 2.0}}
        | {"server": {"participation": "poisson(0.6)", "clip": 0.5, "noise": 4.0}},
        [
            (0, 1, {"method": "dp", "level": "none"}),
            (1, 2, {"method": "dp", "unit": "joint", "epsilon": 3.0, "level": "none"}),
            (3, 1, {"sigma": 2.0}),
            (4, 1, {"method": "dp", "epsilon": 0.1, "level": "none"}),
            (5, 1, {"method": "last"}),
            (6, 1, {"method": "dp", "calibration": "classical", "level": "none"}),
        ],
    ),
    "dp, fixed, float32": (
        {"model": {"dtype": "float32"}, "server": {"participation": "fixed(6)", "clip": 0.5, "noise": 3.0}},
        [
            (0, 1, {"method": "dp", "level": "none"}),
            (1, 1, {"method": "noisy_scratch"}),
            (2, 1, {"method": "dp", "level": "none"}),
        ],
    ),
}


@pytest.mark.parametrize("name", list(RUNS))
def test_the_second_opinion_agrees(tmp_path: Path, name: str) -> None:
    folder = make_run(tmp_path / "run", name, RUNS)
    assert sifu.open_run(folder).verify().problems == []
    assert verify(folder) == []
