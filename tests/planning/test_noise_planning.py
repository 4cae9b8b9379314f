"""The planner: predictions, the choice of noise, budgets over a sequence, both units, and advice before training."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sifu
from run_tools import copy_run, small_spec, state
from sifu.advice.advisor import advise
from sifu.core.spec import Spec
from sifu.planning.forecast import Forecast, Prediction
from sifu.planning.noise_options import SIGMA_LADDER, on_ladder
from sifu.planning.outlook import influence
from sifu.run.psi_of_everyone import track_everyone
from sifu.run.run_view import RunView
from sifu.theory.rollback import is_allowed

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
@settings(derandomize=True, deadline=None)
def test_a_rung_is_at_or_above_and_never_more_than_a_step_away(noise_std: float) -> None:
    assert noise_std <= on_ladder(noise_std) <= noise_std * SIGMA_LADDER * (1 + 1e-9)


def test_an_interval_holds_its_prediction() -> None:
    for rounds in (0.3, 1.0, 7.4, 500.0):
        prediction = Prediction.of(rounds * np.array([0.2, 0.9, 1.1, 1.8]))
        assert 1 <= prediction.interval[0] <= prediction.rounds <= prediction.interval[1]


def test_predictions_grow_with_noise_and_fall_with_what_was_learned(trained: Path) -> None:
    view = RunView(sifu.open_run(trained).reader())
    forecast = Forecast(view)
    assert forecast.scratch().rounds == view.path.tip
    noises = [forecast.expected(view.path.tip, sigma) for sigma in (0.0, 0.01, 0.1, 1.0)]
    assert noises == sorted(noises)
    assert noises[0] == 0.0
    nodes = [forecast.expected(depth, 0.05) for depth in sorted(view.kept)]
    assert nodes == sorted(nodes, reverse=True)


def test_without_a_target_nothing_is_predicted_but_a_noise_is_chosen(tmp_path: Path) -> None:
    run = sifu.train(small_spec(), run=tmp_path / "run")
    plan = run.plan(["client-003"])
    assert plan.predicted_rounds is None
    assert plan.predicted_interval is None
    assert plan.source_node is not None


def test_auto_takes_the_option_that_promises_fewest_rounds(trained: Path) -> None:
    plan = sifu.open_run(trained).plan(["client-001"], epsilon=30.0)
    best = min(option.expected for option in plan.options)
    chosen = next(
        option for option in plan.options if (option.depth, option.noise_std) == (plan.source_depth, plan.noise_std)
    )
    assert chosen.expected <= 1.1 * best
    assert plan.predicted_rounds <= 0.95 * plan.scratch_rounds


def test_every_option_is_allowed_and_leads_to_its_node(trained: Path) -> None:
    run = sifu.open_run(trained)
    plan = run.plan(["client-001"])
    view = RunView(run.reader())
    exposures = view.exposures(plan.subjects)
    for option in plan.options:
        assert is_allowed(exposures, option.depth, option.noise_std, plan.order)
        if option.noise_std > 0.0:
            assert run.plan(["client-001"], sigma=option.noise_std).source_depth == option.depth
            # Negative control: slightly less noise does not suffice for the node.
            less = run.plan(["client-001"], sigma=option.noise_std / SIGMA_LADDER / 1.001)
            assert less.source_depth < option.depth


def test_auto_falls_back_to_the_initial_model_where_noise_would_drown_it(trained: Path) -> None:
    plan = sifu.open_run(trained).plan(["client-001"], epsilon=0.01, delta=1e-6)
    assert plan.source_depth == 0
    assert plan.noise_std == 0.0
    assert plan.level == "exact"
    assert any("Scratch" in note for note in plan.notes)


def test_the_sum_of_the_database_is_psi(trained: Path) -> None:
    view = RunView(sifu.open_run(trained).reader())
    everyone = np.arange(len(view.clients))
    np.testing.assert_allclose(influence(view, view.path.tip), track_everyone(view).total(everyone), rtol=1e-6)
    middle = view.path.tip // 2
    earlier = RunView(view.reader, tip=view.path.nodes[middle].node)
    np.testing.assert_allclose(influence(view, middle), track_everyone(earlier).total(everyone), rtol=1e-6)


def test_influence_where_losses_contract(tmp_path: Path) -> None:
    run = sifu.train(small_spec(local={"weight_decay": 0.05}), run=tmp_path / "run")
    view = RunView(run.reader())
    assert not view.path.constant_when_absent
    everyone = np.arange(len(view.clients))
    np.testing.assert_allclose(influence(view, view.path.tip), track_everyone(view).total(everyone), rtol=1e-9)


def test_the_most_expensive_client_has_the_largest_psi(trained: Path) -> None:
    run = sifu.open_run(trained)
    psi = {client.name: client.psi for client in run.status().clients}
    assert run.most_expensive() == max(psi, key=psi.__getitem__)


def test_budgets_of_those_forgotten_earlier(after_one: Path) -> None:
    run = sifu.open_run(after_one)
    plan = run.plan(["client-002"], epsilon=20.0)
    (line,) = plan.budgets
    (charge,) = run.reader().charges()
    assert line.names == ("client-000",)
    assert line.used == pytest.approx(charge.charge)
    assert line.budget == pytest.approx(1.0 / plan.multiplier**2)
    assert line.left == pytest.approx(line.budget - line.used - line.cost)
    if plan.source_depth > 0 and line.covered:
        assert line.cost == 0.0


def test_the_status_shows_budgets_and_the_outlook(trained: Path, after_one: Path) -> None:
    assert sifu.open_run(trained).status().budgets == ()
    assert sifu.open_run(trained).status().outlook is None
    status = sifu.open_run(after_one).status()
    (line,) = status.budgets
    assert line.left == pytest.approx(line.budget - line.used)
    assert 0 <= status.outlook.fitting <= status.outlook.active == 39


def test_the_outlook_counts_the_clients_that_the_noise_hides(trained: Path) -> None:
    run = sifu.open_run(trained)
    view = RunView(run.reader())
    for sigma in (0.02, 0.05, 0.5):
        plan = run.plan(["client-001"], sigma=sigma)
        if plan.noise_std == 0.0:
            assert plan.outlook is None
            continue
        psi = influence(view, plan.source_depth)
        others = [k for k in range(len(psi)) if view.clients[k].name != "client-001"]
        fitting = sum(psi[k] * plan.multiplier <= sigma for k in others)
        assert (plan.outlook.fitting, plan.outlook.active) == (fitting, len(others))
        bad = len(others) - fitting
        assert plan.outlook.expected_requests == pytest.approx(len(others) if bad == 0 else fitting / (bad + 1))


def test_how_many_more_requests_pay_with_auto(trained: Path) -> None:
    run = sifu.open_run(trained)
    served = [run.plan(["client-001"], sigma=0.2, epsilon=epsilon).outlook.auto_requests for epsilon in (5.0, 50.0)]
    assert 0 <= served[0] <= served[1] <= 50
    assert served[1] > 0


def test_a_reserve_needs_more_noise_and_leaves_budget(trained: Path) -> None:
    run = sifu.open_run(trained)
    least = {reserve: run.plan(["client-001"], reserve=reserve).options[0].noise_std for reserve in (0.0, 0.75)}
    assert least[0.75] == pytest.approx(2.0 * least[0.0], rel=SIGMA_LADDER - 1.0 + 0.01)


@pytest.mark.parametrize("gram_clients", [0, 50])
def test_both_units_and_how_the_joint_one_is_known(tmp_path: Path, gram_clients: int) -> None:
    run = sifu.train(small_spec(keep={"gram_clients": gram_clients}), run=tmp_path / "run")
    plan = run.plan(["client-001", "client-002", "client-003"], sigma=0.3)
    alone, joint = plan.units
    assert (alone.unit, joint.unit) == ("client", "joint")
    assert joint.shared_rounds == 8
    assert joint.gram_rounds == (8 if gram_clients else 0)
    assert joint.psi_now >= alone.psi_now * (1 - 1e-9) or gram_clients
    assert joint.rollback_to <= alone.rollback_to or gram_clients
    assert run.plan(["client-001"], sigma=0.3).units == ()


def test_the_gram_form_is_never_looser_than_the_triangle_bound(tmp_path: Path) -> None:
    clients = ["client-001", "client-002", "client-003"]
    psi = [
        sifu.train(small_spec(keep={"gram_clients": kept}), run=tmp_path / str(kept)).plan(clients, sigma=0.3).units[1]
        for kept in (50, 0)
    ]
    assert psi[0].psi_now < psi[1].psi_now


def test_a_plan_changes_nothing(after_one: Path) -> None:
    before = state(after_one)
    sifu.open_run(after_one).plan(["client-004", "client-005"])
    assert state(after_one) == before


@pytest.mark.long
def test_advice_before_training() -> None:
    spec = Spec.from_mapping(SPEC)
    many = advise(spec, pilot_rounds=5)
    assert many.pilot_rounds <= 5
    assert many.clients_over_law == pytest.approx(40 / (many.multiplier * math.sqrt(650)))
    assert many.level == "proven"
    assert [way.name for way in many.ways] == ["closed form", "plain", "groups"]
    assert all(way.reason for way in many.ways)
    assert many.recommended in {way.name for way in many.ways if way.possible}
    strict = advise(Spec.from_mapping(small_spec(privacy={"epsilon": 0.1})), pilot_rounds=4)
    assert not strict.worthwhile
    assert strict.epsilon_needed is None or strict.epsilon_needed > 0.1
    assert strict.clients_needed > strict.clients


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"server": {"participation": "fixed(6)"}}, "poisson(0.5)"),
        ({"model": {"dtype": "float32"}}, "float64"),
        ({"local": {"rate": 5.0}}, "largest"),
        ({"model": {"kind": "mlp"}, "local": {"rate": 0.05}}, "linear head"),
        ({"privacy": {"epsilon": 0.1}}, "weight_decay"),
    ],
)
def test_advice_suggests_what_to_change(sections: dict, words: str) -> None:
    answer = advise(Spec.from_mapping(small_spec(**sections)), pilot_rounds=3)
    assert any(words in suggestion for suggestion in answer.suggestions), answer.suggestions


def test_the_plan_itself_is_always_among_the_noises_shown(
    after_one: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sifu.cli import plans

    plan = sifu.open_run(after_one).plan(["client-002"])
    assert len(plan.options) > 3
    monkeypatch.setattr(plans, "MOST_OPTIONS", 2)
    for option in plan.options:
        plans.print_curve(dataclasses.replace(plan, source_depth=option.depth, noise_std=option.noise_std))
        assert f"{plans.number(option.noise_std)} *" in capsys.readouterr().out


@pytest.mark.long
def test_the_command_line_shows_it_all(after_one: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from sifu.cli.main import app

    runner = CliRunner()
    picture = tmp_path / "plan.png"
    shown = runner.invoke(
        app, ["plan", str(after_one), "--clients", "client-002,client-003", "--all", "--picture", str(picture)]
    )
    assert shown.exit_code == 0, shown.output
    for words in ("Effect of each noise", "joint", "Budgets of earlier forgotten subjects", "Nothing was changed"):
        assert words in shown.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    planned = runner.invoke(app, ["plan", str(after_one), "--most-expensive", "--format", "json"])
    values = json.loads(planned.stdout)
    assert values["clients"] == [sifu.open_run(after_one).most_expensive()]
    assert values["options"]
    assert values["budgets"][0]["clients"] == ["client-000"]
    spec = tmp_path / "spec.toml"
    assert runner.invoke(app, ["init", str(spec)]).exit_code == 0
    arguments = ["advise", str(spec), "--set", "privacy.epsilon=1", "--set", "data.clients=30", "--format", "json"]
    answer = runner.invoke(app, [*arguments, "--set", "stop.max_rounds=4"])
    assert answer.exit_code == 0, answer.output
    assert json.loads(answer.stdout)["epsilon"] == 1.0
    assert runner.invoke(app, [*arguments[:2], "--set", "stop.max_rounds=3"]).exit_code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--clients", "client-001", "--most-expensive"],
    ],
)
def test_plans_that_are_not_understood_are_refused(trained: Path, arguments: list[str]) -> None:
    from typer.testing import CliRunner

    from sifu.cli.main import app

    assert CliRunner().invoke(app, ["plan", str(trained), *arguments]).exit_code != 0
    assert CliRunner().invoke(app, ["advise", str(trained)]).exit_code != 0
