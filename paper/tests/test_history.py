"""Psi of the loops against sifu's theory, the models that are kept, and the budgets of the forgotten."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from sifu.theory.tracking import SensitivityTracker, summarise_round
from sifu_paper.budgets import least_noise, release, to_hide
from sifu_paper.experiments.psi_alpha import measure_distances
from sifu_paper.federation import Federation, federation_of
from sifu_paper.history import History, increments
from sifu_paper.methods import METHODS
from sifu_paper.running import State, Subject, initial_state, run_rounds
from sifu_paper.settings import OURS, PAPERS, Rules, settings_of
from sifu_paper.training import Round, trainer_for
from sifu_paper.unlearning import forget

SETTINGS = settings_of("digits", "table")


@pytest.fixture(scope="module")
def digits() -> Federation:
    return federation_of(SETTINGS, 1)


def trained(digits: Federation, rules: Rules, rounds: int = 12, *, fine: bool = False) -> State:
    state = initial_state(trainer_for(digits, SETTINGS, 1), SETTINGS, rules, 1, fine=fine)
    run_rounds(state, rounds)
    state.training_rounds, state.errors = state.history.rounds, 1.0 - (state.history.accuracy or 0.0)
    return state


def random_round(generator: np.random.Generator, samples: np.ndarray, size: int = 5) -> Round:
    count = int(generator.integers(1, samples.size))
    who = np.sort(generator.choice(samples.size, size=count, replace=False))
    return Round(generator.normal(size=size).astype(np.float32), who, generator.random(count) * (count > 1))


def test_psi_of_the_loops_is_that_of_the_theory() -> None:
    generator = np.random.default_rng(3)
    samples = generator.integers(1, 30, size=6)
    history = History.from_model(np.zeros(5, dtype=np.float32), 6, np.array([math.inf]))
    tracker = SensitivityTracker(6)
    for _ in range(200):
        done = random_round(generator, samples)
        shift = float(np.linalg.norm(done.model - history.model.astype(np.float64)))
        count = done.participants.size
        _, scalars = summarise_round(
            done.participants,
            samples[done.participants],
            done.drifts,
            shift,
            0.0,
            factors=np.ones(count),
        )
        tracker.update(scalars)
        history.add_round(done, samples, OURS)
    np.testing.assert_allclose(history.psi[-1], tracker.total(np.arange(6)), rtol=1e-9)


def test_a_round_without_its_only_participant_does_nothing() -> None:
    done = Round(np.zeros(3, dtype=np.float32), np.array([1]), np.zeros(1))
    assert increments(done, np.array([4, 4, 4]), OURS, 0.7).tolist() == [0.7]


def test_the_latest_model_below_every_level_is_kept() -> None:
    generator = np.random.default_rng(4)
    samples = np.full(6, 10)
    levels = np.array([0.2, 1.0, 4.0])
    history = History.from_model(np.zeros(5, dtype=np.float32), 6, levels)
    for _ in range(60):
        history.add_round(random_round(generator, samples), samples, OURS)
    for level in levels:
        for client in range(6):
            latest = max(depth for depth, psi in enumerate(history.psi) if psi[client] <= level)
            assert latest in history.candidates()


def test_the_bound_holds_for_a_convex_loss_and_population_weights_break_it(digits: Federation) -> None:
    """Control: the increments of the authors' code are too small where few of many clients take part."""
    settings = replace(SETTINGS, momentum=0.0, rate=0.01, participants=5)
    trainer = trainer_for(digits, settings, 1)
    measured = list(measure_distances(trainer, settings, 1, np.arange(0, 100, 9), 30))
    _, distances, (by_round, by_population) = measured[-1]
    taken = np.arange(0, 100, 9)
    assert all(distance <= by_round[client] for distance, client in zip(distances, taken, strict=True))
    assert any(distance > by_population[client] for distance, client in zip(distances, taken, strict=True))


@pytest.mark.parametrize("rules", [PAPERS, OURS], ids=["paper", "ours"])
def test_sifu_goes_back_to_the_latest_model_that_the_budget_allows(digits: Federation, rules: Rules) -> None:
    state = trained(digits, rules)
    state.sigma = SETTINGS.sigma
    state.requests, state.subjects = 1, [Subject(client, 1) for client in range(10)]
    level = SETTINGS.sigma / state.multiplier
    before = state.history.copy()
    METHODS["sifu"].start(state, 100)
    depth = state.history.rounds_until(state.history.depth)
    assert max(before.psi[depth][:10]) <= level
    if depth < before.depth:
        assert max(before.psi[depth + 1][:10]) > level  # control: the next model needs more noise
    added = state.history.model - before.model_at(depth)
    if max(before.psi[depth][:10]) > 0.0:
        assert np.std(added) == pytest.approx(SETTINGS.sigma, rel=0.15)  # 650 normals: 5 standard errors
    else:
        assert not added.any()


def test_earlier_clients_are_charged_again_only_before_their_noise(digits: Federation) -> None:
    state = trained(digits, OURS, fine=True)
    most, second, third = np.argsort(state.history.psi[-1])[::-1][:3].tolist()
    state.requests, state.subjects = 1, [Subject(most, 1), Subject(second, 1)]
    sigma = least_noise(state, state.history.depth)
    release(state, state.history.depth, sigma)
    assert max(subject.used for subject in state.subjects) == pytest.approx(1.0 / state.multiplier**2)
    state.history.rounds = 0
    run_rounds(state, 3)
    assert to_hide(state.history, state.subjects[0], state.history.depth) == 0.0
    state.requests = 2
    state.subjects.append(Subject(third, 2))
    assert math.isfinite(least_noise(state, state.history.depth))
    touched = next(depth for depth, psi in enumerate(state.history.psi) if psi[most] > 0.0)
    assert math.isinf(least_noise(state, touched))  # before that noise the first request's budget is spent
    state.rules = Rules("round", "exact", "latest", "auto")
    assert math.isfinite(least_noise(state, touched))  # control: scope latest forgets what was released


@pytest.mark.parametrize("method", sorted(METHODS))
def test_forgotten_clients_never_take_part_again(
    digits: Federation, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = METHODS[method].training
    trainer = trainer_for(digits, SETTINGS, 1, dp_noise=float(kind == "dp"), hand_out=kind == "updates")
    state = initial_state(trainer, SETTINGS, PAPERS, 1)
    run_rounds(state, 6, kept_every=2 if kind == "updates" else 0)
    state.training_rounds = 6
    asked: set[int] = set()
    plain = trainer.round

    def watched(model: np.ndarray, place: tuple[int, int], participants: np.ndarray) -> Round:
        asked.update(participants.tolist())
        return plain(model, place, participants)

    monkeypatch.setattr(trainer, "round", watched)
    forget(state, method, list(range(10)), 1, 5)
    assert asked
    assert not asked & set(range(10))
    assert state.history.rounds == 5


def test_scratch_starts_from_a_model_that_nobody_has_moved(digits: Federation) -> None:
    state = trained(digits, PAPERS, 4)
    state.requests = 1
    METHODS["scratch"].start(state, 10)
    np.testing.assert_array_equal(state.history.model, digits.network.initial(1, 1))
    assert not state.history.psi[-1].any()


def test_fed_accum_adds_up_what_the_others_sent(digits: Federation) -> None:
    trainer = trainer_for(digits, SETTINGS, 1, hand_out=True)
    state = initial_state(trainer, SETTINGS, PAPERS, 1)
    run_rounds(state, 5, kept_every=1)
    whole = state.history.model
    METHODS["fed_accum"].start(state, 10)
    np.testing.assert_allclose(state.history.model, whole, atol=1e-5)  # nobody left: the same model again
    clients, updates = state.history.updates[0]
    state.subjects = [Subject(int(clients[0]), 1)]
    METHODS["fed_accum"].start(state, 10)
    kept_clients, kept = state.history.updates[0]
    np.testing.assert_array_equal(kept_clients, clients[1:])
    np.testing.assert_array_equal(kept, updates[1:])
