"""The automatic sigma and the expected rounds of plans."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import runs
import sifu
from run_tools import Command, copy_run, small_spec, state
from sifu.planning.rounds import FirstTraining
from sifu.run.run_view import RunView
from sifu.theory.automatic_noise import SIGMA_STEP, expected_rounds, noise_to_signal, rounded_up_sigma
from sifu.theory.rollback import is_allowed, least_noise

SPEC = small_spec(
    data={"clients": 40, "samples_per_client": 10}, local={"steps": 10}, stop={"target": 0.93, "max_rounds": 300}
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planning") / "run"
    sifu.train(SPEC, run=folder)
    return folder


@pytest.fixture(scope="module")
def after_one(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = copy_run(trained, tmp_path_factory.mktemp("planning") / "later")
    sifu.open_run(folder).forget(["client-000"], epsilon=20.0)
    return folder


@given(st.floats(1e-9, 1e9))
def test_a_sigma_is_rounded_up_by_less_than_a_step(noise_std: float) -> None:
    assert noise_std <= rounded_up_sigma(noise_std) <= noise_std * SIGMA_STEP * (1 + 1e-9)


rounds = st.integers(1, 1000)


@given(rounds, rounds, st.integers(0, 1000), st.floats(0.0, 10.0), st.floats(0.0, 1.0))
def test_more_noise_never_takes_fewer_rounds_and_never_more_than_a_fresh_model(
    training: int, undone: int, done: int, ratio: float, errors: float
) -> None:
    expected = expected_rounds(training, undone, done, ratio, errors)
    assert expected <= expected_rounds(training, undone, done, 1.5 * ratio, errors) <= training
    assert expected <= expected_rounds(training, undone + 1, done, ratio, errors)
    assert expected == expected_rounds(training, undone, done, ratio, errors / 2) or errors > 0.05


def test_noise_is_compared_with_the_distance_that_training_covered() -> None:
    assert noise_to_signal(0.5, 10.0, 100) == pytest.approx(0.5)
    assert noise_to_signal(0.5, 10.0, 100, earlier_energy=0.75) == pytest.approx(1.0)
    assert noise_to_signal(0.5, 1.0, 100, earlier_energy=0.75) == math.inf
    assert noise_to_signal(0.0, 0.0, 100) == 0.0


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 5.0, 30.0])
def test_auto_takes_the_least_noise_of_the_model_with_the_fewest_rounds(trained: Path, epsilon: float) -> None:
    run = sifu.open_run(trained)
    plan = run.plan(["client-001"], method="sifu", epsilon=epsilon)
    view = RunView(run.reader())
    exposures, first = view.exposures(plan.subjects), FirstTraining.of(view)
    for depth in view.kept:
        noise_std = rounded_up_sigma(least_noise(exposures, depth))
        assert plan.rounds <= max(1, round(first.rounds_from(view, depth, noise_std)))
    assert is_allowed(exposures, plan.source_depth, plan.noise_std)
    if plan.noise_std > 0.0:
        assert not is_allowed(exposures, plan.source_depth, plan.noise_std / SIGMA_STEP / 1.001)
    if epsilon == 0.01:  # noise would drown every model
        assert (plan.source_depth, plan.noise_std, plan.level, plan.rounds) == (0, 0.0, "exact", first.rounds)


def test_a_later_request_counts_earlier_noise(after_one: Path) -> None:
    view = RunView(sifu.open_run(after_one).reader())
    (edge,) = (depth for depth, _ in view.path.noise_depths)
    assert view.path.noise_energy(edge - 1) == 0.0
    assert view.path.noise_energy(view.path.tip) == pytest.approx(view.path.nodes[edge].noise_std ** 2)


def test_without_a_target_every_method_runs_max_rounds_so_auto_takes_an_exact_one(tmp_path: Path, cli: Command) -> None:
    folder = runs.own("trained", tmp_path)
    asked = ("--client", "client-003", "--format", "json")
    plan = json.loads(cli("plan", folder, *asked).out)
    assert {way["rounds"] for way in plan["ways"] if way["allowed"]} == {plan["rounds"]} == {8}
    assert plan["level"] == "exact"
    sifu.train(small_spec(stop={"target": 0.01}), run=tmp_path / "reached")
    reached = json.loads(cli("plan", tmp_path / "reached", *asked).out)
    assert min(way["rounds"] for way in reached["ways"] if way["allowed"]) < 8, "control: a target ends training"
    (outcome,) = json.loads(cli("forget", folder, *asked).out)["requests"]
    assert outcome["rounds"] == 8


def test_the_status_shows_budgets(trained: Path, after_one: Path) -> None:
    assert sifu.open_run(trained).status().budgets == ()
    run = sifu.open_run(after_one)
    (line,), (charge,) = run.status().budgets, run.reader().charges()
    assert line.clients == ("client-000",)
    assert line.used == pytest.approx(charge.charge)
    assert line.left == pytest.approx(line.budget - line.used)


def test_a_plan_changes_nothing(after_one: Path) -> None:
    before = state(after_one)
    sifu.open_run(after_one).plan(["client-004", "client-005"])
    assert state(after_one) == before


def test_the_command_shows_methods_sources_and_rounds(after_one: Path, cli: Command) -> None:
    shown = cli("plan", after_one, "--clients", "client-002,client-003", "--all").out
    for words in ("start from", "a fresh model", "about", "Nothing was changed"):
        assert words in shown
    assert cli("plan", after_one).code == 2
