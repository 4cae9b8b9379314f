"""Experiments on digits: run, interrupted, resumed, failing in part and drawn, through the command line's functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from sifu.errors import InputError
from sifu_paper import jobs
from sifu_paper.command import bench
from sifu_paper.experiment import Options
from sifu_paper.experiments import EXPERIMENTS
from sifu_paper.experiments.appendix_a import AFTERWARDS, CLIENTS
from sifu_paper.figures import save
from sifu_paper.methods import METHODS
from sifu_paper.speed import courses_of, summary
from sifu_paper.table import Row, Table, read_table
from sifu_paper.training import DivergedError, EmbeddedTrainer


def options(out: Path, name: str = "sequential", **more: Any) -> Options:
    chosen = {"seeds": (1,), "scale": "smoke", "datasets": ("digits",), "methods": ("sifu", "scratch")}
    return Options(name, out, **(chosen | more))


def run(chosen: Options) -> jobs.Result:
    return jobs.run(chosen, ("sifu-bench",), say=lambda text: None)


def comparable(rows: list[Row]) -> list[Row]:
    """Return rows without the times that they took."""
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bench") / "finished"
    assert not run(options(out)).failures
    return out


def test_every_request_has_a_row_and_nothing_else_is_left(finished: Path) -> None:
    rows = read_table(finished / "results.csv")
    places = [(row["preset"], row["method"], row["number"]) for row in rows]
    assert places == [
        ("paper", "training shared", 0),
        *(("paper", method, number) for method in ("sifu", "scratch") for number in (1, 2, 3)),
        ("ours", "training shared", 0),
        *(("ours", "sifu", number) for number in (1, 2, 3)),
    ]
    assert all(row["clients"] == 2 and row["rounds"] >= 1 for row in rows if row["number"])
    assert not (finished / "unfinished").exists()
    assert len(courses_of(rows)) == len(summary(rows)) == 3


def test_running_it_again_does_nothing(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (finished / "results.csv").read_bytes()
    monkeypatch.setattr("sifu_paper.unlearning.trained", None)
    assert not run(options(finished)).failures
    assert (finished / "results.csv").read_bytes() == before


def test_interrupted_again_and_again_it_ends_with_the_same_table(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sifu_paper.unlearning.SECONDS_BETWEEN_COPIES", 0.0)
    plain, interruptions = EmbeddedTrainer.round, 0
    for _ in range(200):
        left = [7]

        def interrupted(self: EmbeddedTrainer, *arguments: Any, left: list[int] = left) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return plain(self, *arguments)

        monkeypatch.setattr(EmbeddedTrainer, "round", interrupted)
        try:
            run(options(tmp_path / "out"))
            break
        except KeyboardInterrupt:
            interruptions += 1
    assert interruptions >= 4
    assert comparable(read_table(tmp_path / "out" / "results.csv")) == comparable(read_table(finished / "results.csv"))


def test_a_folder_of_another_scale_is_refused(finished: Path) -> None:
    with pytest.raises(InputError, match="smoke"):
        run(options(finished, scale="paper"))


def test_what_fails_is_recorded_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = jobs.run_unit

    def failing(chosen: Options, dataset: str, seed: int, say: Any) -> None:
        if seed == 1:
            raise RuntimeError("the lights went out")
        plain(chosen, dataset, seed, say)

    monkeypatch.setattr(jobs, "run_unit", failing)
    chosen = options(tmp_path / "out", seeds=(1, 2), methods=("scratch",))
    result = run(chosen)
    assert list(result.failures) == ["digits, seed 1"]
    assert "the lights went out" in (tmp_path / "out" / "failures.txt").read_text()
    assert {row["seed"] for row in result.rows} == {2}
    monkeypatch.undo()
    assert {row["seed"] for row in run(chosen).rows} == {1, 2}
    assert not (tmp_path / "out" / "failures.txt").exists()


def test_a_retraining_that_diverges_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = EmbeddedTrainer.round

    def diverging(self: EmbeddedTrainer, model: np.ndarray, place: tuple[int, int], participants: np.ndarray) -> Any:
        if place[0] == 2:
            raise DivergedError
        return plain(self, model, place, participants)

    monkeypatch.setattr(EmbeddedTrainer, "round", diverging)
    result = run(options(tmp_path / "out", methods=("scratch",), presets=("paper",)))
    assert not result.failures
    first, second, third = (row for row in result.rows if row["number"])
    assert first["retain"] is not None
    assert [second["retain"], third["retain"]] == [None, None]
    assert [second["reached"], third["reached"]] == [False, False]
    assert second["rounds"] == third["rounds"] == 6  # the limit


def test_a_partial_last_line_is_dropped(tmp_path: Path) -> None:
    place = {"dataset": "digits", "seed": 1, "preset": "paper", "method": "sifu", "variant": "", "number": 1}
    table = Table(tmp_path / "rows.csv")
    table.add(place | {"psi": 0.1})
    with (tmp_path / "rows.csv").open("a") as stream:
        stream.write("digits,1,paper,si")
    again = Table(tmp_path / "rows.csv")
    again.add(place | {"psi": 0.2})  # there already
    again.add(place | {"number": 2, "psi": 1 / 3})
    assert read_table(tmp_path / "rows.csv") == [place | {"psi": 0.1}, place | {"number": 2, "psi": 1 / 3}]


@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_every_experiment_runs_small_and_is_drawn(name: str, tmp_path: Path) -> None:
    experiment = EXPERIMENTS[name]
    few = ("sifu", "scratch") if len(experiment.methods) > 1 else ()
    datasets = () if name == "appendix-a" else ("digits",)
    methods = tuple(METHODS) if name in ("sequential", "watermark") else few
    result = run(options(tmp_path / "out", name, methods=methods, datasets=datasets, presets=experiment.presets[:1]))
    assert not result.failures
    assert result.rows
    save(experiment, result.rows, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 5000


def test_fine_tuning_keeps_the_trace_and_scratch_never_has_one(tmp_path: Path) -> None:
    rows = run(options(tmp_path / "out", "appendix-a", datasets=())).rows
    last = {row["method"]: row for row in rows if row["number"] == AFTERWARDS}
    assert last["fine_tuning"]["trace"] > 0.05
    assert last["scratch"]["trace"] < 1e-12
    assert max(row["error"] for row in last.values()) < 0.02  # both fit the others: no accuracy shows the trace
    assert CLIENTS == 4


def test_the_command_line_runs_draws_and_refuses(tmp_path: Path) -> None:
    def call(*arguments: str) -> Any:
        return CliRunner().invoke(bench, arguments)

    assert "letter-sigma" in call("list").output
    out = ("--out", str(tmp_path / "out"))
    asked = ("run", "sequential", "--scale", "smoke", "--datasets", "digits", "--seeds", "1", *out)
    answer = call(*asked, "--methods", "scratch", "--preset", "paper")
    assert answer.exit_code == 0
    assert "Scratch" in answer.output
    (tmp_path / "out" / "sequential.png").unlink()
    assert call("plot", "sequential", *out).exit_code == 0
    assert (tmp_path / "out" / "sequential.png").exists()
    for wrong in (
        ("plot", "sigma", *out),
        (*asked, "--methods", "magic"),
        ("run", "nothing"),
        (*asked, "--seeds", "x"),
    ):
        assert isinstance(call(*wrong).exception, InputError), wrong
