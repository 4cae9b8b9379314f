"""The experiment `metrics`: models that forget are close to Scratch, others are far, and the
experiment can be resumed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from bench_rows import made_up_rows

from sifu_paper.metric_runs import distances
from sifu_paper.options import Options
from sifu_paper.runner import Bench
from sifu_paper.settings import load_experiment
from sifu_paper.summary import summarise
from sifu_paper.table import Row, read_table

SEEDS = (1, 2)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("metrics") / "finished"
    result = Bench(Options("metrics", out, SEEDS, "smoke", device="cpu")).run()
    assert not result.failures, result.failures[0].trace
    return out


def over_all(rows: list[Row]) -> dict[str, Row]:
    return {row["method"]: row for row in rows if row["request"] == 0}


def test_every_method_has_its_runs_and_a_row_over_all(finished: Path) -> None:
    rows = read_table(finished / "results.csv")
    methods = {"not_forgotten", "scratch", "sifu", "fine_tuning", "groups", "closed_form"}
    assert set(over_all(rows)) == methods
    for method in methods | {"reference"}:
        assert {row["seed"] for row in rows if row["method"] == method and row["request"]} == set(SEEDS)
    levels = {row["method"]: row["level"] for row in rows if row["request"]}
    assert (levels["scratch"], levels["closed_form"], levels["fine_tuning"]) == ("exact", "exact", "none")
    assert not (finished / "runs").exists()


def test_an_exact_head_is_at_distance_zero_and_a_model_before_the_request_knows_its_clients(finished: Path) -> None:
    rows = read_table(finished / "results.csv")
    head = over_all(rows)["closed_form"]
    assert [head[name] for name in ("klom_forgotten", "klom_test", "epsilon_median")] == [0.0, 0.0, 0.0]
    assert head["forgetting_quality"] == 1.0
    assert all(row["relearn_rounds"] == 0 for row in rows if row["method"] == "not_forgotten" and row["request"])


def test_what_is_there_is_not_done_again(finished: Path) -> None:
    before = (finished / "results.csv").read_bytes()
    Bench(Options("metrics", finished, SEEDS, "smoke", device="cpu")).run()
    assert (finished / "results.csv").read_bytes() == before


def test_distances_know_models_that_remember_from_models_that_do_not() -> None:
    generator = np.random.default_rng(1)

    def models(shift: float) -> dict[str, np.ndarray]:
        kinds = {"forgotten": shift, "remaining": 0.0, "test": 0.0}
        return {kind: generator.normal(size=(40, 30)) + move for kind, move in kinds.items()}

    near, far = distances(models(0.0), models(0.0)), distances(models(3.0), models(0.0))
    assert far["klom_forgotten"] > 2 * near["klom_forgotten"]
    assert far["klom_remaining"] == pytest.approx(near["klom_remaining"], rel=0.3)
    assert near["tpr_at_1"] < 0.05 < 0.5 < far["tpr_at_1"]
    assert far["forgetting_quality"] < 0.5 * near["forgetting_quality"]


def test_the_table_is_sorted_by_distance() -> None:
    table = summarise(load_experiment("metrics"), made_up_rows("metrics")).rows
    assert [row["method"] for row in table][-2:] == ["Fine-Tuning", "Not forgotten"]
    last = table[-1]
    assert (last["KLoM forgotten"], last["gap forgotten"], last["relearn"]) == ("4.00 (8.00)", "+40.0", "0")
