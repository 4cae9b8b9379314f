"""The vectorised path and the plain loop agree up to rounding, with every option."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from covering import covering
from sifu.core.engine import Position
from sifu.engines.sim import LocalTraining, SimulatedFederation, SimulationSettings
from sifu.engines.sim.linear import MASKED_BATCHES, ROWS_AN_OUTPUT, cheaper_between_samples
from sifu.engines.sim.local_training import LocalTraining as Training

KINDS = ("softmax", "logistic", "least_squares")
MOMENTUM = (0.0, 0.9, 0.5)
MIXED, EQUAL = (4, 7, 3, 12, 30), (9,) * 5
PARTICIPATION = ("all", "poisson(0.6)", "fixed(3)")
TOLERANCE = {"float64": 1e-10, "float32": 2e-3}


def relative(vector: np.ndarray, other: np.ndarray) -> float:
    vector, other = vector.astype(np.float64), other.astype(np.float64)
    return float(np.linalg.norm(vector - other) / max(np.linalg.norm(other), 1e-300))


def both(make_federation, kind: str, **options):
    loop = make_federation(kind, strategy="loop", **options)
    fast = make_federation(kind, strategy="auto", **options)
    start = np.random.default_rng(1).standard_normal(loop.layout.size).astype(loop.layout.dtype)
    return loop, fast, start


@pytest.mark.parametrize(
    ("kind", "dtype", "momentum", "weight_decay", "batch_size", "participation"),
    covering(KINDS, ("float64", "float32"), MOMENTUM, (0.0, 0.3), (None, 2, 4), PARTICIPATION),
)
def test_a_round_agrees_with_the_loop(make_federation, kind, dtype, momentum, weight_decay, batch_size, participation):
    # Passes over features, passes over samples, and clients of equal size in one block.
    for features, sizes in ((5, MIXED), (40, MIXED), (40, EQUAL), (5, EQUAL)):
        loop, fast, start = both(
            make_federation,
            kind,
            dtype=dtype,
            momentum=momentum,
            weight_decay=weight_decay,
            batch_size=batch_size,
            features=features,
            sizes=sizes,
            rate=0.5 / features,
            steps=6,
            participation=participation,
        )
        for position in (Position(0, 0), Position(2, 5)):
            expected = loop.run_round(start, position, np.arange(5))
            result = fast.run_round(start, position, np.arange(5))
            assert result.model.dtype == dtype
            assert relative(result.model - start, expected.model - start) < TOLERANCE[dtype]
            if result.participants.size > 1:
                assert relative(result.drifts, expected.drifts) < TOLERANCE[dtype]
            assert result.mean_shift == pytest.approx(expected.mean_shift, rel=TOLERANCE[dtype])
            assert result.rounding == expected.rounding
            assert (result.participants == expected.participants).all()
            assert (result.samples == expected.samples).all()


def test_the_matrix_above_uses_both_coordinates():
    training = Training(rate=0.1, steps=6)
    assert cheaper_between_samples(30, 41, training)
    assert not cheaper_between_samples(12, 6, training)
    batches = Training(rate=0.1, steps=6, batch_size=4)
    assert cheaper_between_samples(12, 41, batches)
    assert not cheaper_between_samples(30, 6, batches)
    # Passes over samples: batches by weighting all rows (4 of 12) and by copying the batch's rows (2 of 12).
    assert cheaper_between_samples(12, 41, Training(rate=0.1, steps=6, batch_size=2))
    assert 2 * MASKED_BATCHES < 12 <= 4 * MASKED_BATCHES
    # Three outputs: 12 rows are averaged without building models, 30 are not.
    assert 12 <= 3 * ROWS_AN_OUTPUT < 30


@pytest.mark.parametrize("batch_size", [None, 3])
def test_the_local_models_agree_one_by_one(make_federation, batch_size):
    loop, fast, start = both(
        make_federation, "softmax", features=40, rate=0.01, batch_size=batch_size, weight_decay=0.1
    )
    position, who = Position(1, 2), np.array([0, 2, 3, 4])
    expected = {place.start: rows[0] for place, rows in loop._trainer.train(start, position, who)}
    by_place = {
        int(place): row
        for places, rows in fast._trainer.train(start, position, who)
        for place, row in zip(places, rows, strict=True)
    }
    assert sorted(by_place) == sorted(expected) == [0, 1, 2, 3]
    for place, row in by_place.items():
        assert relative(row.numpy(), expected[place].numpy()) < 1e-12


def numpy_model(client, kind: str, training: LocalTraining, rate: float, start, outputs: int) -> np.ndarray:
    """Return one client's model after its steps on all of its samples, from the formulas alone."""
    x = np.column_stack([client.x, np.ones(len(client.x))])
    targets = np.eye(outputs)[client.y] if kind == "softmax" else np.asarray(client.y, float).reshape(len(x), outputs)
    weights = start.reshape(x.shape[1], outputs).copy()
    velocity = np.zeros_like(weights)
    for _ in range(training.steps):
        scores = x @ weights
        if kind == "softmax":
            powers = np.exp(scores - scores.max(axis=1, keepdims=True))
            scores = powers / powers.sum(axis=1, keepdims=True)
        elif kind == "logistic":
            scores = 1 / (1 + np.exp(-scores))
        gradient = x.T @ (scores - targets) / len(x) + training.weight_decay * weights
        velocity = training.momentum * velocity + gradient
        weights = weights - rate * velocity
    return weights.reshape(-1)


@pytest.mark.parametrize("sizes", [MIXED, EQUAL])
@pytest.mark.parametrize("features", [5, 40])
@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.0, 0.3), (0.9, 0.0), (0.9, 0.3)])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_their_own_agree_with_the_loop_and_with_numpy(
    make_clients, kind, momentum, weight_decay, features, sizes
):
    """Clients with rows of unequal length take steps of their own, computed here from beta alone."""
    outputs = 1 if kind == "logistic" else 3
    clients = make_clients(kind, sizes=sizes, features=features, outputs=outputs)
    for number, client in enumerate(clients):
        client.x = client.x * 2.0**number / 4.0
    training = LocalTraining(np.inf, 6, None, momentum, weight_decay)
    factor = {"softmax": 0.5, "logistic": 0.25, "least_squares": 1.0}[kind]
    half = 2.0 if kind == "least_squares" else 1.0
    expected_rates = []
    for client in clients:
        x = np.column_stack([client.x, np.ones(len(client.x))])
        beta = factor * np.linalg.norm(x, 2) ** 2 / len(x) + weight_decay
        limit = 0.17264334755 / beta if momentum else 2.0 / (beta + weight_decay)
        expected_rates.append(limit / half)
    engines = [
        SimulatedFederation(clients, kind, training, SimulationSettings(strategy=strategy))
        for strategy in ("loop", "auto")
    ]
    rates = engines[0].plan.rates
    assert rates == pytest.approx(np.array(expected_rates), rel=1e-6)
    assert len(set(rates)) == 5
    start = np.random.default_rng(1).standard_normal(engines[0].layout.size) / 10
    models = [
        numpy_model(client, kind, training, rate, start, outputs)
        for client, rate in zip(clients, rates.tolist(), strict=True)
    ]
    mean = np.average(models, axis=0, weights=sizes)
    for engine in engines:
        result = engine.run_round(start, Position(0, 0), np.arange(5))
        assert relative(result.model - start, mean - start) < 1e-9
        assert relative(result.drifts, np.linalg.norm(np.array(models) - mean, axis=1)) < 1e-9
        local = engine.local_models(start, Position(0, 0), np.arange(5))
        assert relative(local, np.array(models)) < 1e-11


@pytest.mark.parametrize("participation", ["poisson(0.5)", "fixed(3)"])
def test_partial_participation_agrees(make_federation, participation):
    loop, fast, start = both(make_federation, "softmax", participation=participation, sizes=(4, 4, 5, 6, 9, 30, 31))
    for number in range(8):
        expected = loop.run_round(start, Position(0, number), np.array([0, 1, 3, 5, 6]))
        result = fast.run_round(start, Position(0, number), np.array([0, 1, 3, 5, 6]))
        assert (result.participants == expected.participants).all()
        assert relative(result.model, expected.model) < 1e-12


def test_runs_of_clients_between_those_that_are_gone_agree(make_federation):
    loop, fast, start = both(make_federation, "softmax", sizes=(6,) * 100, features=40, rate=0.01)
    active = np.delete(np.arange(100), 50)
    expected, result = (engine.run_round(start, Position(0, 0), active) for engine in (loop, fast))
    assert relative(result.model - start, expected.model - start) < 1e-12
    assert relative(result.drifts, expected.drifts) < 1e-10
    expected, result = (engine.evaluate(start, active) for engine in (loop, fast))
    assert (result.correct == expected.correct).all()
    assert result.loss_sum == pytest.approx(expected.loss_sum, rel=1e-12)


@pytest.mark.parametrize("sizes", [MIXED, EQUAL])
@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_agrees_and_keeps_the_order_asked_for(make_federation, kind, sizes):
    loop, fast, start = both(make_federation, kind, sizes=sizes)
    for clients in (np.arange(5), np.array([3, 0])):
        expected, evaluation = loop.evaluate(start, clients), fast.evaluate(start, clients)
        assert (evaluation.clients == clients).all()
        assert (evaluation.samples == expected.samples).all()
        assert (evaluation.correct == expected.correct).all()
        assert evaluation.loss_sum == pytest.approx(expected.loss_sum, rel=1e-12)
        assert (kind == "least_squares") == (evaluation.correct.sum() == 0)


def test_the_loop_is_torch_written_out(make_clients):
    """One round of one client agrees with nn.Linear, nn.CrossEntropyLoss and torch.optim.SGD, without sifu code."""
    (client,) = make_clients("softmax", sizes=(8,))
    training = LocalTraining(rate=0.01, steps=7, momentum=0.9, weight_decay=0.1)
    layer = torch.nn.Linear(5, 3, dtype=torch.float64)
    start = np.concatenate([layer.weight.detach().numpy().T.reshape(-1), layer.bias.detach().numpy()])
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)
    for _ in range(7):
        optimizer.zero_grad()
        torch.nn.CrossEntropyLoss()(layer(torch.tensor(client.x)), torch.tensor(client.y)).backward()
        optimizer.step()
    expected = np.concatenate([layer.weight.detach().numpy().T.reshape(-1), layer.bias.detach().numpy()])
    for strategy in ("loop", "auto"):
        federation = SimulatedFederation([client], "softmax", training, SimulationSettings(strategy=strategy))
        result = federation.run_round(start, Position(0, 0), np.array([0]))
        assert relative(result.model, expected) < 1e-13
        assert result.drifts[0] == 0.0


def test_models_beyond_the_memory_budget_are_trained_again(make_federation, monkeypatch):
    federation = make_federation("softmax", participation="poisson(0.8)", batch_size=4)
    start = federation.initial_model(0)
    kept = federation.run_round(start, Position(0, 1), np.arange(5))
    monkeypatch.setattr("sifu.engines.sim.client_updates.KEEP_BYTES", 0)
    again = federation.run_round(start, Position(0, 1), np.arange(5))
    assert kept.model.tobytes() == again.model.tobytes()
    assert kept.drifts.tobytes() == again.drifts.tobytes()


def test_blocks_within_a_small_budget_give_the_same_round(make_federation, monkeypatch):
    sizes = tuple(range(1, 25))
    whole = make_federation("softmax", sizes=sizes, features=30)
    monkeypatch.setattr("sifu.engines.sim.client_blocks.PART_ROWS", 50)
    monkeypatch.setattr("sifu.engines.sim.client_blocks.COPY_BYTES", 30 * 8 * 10)
    monkeypatch.setattr("sifu.engines.sim.client_blocks.PART_BYTES", 30 * 8 * 60)
    cut = make_federation("softmax", sizes=sizes, features=30)
    start = np.random.default_rng(1).standard_normal(whole.layout.size) / 10
    for active in (np.arange(24), np.arange(0, 24, 3)):
        at_once = whole.run_round(start, Position(0, 0), active)
        other = cut.run_round(start, Position(0, 0), active)
        assert relative(at_once.model, other.model) < 1e-14
        assert relative(at_once.drifts, other.drifts) < 1e-12
