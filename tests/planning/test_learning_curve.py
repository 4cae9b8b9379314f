"""Extrapolated learning curves, rehearsed noise, and the equation that predicts rounds."""

from __future__ import annotations

import math
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sifu
from run_tools import copy_run, small_spec
from sifu.core.engine import Position
from sifu.planning.forecast import LUCK, MOST_LUCK, SCATTER, Forecast
from sifu.planning.measure import ErrorCurve, LearningCurve, rise_of_loss, rises_of_loss
from sifu.run.rehearsal import RATIOS, REHEARSED, rehearse, rehearsed_noises
from sifu.run.run_view import ACTIVE, RunView
from suite_setup import examples

SPEC = small_spec(
    data={"clients": 40, "samples_per_client": 10}, local={"steps": 5}, stop={"target": 0.93, "max_rounds": 300}
)
"""Spec whose training is long enough that rounds are rehearsed at its end."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("curves") / "run"
    sifu.train(SPEC, run=folder)
    return folder


@given(st.floats(0.0, 0.8), st.floats(0.3, 1.2), st.integers(20, 400))
@settings(derandomize=True, deadline=None, max_examples=examples(40))
def test_a_power_law_with_a_floor_is_continued(floor: float, exponent: float, end: int) -> None:
    def truth(n: float) -> float:
        return floor + (1.0 + n) ** -exponent

    curve = LearningCurve.fit(range(end + 1), [truth(n) for n in range(end + 1)])
    assert curve is not None
    for later in (1.2, 1.5, 2.0):
        gone = truth(end) - truth(later * end)
        assert float(curve.loss(end)) - float(curve.loss(later * end)) == pytest.approx(gone, rel=0.3)


def test_a_curve_passes_through_its_points_and_never_rises_past_its_end() -> None:
    losses = [2.3, 1.2, 0.8, 0.65, 0.58, 0.53, 0.5]
    curve = LearningCurve.fit(range(7), losses)
    assert curve is not None
    np.testing.assert_allclose(curve.loss(np.arange(7.0)), losses)
    beyond = curve.loss(np.arange(6.0, 600.0))
    assert np.all(np.diff(beyond) < 0.0)
    assert beyond[-1] >= curve.floor >= 0.0
    left = curve.left(np.arange(0.0, 600.0))
    assert left[0] == 1.0
    assert np.all((left >= 0.0) & (left <= 1.0))


@pytest.mark.parametrize("losses", [[1.0], [1.0, 1.0], [0.5, 0.9], [1.0, math.nan], [1.0, 0.0]])
def test_what_is_no_learning_curve_is_none(losses: list[float]) -> None:
    assert LearningCurve.fit(range(len(losses)), losses) is None


def test_training_ends_with_a_rehearsal_on_the_tip(trained: Path) -> None:
    view = RunView(sifu.open_run(trained).reader())
    (noises,) = rehearsed_noises(view.reader.evaluations()).values()
    node = view.nodes[-1]
    noises.sort(key=lambda pair: pair[0])
    sigmas = [sigma for sigma, _ in noises]
    np.testing.assert_allclose([s * math.sqrt(view.parameters) / node.distance for s in sigmas], list(RATIOS))
    plain = next(
        evaluation
        for evaluation in view.reader.evaluations()
        if evaluation.node == node.node and evaluation.subset == ACTIVE
    )
    rises = [evaluation.loss - plain.loss for _, evaluation in noises]
    assert 0.0 < rises[0] < rises[1] < rises[2]
    for sigma, rise in zip(sigmas, rises, strict=True):
        assert rise_of(trained, sigma) == pytest.approx(rise)
    # Small noise: the loss rises with its square.
    assert rise_of(trained, sigmas[0] / 10.0) == pytest.approx(rises[0] / 100.0)


def rise_of(folder: Path, sigma: float) -> float:
    """Return the rise of the loss under noise `sigma`, as predicted by a forecast of the run."""
    view = RunView(sifu.open_run(folder).reader())
    return rise_of_loss(rises_of_loss(Forecast(view).first), sigma)


def test_a_rehearsal_measures_the_trace_of_the_hessian() -> None:
    class Quadratic:
        """loss = theta' diag(h) theta / 2 + slope' theta, one sample."""

        h = np.linspace(0.0, 2.0, 400)

        def evaluate(self, model: np.ndarray, clients: np.ndarray) -> object:
            from sifu.core.engine import Evaluation

            loss = 0.5 * float(self.h @ model**2) + 100.0 * float(model.sum()) + 1e4
            return Evaluation(clients, np.array([1]), np.array([1]), np.array([loss]))

    model = np.ones(400)
    rows = rehearse(Quadratic(), model, 10.0, 7, np.array([0]), 1, Position(0, 0))  # type: ignore[arg-type]
    plain = 0.5 * Quadratic.h.sum() + 100.0 * 400 + 1e4
    for row in rows:
        sigma = float(row.subset.removeprefix(REHEARSED))
        assert row.node == 7
        # tr(H) / 2; the slope, a thousand times steeper, cancels between the two signs.
        assert (row.loss - plain) / sigma**2 == pytest.approx(Quadratic.h.sum() / 2.0, rel=0.2)
    assert rehearse(Quadratic(), model, 0.0, 7, np.array([0]), 1, Position(0, 0)) == []  # type: ignore[arg-type]


def test_the_same_training_rehearses_the_same(trained: Path, tmp_path: Path) -> None:
    again = sifu.train(SPEC, run=tmp_path / "run")
    first = [
        evaluation
        for evaluation in sifu.open_run(trained).reader().evaluations()
        if evaluation.subset.startswith(REHEARSED)
    ]
    assert [
        evaluation for evaluation in again.reader().evaluations() if evaluation.subset.startswith(REHEARSED)
    ] == first


def without_rows(run: Path, folder: Path, subset: str) -> Path:
    """Return a copy of a run without some evaluations, as if its rehearsal had failed."""
    copy_run(run, folder)
    with sqlite3.connect(folder / "run.db") as database:
        database.execute("DELETE FROM evaluations WHERE subset LIKE ?", (subset,))
    return folder


def test_without_a_rehearsal_there_is_no_prediction_of_noise(trained: Path, tmp_path: Path) -> None:
    folder = without_rows(trained, tmp_path / "unrehearsed", "noise:%")
    without = Forecast(RunView(sifu.open_run(without_rows(folder, tmp_path / "bare", "healing:%")).reader()))
    rehearsed = Forecast(RunView(sifu.open_run(trained).reader()))
    tip = rehearsed.view.path.tip
    assert rehearsed.expected(tip, 0.05) < math.inf
    assert without.predict(tip, 0.05) is None
    assert without.expected(tip, 0.05) == math.inf
    assert without.expected(0, 0.0) < math.inf  # without noise the recorded curve suffices


@pytest.mark.parametrize("rounds_rehearsed", [True, False])
def test_the_equation_holds_at_the_prediction(trained: Path, tmp_path: Path, rounds_rehearsed: bool) -> None:
    folder = trained if rounds_rehearsed else without_rows(trained, tmp_path / "unrehearsed", "healing:%")
    view = RunView(sifu.open_run(folder).reader())
    forecast = Forecast(view)
    measure, tip = forecast.measure, view.path.tip
    assert measure is not None
    assert measure.of_errors is rounds_rehearsed
    for sigma in (0.05, 0.1, 0.2):
        times = forecast.times(tip, sigma)
        assert forecast.expected(tip, sigma) == pytest.approx(times.mean())
        chances = [(scatter, luck) for scatter in SCATTER for luck in LUCK]
        for (scatter, luck), k in zip(chances, times, strict=True):
            k = np.array([k - 1.0, k])
            level = measure.goal + scatter * measure.scatter
            share = 1.0 + measure.spread(sigma) * luck
            sides = measure.curve(tip + k) + share * measure.harm(sigma, k, tip + k) - level
            assert sides[1] <= 1e-12
            assert sides[0] > -1e-12 or k[1] == 1.0


@pytest.mark.parametrize("gain", [0.0, 0.002, -0.004, -0.9])
def test_scratch_is_predicted_for_those_who_stay(trained: Path, gain: float) -> None:
    forecast = Forecast(RunView(sifu.open_run(trained).reader()))
    errors, goal = forecast.first.errors, 1.0 - forecast.view.spec.stop.target
    assert errors is not None
    assert forecast.training is not None
    forecast.__dict__["gain"] = gain  # as if `sifu.store.client_accuracy` had measured the leavers
    rounds = float(forecast.training)
    if goal + gain > 0.0:
        rounds *= float(np.clip((goal / (goal + gain)) ** (1.0 / errors.exponent), 0.5, 2.0))
    scratch = forecast.scratch()
    assert scratch is not None
    assert scratch.rounds == math.ceil(rounds - 1e-9)
    # Going back to the initial model takes the same number of rounds.
    assert forecast.predict(0, 0.0) == scratch


def test_an_earlier_model_has_not_the_luck_of_the_last(trained: Path) -> None:
    view = RunView(sifu.open_run(trained).reader())
    forecast = Forecast(view)
    errors, tip = forecast.first.errors, view.path.tip
    assert errors is not None
    assert forecast._unluckier(tip) == 0.0
    assert forecast._unluckier(tip - 1) == max(0.0, errors.at_end - errors.last)


def test_a_request_that_was_retrained_tells_how_lucky_its_noise_was(trained: Path, tmp_path: Path) -> None:
    folder = copy_run(trained, tmp_path / "run")
    run = sifu.open_run(folder)
    assert Forecast(RunView(run.reader())).luck == 1.0
    (outcome,) = run.forget(["client-000"], sigma=0.2, epsilon=30.0)
    view = RunView(run.reader())
    forecast = Forecast(view)
    measure, tip = forecast.measure, view.path.tip
    assert measure is not None
    gained = measure.goal - float(measure.curve(float(view.path.rounds_until(tip))))
    recovered = np.array([float(outcome.rounds)])
    left = float(measure.harm(0.2, recovered, np.array([float(view.path.rounds_until(tip))]))[0])
    assert forecast.luck == pytest.approx(np.clip(gained / left, 0.0, MOST_LUCK))
    # The next prediction includes the remaining effect of that noise.
    assert forecast.edges(tip) == [(0.2, outcome.rounds)]
    assert forecast.expected(tip, 0.1) >= 1.0


@given(st.floats(0.1, 0.9), st.floats(0.1, 1.0), st.integers(6, 300))
@settings(derandomize=True, deadline=None, max_examples=examples(40))
def test_errors_that_follow_a_power_law_are_continued(first: float, exponent: float, end: int) -> None:
    curve = ErrorCurve.fit(range(end + 1), [1.0 - first * max(n, 1) ** -exponent for n in range(end + 1)], 10**9)
    assert curve is not None
    for n in (end, 1.5 * end, 4.0 * end):
        assert float(curve.errors(n)) == pytest.approx(first * n**-exponent, rel=1e-6)


def test_a_lucky_last_round_does_not_bend_the_errors() -> None:
    wrong = [0.9] + [0.5 * n**-0.4 for n in range(1, 41)]
    plain = ErrorCurve.fit(range(41), [1.0 - share for share in wrong], 2000)
    lucky = ErrorCurve.fit(range(41), [1.0 - share for share in [*wrong[:-1], 0.9 * wrong[-1]]], 2000)
    assert plain is not None
    assert lucky is not None
    assert lucky.last < 0.91 * plain.last
    assert lucky.at_end == pytest.approx(plain.at_end, rel=0.02)


@pytest.mark.parametrize("accuracies", [[], [0.5], [0.0, 0.0], [0.1, math.nan]])
def test_what_is_no_curve_of_errors_is_none(accuracies: list[float]) -> None:
    assert ErrorCurve.fit(range(len(accuracies)), accuracies, 100) is None


def test_regression_is_followed_by_its_loss(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    clients = {f"c{k}": (rng.normal(size=(20, 5)), rng.normal(size=20)) for k in range(8)}
    spec = {"model": {"kind": "least_squares"}, "stop": {"target": 0.0, "max_rounds": 30}}
    view = RunView(sifu.train(spec, run=tmp_path / "run", clients=clients).reader())
    forecast = Forecast(view)
    assert forecast.measure is not None
    assert not forecast.measure.of_errors
    later = [forecast.expected(view.path.tip, sigma) for sigma in (0.001, 0.1, 10.0)]
    assert later == sorted(later)
    assert later[-1] > later[0]


def test_rounds_are_those_at_which_the_stop_rule_looks(tmp_path: Path) -> None:
    spec = small_spec(
        **{key: dict(SPEC[key]) for key in ("data", "local")},
        stop={"target": 0.9, "max_rounds": 300, "evaluate_every": 5},
    )
    run = sifu.train(spec, run=tmp_path / "run")
    forecast = Forecast(RunView(run.reader()))
    assert forecast.training is not None
    assert forecast.training % 5 == 0
    prediction = forecast.predict(forecast.training, 0.05)
    assert prediction is not None
    assert prediction.interval[1] >= prediction.rounds >= 5
