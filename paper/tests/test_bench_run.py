"""Experiments on digits: run, interrupted and resumed, failing in part, through the command line."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from run_tools import Command
from sifu_paper import engines as engines_module
from sifu_paper import runner as runner_module
from sifu_paper.engines import in_threads
from sifu_paper.options import Options, parse_seeds
from sifu_paper.runner import Bench, Update
from sifu_paper.table import read_table


def options(out: Path, name: str = "sequential", **more: Any) -> Options:
    chosen = {"seeds": (1,), "scale": "smoke", "datasets": ("digits",), "methods": ("sifu", "scratch"), "device": "cpu"}
    return Options(name, out, **(chosen | more))


def comparable(out: Path) -> list[dict[str, Any]]:
    """Return the table without columns that may differ between two runs of the same experiment."""
    rows = [{key: value for key, value in row.items() if key != "seconds"} for row in read_table(out / "results.csv")]
    return sorted(rows, key=lambda row: tuple(str(row[key]) for key in ("method", "preset", "variant", "request")))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run three requests by sifu and scratch under the paper's rules, whose seeded noise makes them repeatable."""
    out = tmp_path_factory.mktemp("bench") / "finished"
    result = Bench(options(out, presets=("paper",))).run()
    assert not result.failures
    return out


def test_a_run_leaves_a_row_for_every_request_and_no_run_folders(finished: Path) -> None:
    rows = read_table(finished / "results.csv")
    assert [(row["method"], row["request"]) for row in rows] == [
        ("training", 0),
        *(("sifu", k) for k in (1, 2, 3)),
        *(("scratch", k) for k in (1, 2, 3)),
    ]
    assert not any((finished / "runs").iterdir())
    for row in rows[1:]:
        assert row["rounds"] >= 1
        assert row["clients"] == 2
        assert 0.0 <= row["accuracy_forgotten_after"] <= 1.0
        assert row["extra_rounds"] == 0
        assert row["local_steps"] == row["rounds"] * 4 * 2  # four clients a round, two steps each
        assert row["bytes_sent"] == row["rounds"] * 4 * 2 * 650 * 4
    assert {row["level"] for row in rows if row["method"] == "sifu"} <= {"none", "exact"}


def test_running_it_again_does_nothing(finished: Path) -> None:
    before = (finished / "results.csv").read_bytes()
    result = Bench(options(finished, presets=("paper",))).run()
    assert (finished / "results.csv").read_bytes() == before
    assert not result.failures


def test_an_experiment_can_be_repeated_in_a_folder_that_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bench: Command
) -> None:
    """The user's file of known keys would refuse the second experiment, whose runs replace those of the first."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    command = ("run", "sequential", "--scale", "smoke", "--datasets", "digits", "--methods", "sifu", "--device", "cpu")
    for _ in range(2):
        monkeypatch.delenv("SIFU_KNOWN_KEYS", raising=False)
        answer = bench(*command, "--no-plots", "--out", str(tmp_path / "results"))
        assert answer.code == 0, answer
        assert not (tmp_path / "user").exists()
        shutil.rmtree(tmp_path / "results")


def test_interrupted_again_and_again_it_ends_with_the_same_table(finished: Path, tmp_path: Path) -> None:
    out, interruptions = tmp_path / "interrupted", 0
    for _ in range(60):
        left = [5]

        def interrupt(update: Update, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] <= 0:
                raise KeyboardInterrupt

        try:
            Bench(options(out, presets=("paper",)), interrupt).run()
            break
        except KeyboardInterrupt:
            interruptions += 1
    assert interruptions >= 5
    assert comparable(out) == comparable(finished)
    assert not any((out / "runs").iterdir())


def test_what_a_killed_session_left_is_removed_unless_it_was_to_be_kept(finished: Path, tmp_path: Path) -> None:
    for kept in (False, True):
        out = tmp_path / str(kept)
        shutil.copytree(finished, out)
        left = out / "runs" / "train--digits--seed1--paper--shared"
        left.mkdir(parents=True)
        if kept:
            Bench(options(out, presets=("paper",), keep_runs=True, command=("sifu", "--keep-runs"))).run()
        Bench(options(out, presets=("paper",))).run()
        assert left.exists() == kept


def test_a_folder_of_another_scale_is_refused(finished: Path) -> None:
    from sifu.errors import InputError

    with pytest.raises(InputError, match="was made with scale = 'smoke'"):
        Bench(options(finished, scale="paper", presets=("paper",), max_rounds=1)).run()


def test_what_fails_is_recorded_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = runner_module.TrajectoryRun

    def failing(trajectory: Any, *rest: Any) -> Any:
        if trajectory.spec.privacy.accounting == "round":
            raise RuntimeError("the lights went out")
        return plain(trajectory, *rest)

    monkeypatch.setattr(runner_module, "TrajectoryRun", failing)
    result = Bench(options(tmp_path / "out")).run()
    assert [failure.task.name for failure in result.failures] == ["digits--seed1--ours--sifu"]
    assert "the lights went out" in (tmp_path / "out" / "failures.txt").read_text()
    done = {(row["method"], row["preset"]) for row in result.table.rows}
    assert ("scratch", "paper") in done
    assert ("sifu", "ours") not in done
    monkeypatch.undo()
    again = Bench(options(tmp_path / "out")).run()
    assert not again.failures
    assert ("sifu", "ours") in {(row["method"], row["preset"]) for row in again.table.rows}


def test_a_training_that_diverges_is_a_result_and_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sifu.api import Run
    from sifu.errors import RoundRejectedError
    from sifu_paper.figures import write_figures

    plain = Run.forget

    def diverging(self: Run, clients: Any, request: str, **terms: Any) -> Any:
        if request == "request-2" and terms["method"] == "sifu":
            raise RoundRejectedError("NaN")
        return plain(self, clients, request, **terms)

    monkeypatch.setattr(Run, "forget", diverging)
    result = Bench(options(tmp_path / "out", presets=("paper",))).run()
    assert not result.failures
    rows = [row for row in result.table.rows if row["method"] == "sifu"]
    assert [row["level"] == "diverged" for row in rows] == [False, True, True]
    assert [(row["rounds"], row["reached"]) for row in rows[1:]] == [(6, False)] * 2
    write_figures(tmp_path / "out")


def test_watermarks_are_measured_before_and_after(tmp_path: Path) -> None:
    result = Bench(options(tmp_path / "out", "watermark", methods=("scratch",), presets=("paper",))).run()
    rows = [row for row in result.table.rows if row["method"] == "scratch"]
    assert len(rows) == 3
    assert all(row["mark_before"] is not None and row["mark_after"] is not None for row in rows)


def test_the_scale_experiment_is_proven_and_its_figure_is_drawn(tmp_path: Path) -> None:
    from sifu_paper.figures import write_figures

    result = Bench(options(tmp_path / "out", "scale", datasets=())).run()
    assert not result.failures
    sifu = [row for row in result.table.rows if row["method"] == "sifu"]
    assert {row["level"] for row in sifu} <= {"proven", "exact"}
    assert any(row["level"] == "proven" for row in sifu)
    assert all(path.stat().st_size > 10_000 for path in write_figures(tmp_path / "out"))


def test_distances_are_measured_and_never_above_the_honest_bound(tmp_path: Path) -> None:
    result = Bench(options(tmp_path / "out", "psi-alpha", methods=())).run()
    assert not result.failures
    measured = [row for row in result.table.rows if row["distance"]]
    assert measured
    # Without momentum and below 2/beta, B = 1 is a theorem for softmax regression.
    tame = [row for row in measured if "momentum=0 " in row["variant"] and "rate_factor=0.2" in row["variant"]]
    assert tame
    assert all(row["distance"] <= row["psi_round"] for row in tame)


def test_lanes_give_the_same_table(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trajectories run in threads, each with an engine that is closed at the end, and give the same table."""
    from sifu_paper.engines import Lanes

    lanes: list[Any] = []

    class OneLane:
        """Federation that records when it is closed."""

        def __init__(self, federation: Any) -> None:
            self._federation = federation

        def __getattr__(self, name: str) -> Any:
            return getattr(self._federation, name)

        def close(self) -> None:
            lanes.append(self)

    def lane_engines(federations: Any, clients: Any, device: str, precision: str) -> list[Any]:
        assert (device, precision) == ("cuda", "float32")
        assert len(federations) == len(clients)
        return [OneLane(federation) for federation in federations]

    monkeypatch.setattr(engines_module, "lane_engines", lane_engines)
    monkeypatch.setattr(runner_module, "engine_source", lambda *_: (Lanes(_[2], "cuda", 2), "cpu"))
    result = Bench(options(tmp_path / "lanes", presets=("paper",))).run()
    assert not result.failures
    assert len(lanes) == 3  # one training, two trajectories
    # Engines from outside sifu are a premise, so only the level of these lanes differs.
    for row, same in zip(comparable(tmp_path / "lanes"), comparable(finished), strict=True):
        assert row | {"level": same["level"]} == same


def test_max_rounds_is_laid_over_every_spec_and_lowers_the_least(tmp_path: Path) -> None:
    work = Bench(options(tmp_path, scale="paper", datasets=("mnist", "digits"), max_rounds=20)).work()
    limits = {
        training.dataset: (training.spec.stop.min_rounds, training.spec.stop.max_rounds) for training in work.trainings
    }
    assert limits == {"mnist": (20, 20), "digits": (10, 20)}


class LoneEngine:
    """Engine that counts how often it is closed."""

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


class NamedTask:
    def __init__(self, name: str) -> None:
        self.name, self.spec = name, None


def test_in_threads_a_failure_ends_one_task_and_closes_its_engine() -> None:
    engines = [LoneEngine() for _ in range(3)]
    meeting = threading.Barrier(3, timeout=20)

    def work(task: NamedTask, engine: LoneEngine) -> None:
        meeting.wait()  # waits until all of them run concurrently
        if task.name == "b":
            raise ValueError("no")

    pairs = [(NamedTask(name), engine) for name, engine in zip("abc", engines, strict=True)]
    failures = in_threads(pairs, work, threading.Event())  # type: ignore[type-var, arg-type]
    assert [failure.task.name for failure in failures] == ["b"]
    assert "ValueError: no" in failures[0].trace
    assert [engine.closed for engine in engines] == [1, 1, 1]


def test_in_threads_the_next_task_begins_when_one_is_done_and_none_after_a_stop() -> None:
    engines, stop = [LoneEngine() for _ in range(6)], threading.Event()
    begun: list[str] = []
    meeting = threading.Barrier(2, timeout=20)

    def work(task: NamedTask, engine: LoneEngine) -> None:
        begun.append(task.name)
        meeting.wait()  # always two at a time
        if task.name in "cd":
            stop.set()
            meeting.wait()

    pairs = [(NamedTask(name), engine) for name, engine in zip("abcdef", engines, strict=True)]
    assert in_threads(pairs, work, stop, 2) == []  # type: ignore[type-var, arg-type]
    assert sorted(begun) == ["a", "b", "c", "d"]
    assert [engine.closed for engine in engines] == [1] * 6


def test_the_command_line_runs_plots_and_makes_an_appendix(bench: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "bench-sequential"
    arguments = ("--scale", "smoke", "--datasets", "digits", "--methods", "sifu,scratch,dp", "--preset", "paper")
    answer = bench("run", "sequential", *arguments, "--out", out, "--device", "cpu", "--format", "json")
    assert answer.code == 0, answer.err
    assert answer.json["rows"] >= 7
    assert {row["method"] for row in answer.json["summary"]} >= {"SIFU (paper's rules)", "Scratch"}
    assert [Path(path).name for path in answer.json["figures"]] == ["sequential.png", "sequential.svg"]
    assert bench("plot", "sequential", "--out", out).code == 0
    (page,) = bench("appendix", out, "--out", tmp_path / "results", "--format", "json").json["pages"]
    assert "A smoke run" in Path(page).read_text()
    assert (tmp_path / "results" / "sequential.png").exists()
    assert (tmp_path / "results" / "tables" / "sequential.csv").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("run", "nothing"), "is not known"),
        (("run", "sequential", "--seeds", "x"), "--seeds 'x' is not understood"),
        (("run", "sequential", "--scale", "huge"), "'huge' is not one of"),
        (("run", "sequential", "--datasets", "minst"), "did you mean mnist"),
        (("run", "sequential", "--methods", "magic"), "method 'magic' is not known"),
        (("run", "sequential", "--preset", "theirs"), "preset 'theirs' is not known"),
        (("run", "sequential", "--device", "tpu"), "'tpu' is not one of"),
        (("run", "sequential", "--precision", "f16"), "'f16' is not one of"),
        (("run", "sequential", "--data", "nowhere"), "the data folder nowhere does not exist"),
        (("plot", "sequental"), "did you mean sequential"),
        (("plot", "sequential"), "holds no results"),
        (("appendix", "nowhere"), "holds no results"),
        (("appendix",), "there are no results here"),
    ],
)
def test_bad_input_is_refused_with_a_sentence(
    arguments: tuple[str, ...],
    sentence: str,
    bench: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = bench(*arguments)
    assert answer.code == 2
    assert sentence in answer.err
    assert not any(tmp_path.iterdir())


def test_bench_list_names_every_experiment(bench: Callable[..., Any]) -> None:
    names = [experiment["name"] for experiment in bench("list", "--format", "json").json["experiments"]]
    assert "sequential" in names
    assert len(names) == 15
    assert "sequential" in bench("list").out


def test_seeds_are_a_count_or_a_list() -> None:
    assert parse_seeds("2") == (1, 2)
    assert parse_seeds("7,9,7") == (7, 9)


def test_the_mark_of_a_client_that_was_learned_is_found(tmp_path: Path) -> None:
    """The measure is positive for a model that relies on a mark, and zero for one that never saw it."""
    from sifu.core.engine import Position
    from sifu.core.spec import Spec
    from sifu.run.clients_and_engine import clients_from_spec, engine_from_spec

    spec = Spec.from_mapping(
        {
            "data": {"clients": 20, "samples_per_client": 20, "watermark": 10, "partition": "one_class"},
            "local": {"rate": 0.5, "steps": 20},
        }
    )
    engine, _ = engine_from_spec(spec, clients_from_spec(spec))
    fresh, _ = engine_from_spec(spec, clients_from_spec(spec, fresh_marks=True))
    model, everyone, marked = engine.initial_model(0), np.arange(20), np.array([3])
    untouched = engine.evaluate(model, marked).accuracy - fresh.evaluate(model, marked).accuracy
    for number in range(30):
        model = engine.run_round(model, Position(0, number), everyone).model
    gains = [
        engine.evaluate(model, np.array([k])).accuracy - fresh.evaluate(model, np.array([k])).accuracy for k in everyone
    ]
    assert untouched == 0.0
    assert np.mean(gains) > 0.05


def test_a_head_in_closed_form_is_a_way_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "exact"
    sentences: list[str] = []
    result = Bench(options(out, "exact", methods=("closed_form",)), announce=sentences.append).run()
    assert not result.failures
    training, *requests = read_table(out / "results.csv")
    assert (training["variant"], training["rounds"]) == ("kind=closed_form", 1)
    assert training["bytes_sent"] % 20 == 0, "twenty clients send their statistics once"
    assert training["bytes_kept"] > training["bytes_sent"], "everybody's statistics and their sum"
    size, unit = sentences[0].split("at most ")[1].split()[:2]
    named = float(size) * {"GB": 1e9, "MB": 1e6, "kB": 1e3}[unit]
    assert training["bytes_kept"] <= named <= 4 * training["bytes_kept"], "the training's and a copy's room, not packed"
    assert {row["bytes_sent"] for row in requests} == {0}
    assert {row["device"] for row in (training, *requests)} == {"cpu"}
    assert [(row["method"], row["rounds"], row["level"]) for row in requests] == [("closed_form", 0, "exact")] * 2
    assert all(0.0 < row["accuracy_test"] <= 1.0 for row in (training, *requests))
