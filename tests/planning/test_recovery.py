"""Rehearsed rounds: their measurements, when they are left out, and their effect on a forecast."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sifu
from run_tools import copy_run, small_spec
from sifu.core.engine import Evaluation, Position
from sifu.core.spec import Spec
from sifu.errors import NoClientResponseError, RoundRejectedError
from sifu.planning.forecast import Forecast
from sifu.planning.measure import LearningCurve, Recovery
from sifu.run.clients_and_engine import clients_from_spec, engine_from_spec
from sifu.run.rehearsal import LEAST_TRAINING, RECOVERED, RecoveredNoise, recovered_noise, rehearse
from sifu.run.run_view import RunView
from sifu.store.projection import EvaluationRow
from suite_setup import examples

SPEC = small_spec(
    data={"clients": 60, "samples_per_client": 12}, local={"steps": 5}, stop={"target": 0.96, "max_rounds": 300}
)
LONG = Position(0, 2 * LEAST_TRAINING)
TRAINING = LearningCurve(np.array([0.0, 10.0, 20.0]), np.array([2.0, 0.8, 0.5]), 0.1, 0.5)
"""Curve f: 0.5 at its end, round 20, and 0.1 + 0.4 (n / 20)^-1/2 after it."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("healing") / "run"
    sifu.train(SPEC, run=folder)
    return folder


def rows_of(run: Path, subset: str = RECOVERED) -> list[EvaluationRow]:
    """Return the evaluations of rehearsed rounds."""
    reader = sifu.open_run(run).reader()
    evaluations = [evaluation for evaluation in reader.evaluations() if evaluation.subset.startswith(subset)]
    reader.close()
    return evaluations


@dataclass
class Diagonal:
    """Engine with loss theta' diag(h) theta / 2 and round theta - rate h theta; `trouble` happens in a round."""

    h: np.ndarray
    rate: float = 0.4
    noise: float = 0.0
    trouble: Exception | None = None
    drops_out: int = 99
    rounds: list[Position] = field(default_factory=list)

    @property
    def facts(self) -> SimpleNamespace:
        return SimpleNamespace(noise=self.noise)

    def run_round(self, model: np.ndarray, position: Position, active: np.ndarray) -> SimpleNamespace:
        self.rounds.append(position)
        if self.trouble:
            raise self.trouble
        who = active[: -1 if len(self.rounds) == self.drops_out else None]
        return SimpleNamespace(model=model - self.rate * self.h * model, participants=who)

    def evaluate(self, model: np.ndarray, clients: np.ndarray) -> Evaluation:
        loss = 0.5 * float(self.h @ model**2)
        return Evaluation(clients, np.array([1, 0]), np.array([1, 0]), np.array([loss, 0.0]))


def rehearsed(engine: Diagonal, position: Position = LONG) -> list[EvaluationRow]:
    """Return the rehearsal of a model of ones."""
    return rehearse(engine, np.ones(engine.h.size), 10.0, 7, np.array([0, 1]), 1, position)  # type: ignore[arg-type]


@given(st.floats(0.0, 2.0), st.floats(0.1, 0.9))
@settings(derandomize=True, deadline=None, max_examples=examples(20))
def test_what_is_left_of_noise_is_that_of_its_spectrum(decay: float, rate: float) -> None:
    h = np.arange(1.0, 3001.0) ** -decay
    recovered = recovered_noise(rehearsed(Diagonal(h, rate)))
    assert recovered is not None
    for rounds, left in enumerate(recovered.losses, 1):
        each = h * (1.0 - rate * h) ** (2 * rounds)
        # The sum of chi-squares equals its mean within four standard deviations of one draw.
        error = math.sqrt(2.0 * float(each @ each)) / float(each.sum())
        assert left == pytest.approx(0.5 * recovered.noise_std**2 * float(each.sum()), rel=4.0 * error + 1e-9)


def test_three_models_go_through_two_rounds_and_less_where_training_was_short() -> None:
    long, short, shortest = Diagonal(np.ones(50)), Diagonal(np.ones(50)), Diagonal(np.ones(50))
    assert len([evaluation for evaluation in rehearsed(long) if evaluation.subset.startswith(RECOVERED)]) == 4
    assert long.rounds == [LONG] * 3 + [Position(0, LONG.round + 1)] * 3
    assert (
        len(
            [
                evaluation
                for evaluation in rehearsed(short, Position(0, LEAST_TRAINING))
                if evaluation.subset.startswith(RECOVERED)
            ]
        )
        == 2
    )
    assert len(rehearsed(shortest, Position(0, LEAST_TRAINING - 1))) == 3
    assert shortest.rounds == []


@pytest.mark.parametrize("trouble", [RoundRejectedError("no"), NoClientResponseError("no")])
def test_a_round_that_fails_is_done_without(trouble: Exception) -> None:
    rows = rehearsed(Diagonal(np.ones(50), trouble=trouble))
    assert len(rows) == 3
    assert recovered_noise(rows) is None


def test_rounds_of_different_clients_are_not_compared() -> None:
    first, second = (rehearsed(Diagonal(np.ones(50), drops_out=number)) for number in (2, 5))
    assert recovered_noise(first) is None
    recovered = recovered_noise(second)
    assert recovered is not None
    assert len(recovered.losses) == 1


def test_no_round_is_rehearsed_that_training_noise_would_have_to_pay_for() -> None:
    engine = Diagonal(np.ones(50), noise=0.5)
    assert len(rehearsed(engine)) == 3
    assert engine.rounds == []


def test_noise_that_helps_tells_nothing() -> None:
    # Negative control: a negative rise of the loss has no logarithm, so no plan may use it.
    rows = [EvaluationRow(3, f"{RECOVERED}1:{sigma!r}", 10, 0.5, loss) for sigma, loss in ((0.0, 1.0), (0.1, 0.9))]
    assert recovered_noise(rows) is None
    assert recovered_noise([]) is None
    assert Recovery.of(RecoveredNoise(0.1, (0.1,), (0.1,)), {0.1: (-0.2, 0.1)}, 10, TRAINING) is None
    assert Recovery.of(RecoveredNoise(0.1, (0.1,), (0.1,)), {0.2: (0.2, 0.1)}, 10, TRAINING) is None


@given(
    st.lists(st.floats(1e-5, 10.0), min_size=2, max_size=3),
    st.lists(st.floats(-0.01, 0.5), min_size=6, max_size=6),
)
@settings(derandomize=True, deadline=None, max_examples=examples(100))
def test_harm_falls_with_rounds_and_rises_with_noise(losses: list[float], wrong: list[float]) -> None:
    at_once, *after = sorted(losses, reverse=True)
    recovered = RecoveredNoise(0.3, tuple(after), tuple(wrong[: len(after)]))
    rises = {0.1: (at_once / 9.0, wrong[3]), 0.3: (at_once, wrong[4]), 0.8: (5.0 * at_once, wrong[5])}
    recovery = Recovery.of(recovered, rises, 100, TRAINING)
    assert recovery is not None
    k = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 10.0, 100.0, 1e4])
    for sigma in (0.01, 0.3, 0.5, 2.0):
        assert np.all(np.diff(recovery.rise(sigma, k, 20.0 + k)) <= 1e-15)
        assert np.all((recovery.errors(sigma, k, 20.0 + k) >= 0.0) & (recovery.errors(sigma, k, 20.0 + k) <= 1.0))
        assert np.all(recovery.rise(1.1 * sigma, k, 20.0 + k) > recovery.rise(sigma, k, 20.0 + k))
        # The further training had progressed, the less the same noise matters.
        assert np.all(recovery.rise(sigma, k, 10.0 + k) > recovery.rise(sigma, k, 20.0 + k))
        assert np.all(recovery.rise(sigma, k, 40.0 + k) < recovery.rise(sigma, k, 20.0 + k))
    # The forecast reproduces the measurements, and small noise raises the loss by its square.
    first = np.arange(len(after) + 1.0)
    np.testing.assert_allclose(recovery.rise(0.3, first, 20.0 + first), [at_once, *after], rtol=1e-12)
    np.testing.assert_allclose(recovery.rise(0.03, k, 20.0 + k), recovery.rise(0.3, k, 20.0 + k) / 100.0, rtol=1e-12)
    assert not recovery.errors(0.0, k, 20.0 + k).any()


@pytest.mark.parametrize("decay", [0.8, 1.0, 1.3, 1.7])
def test_two_rounds_tell_how_noise_of_a_power_law_heals(decay: float) -> None:
    h = np.arange(1.0, 5001.0) ** -decay
    truth = [float(np.sum(h * (1.0 - 0.9 * h) ** (2 * k))) for k in range(101)]
    # A training without further gain: its loss reveals nothing about the least curvature.
    flat = LearningCurve(np.array([0.0, 20.0]), np.array([2.0, 0.5]), 0.5, 0.5)
    recovery = Recovery.of(RecoveredNoise(1.0, tuple(truth[1:3]), (0.1, 0.1)), {1.0: (truth[0], 0.1)}, 1000, flat)
    assert recovery is not None
    k = np.array([4.0, 8.0, 16.0, 32.0])
    ratio = recovery.rise(1.0, k, 20.0 + k) / np.array(truth)[k.astype(int)]
    assert np.all((ratio > 0.5) & (ratio < 2.0)), ratio


def test_the_formula_by_hand() -> None:
    recovered = RecoveredNoise(0.2, (0.08, 0.06), (0.03, 0.02))
    recovery = Recovery.of(recovered, {0.1: (0.03, 0.01), 0.2: (0.1, 0.06), 0.4: (0.3, 0.09)}, 1000, TRAINING)
    assert recovery is not None
    assert recovery.errors_per_loss == pytest.approx(0.12 / 0.27)

    def f(n: float) -> float:
        return 0.1 + 0.4 * math.sqrt(20.0 / n)

    ten = np.array([10.0])
    rise = 0.06 * 5.0 ** (-1.0 / 3.0) * (f(30.0) / f(22.0)) ** 2
    assert float(recovery.rise(0.2, ten, np.array([30.0]))[0]) == pytest.approx(rise)
    assert rise == pytest.approx(0.0275559, rel=1e-5)
    assert float(recovery.errors(0.2, ten, np.array([30.0]))[0]) == pytest.approx(rise * 0.12 / 0.27)
    # On the model of round 8, ten rounds later; and a round after noise on the model of round 9.
    assert float(recovery.rise(0.2, ten, np.array([18.0]))[0]) == pytest.approx(
        0.06 * 5.0 ** (-1.0 / 3.0) * (0.56 / f(22.0)) ** 2
    )
    assert float(recovery.rise(0.2, np.ones(1), ten)[0]) == pytest.approx(0.08 * (0.8 / f(21.0)) ** 2)
    network = Recovery.of(recovered, {0.1: (0.03, 0.01), 0.2: (0.1, 0.06)}, 1000, TRAINING, linear=False)
    assert network is not None
    assert float(network.rise(0.2, ten, np.array([30.0]))[0]) == pytest.approx(rise * (f(30.0) / f(22.0)) ** 4)
    # Far beyond the rehearsed noise a network may never recover; a linear model does.
    assert float(network.errors(0.61, ten, np.array([30.0]))[0]) == 1.0
    assert float(network.errors(0.59, ten, np.array([30.0]))[0]) < 1.0
    assert float(recovery.errors(1.3, ten, np.array([30.0]))[0]) < 1.0
    # As much loss as from the largest noise costs as many correct predictions.
    largest = recovery.errors(0.2 * math.sqrt(3.0), np.array([0.0]), np.array([20.0]))
    assert float(largest[0]) == pytest.approx(0.09)


def test_training_ends_with_rounds_that_a_replay_finds_again(trained: Path) -> None:
    rows = {evaluation.subset: evaluation for evaluation in rows_of(trained)}
    reader = sifu.open_run(trained).reader()
    view = RunView(reader)
    model, tip = reader.load_model(reader.tip), view.nodes[-1]
    reader.close()
    assert tip.position >= 2 * LEAST_TRAINING
    assert len(rows) == 4
    assert {value.node for value in rows.values()} == {tip.node}
    spec = SPEC if isinstance(SPEC, Spec) else Spec.from_mapping(SPEC)
    engine, _ = engine_from_spec(spec, clients_from_spec(spec))
    everybody = np.arange(60)
    for rounds in (1, 2):
        model = engine.run_round(model, Position(0, tip.position + rounds - 1), everybody).model
        evaluation, row = engine.evaluate(model, everybody), rows[f"{RECOVERED}{rounds}:0.0"]
        assert (row.loss, row.accuracy, row.samples) == (evaluation.loss, evaluation.accuracy, 720)
    recovered = recovered_noise(list(rows.values()))
    assert recovered is not None
    assert recovered.noise_std == pytest.approx(0.75 * tip.distance / math.sqrt(model.size))
    assert recovered.losses[0] > recovered.losses[1] > 0.0
    assert sifu.open_run(trained).verify().problems == []


def test_the_run_itself_is_the_one_without_rehearsed_rounds(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sifu.run.rehearsal.MOST_ROUNDS", 0)
    sifu.train(SPEC, run=tmp_path / "without")
    assert rows_of(tmp_path / "without") == []
    with_rounds, without = (
        [evaluation for evaluation in rows_of(run, "") if not evaluation.subset.startswith(RECOVERED)]
        for run in (trained, tmp_path / "without")
    )
    assert with_rounds == without
    readers = [sifu.open_run(run).reader() for run in (trained, tmp_path / "without")]
    first, second = (reader.load_model(reader.tip) for reader in readers)
    for reader in readers:
        reader.close()
    np.testing.assert_array_equal(first, second)
    # Such a run plans by the other rule, with a valid result.
    plan = sifu.open_run(tmp_path / "without").plan(["client-003"], sigma="auto", epsilon=30.0)
    assert plan.predicted_rounds is not None


def test_a_plan_goes_by_them_and_needs_nobody(trained: Path, tmp_path: Path) -> None:
    folder = copy_run(trained, tmp_path / "copy")
    with_rounds = Forecast(RunView(sifu.open_run(folder).reader()))
    assert with_rounds.measure is not None
    recovered = recovered_noise(rows_of(folder))
    assert recovered is not None
    tip = with_rounds.view.path.tip
    later = [with_rounds.expected(tip, share * recovered.noise_std) for share in (0.1, 0.5, 1.0, 2.0, 4.0)]
    assert later == sorted(later)
    # The variation under small noise is wide, under large noise narrow.
    spreads = [with_rounds.measure.spread(share * recovered.noise_std) for share in (0.1, 1.0, 4.0)]
    assert spreads == pytest.approx([1.5, math.hypot(0.53, 0.3), math.hypot(0.1325, 0.3)])
