"""The learning curve drawn on, the rehearsal of noise, and the equation that predicts rounds."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sifu
from run_tools import copy_run, small_spec
from sifu.methods.forecast import HARM, HARM_RANGE, Forecast
from sifu.methods.learning_curve import LearningCurve
from sifu.methods.rehearsal import RATIOS, REHEARSED, rehearse, rehearsed_noises
from sifu.methods.view import ACTIVE, RunView

SPEC = small_spec(
    data={"clients": 40, "samples_per_client": 10}, local={"steps": 10}, stop={"target": 0.93, "max_rounds": 300}
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("curves") / "run"
    sifu.train(SPEC, run=folder)
    return folder


@given(st.floats(0.0, 0.8), st.floats(0.3, 1.2), st.integers(20, 400))
@settings(derandomize=True, deadline=None, max_examples=40)
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
    row = view.rows[-1]
    sigmas = sorted(sigma for sigma, _ in noises)
    np.testing.assert_allclose([s * math.sqrt(view.parameters) / row.distance for s in sigmas], RATIOS)
    plain = next(one for one in view.reader.evaluations() if one.node == row.node.node and one.subset == ACTIVE)
    rises = [loss - plain.loss for _, loss in sorted(noises)]
    assert 0.0 < rises[0] < rises[1] < rises[2]
    forecast = Forecast(view)
    for sigma, rise in zip(sigmas, rises, strict=True):
        assert forecast.rise(sigma) == pytest.approx(rise)
    # Small noise: the loss rises with its square.
    assert forecast.rise(sigmas[0] / 10.0) == pytest.approx(rises[0] / 100.0)


def test_a_rehearsal_measures_the_trace_of_the_hessian() -> None:
    class Quadratic:
        """loss = theta' diag(h) theta / 2 + slope' theta, one sample."""

        h = np.linspace(0.0, 2.0, 400)

        def evaluate(self, model: np.ndarray, clients: np.ndarray) -> object:
            from sifu.core.engine import Evaluation

            loss = 0.5 * float(self.h @ model**2) + 100.0 * float(model.sum()) + 1e4
            return Evaluation(clients, np.array([1]), np.array([1]), np.array([loss]))

    model = np.ones(400)
    rows = rehearse(Quadratic(), model, 10.0, 7, np.array([0]), seed=1)  # type: ignore[arg-type]
    plain = 0.5 * Quadratic.h.sum() + 100.0 * 400 + 1e4
    for row in rows:
        sigma = float(row.subset.removeprefix(REHEARSED))
        assert row.node == 7
        # tr(H) / 2; the slope, a thousand times steeper, cancels between the two signs.
        assert (row.loss - plain) / sigma**2 == pytest.approx(Quadratic.h.sum() / 2.0, rel=0.2)
    assert rehearse(Quadratic(), model, 0.0, 7, np.array([0]), seed=1) == []  # type: ignore[arg-type]


def test_the_same_training_rehearses_the_same(trained: Path, tmp_path: Path) -> None:
    again = sifu.train(SPEC, run=tmp_path / "run")
    first = [one for one in sifu.open_run(trained).reader().evaluations() if one.subset.startswith(REHEARSED)]
    assert [one for one in again.reader().evaluations() if one.subset.startswith(REHEARSED)] == first


def test_without_a_rehearsal_there_is_a_formula(trained: Path, tmp_path: Path) -> None:
    import sqlite3

    folder = copy_run(trained, tmp_path / "older")
    with sqlite3.connect(folder / "run.db") as database:
        database.execute("DELETE FROM evaluations WHERE subset LIKE 'noise:%'")
    measured, formula = (Forecast(RunView(sifu.open_run(one).reader())) for one in (trained, folder))
    assert formula.rise(0.05) == pytest.approx(measured.rise(0.05), rel=1.0)
    assert formula.rise(0.1) == pytest.approx(4.0 * formula.rise(0.05))


def test_the_equation_holds_at_the_prediction(trained: Path) -> None:
    view = RunView(sifu.open_run(trained).reader())
    forecast = Forecast(view)
    curve = forecast.curve
    assert curve is not None
    tip = view.path.tip
    for sigma in (0.05, 0.1, 0.2):
        k = forecast.expected(tip, sigma)
        ahead = np.array([max(1.0, math.floor(k)), math.ceil(k + 1e-9)])
        sides = curve.loss(tip + ahead) + HARM * forecast.rise(sigma) * curve.left(ahead) - curve.loss(tip)
        assert sides[1] <= 1e-12
        assert sides[0] >= -1e-12 or k == 1.0


def test_a_request_that_was_retrained_gives_the_run_a_constant_of_its_own(trained: Path, tmp_path: Path) -> None:
    folder = copy_run(trained, tmp_path / "run")
    run = sifu.open_run(folder)
    assert Forecast(RunView(run.reader())).harm == HARM
    (outcome,) = run.forget(["client-000"], sigma=0.2, epsilon=30.0)
    view = RunView(run.reader())
    forecast = Forecast(view)
    assert HARM / HARM_RANGE <= forecast.harm <= HARM * HARM_RANGE
    curve = forecast.curve
    assert curve is not None
    assert outcome.sigma == 0.2
    gained = float(curve.loss(curve.end) - curve.loss(view.path.rounds_until(view.path.tip)))
    left = forecast.rise(0.2) * float(curve.left(outcome.rounds))
    assert forecast.harm == pytest.approx(np.clip(gained / left, HARM / HARM_RANGE, HARM * HARM_RANGE))
    # What is left of that noise counts in the next prediction.
    without = [one for one in forecast.edges(view.path.tip) if one[0] != 0.2]
    assert without == []
    assert forecast.expected(view.path.tip, 0.1) >= 1.0
