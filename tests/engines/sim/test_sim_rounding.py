"""The rounding allowance of float64 rounds, against the same rounds in 64-bit-mantissa arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from sifu.core.engine import Position
from sifu.engines.sim import LinearModel, LocalTraining, SimulatedFederation, SimulationSettings
from sifu.engines.sim.local_training import batch_sequence
from sifu.theory.rounding import norm_up

Extended = np.longdouble
pytestmark = pytest.mark.skipif(np.finfo(Extended).eps > 1e-18, reason="long double is no wider than double here")


def exact_round(clients, kind: str, training: LocalTraining, rates, start, outputs: int, position):
    """Compute one round of all clients in extended precision, from the formulas alone."""
    models, samples = [], []
    for number, client in enumerate(clients):
        x = np.column_stack([client.x, np.ones(len(client.x))]).astype(Extended)
        if kind == "softmax":
            targets = np.eye(outputs, dtype=Extended)[client.y]
        else:
            targets = np.asarray(client.y, dtype=Extended).reshape(len(x), outputs)
        weights = start.astype(Extended).reshape(x.shape[1], outputs)
        velocity = np.zeros_like(weights)
        for batch in batch_sequence(training.batch_size, len(x), 0, position, number, training.steps):
            scores = x[batch] @ weights
            if kind == "softmax":
                powers = np.exp(scores - scores.max(axis=1, keepdims=True))
                scores = powers / powers.sum(axis=1, keepdims=True)
            elif kind == "logistic":
                scores = 1 / (1 + np.exp(-scores))
            gradient = x[batch].T @ (scores - targets[batch]) / Extended(len(batch))
            gradient = gradient + Extended(training.weight_decay) * weights
            velocity = Extended(training.momentum) * velocity + gradient
            weights = weights - Extended(rates[number]) * velocity
        models.append(weights.reshape(-1))
        samples.append(len(x))
    return sum(Extended(n) * m for n, m in zip(samples, models, strict=True)) / Extended(sum(samples))


def random_problem(seed: int, make_clients):
    """Return a random federation whose clients take their largest safe steps, or smaller ones."""
    generator = np.random.default_rng(seed)
    kind = ("softmax", "logistic", "least_squares")[seed % 3]
    outputs = 1 if kind == "logistic" else int(generator.integers(1 + (kind == "softmax"), 5))
    sizes = tuple(int(n) for n in generator.integers(1, 13, int(generator.integers(1, 5))))
    features = int(generator.integers(1, 16))
    clients = make_clients(
        kind,
        sizes=sizes,
        features=features,
        outputs=outputs,
        seed=seed,
        scale=float(10.0 ** generator.uniform(-2, 2)),
    )
    momentum = (0.0, 0.0, 0.5, 0.9)[int(generator.integers(4))]
    options = {
        "steps": int(generator.integers(1, 9)),
        "batch_size": (None, None, 3)[int(generator.integers(3))],
        "momentum": momentum,
    }
    model = LinearModel(kind, features, outputs)
    probe = SimulatedFederation(clients, model, LocalTraining(1.0, **options))
    beta = float((probe.sizes.steepness / probe.sizes.rates).max())
    rate = float(generator.choice([np.inf, np.inf, 0.2 / beta]))
    training = LocalTraining(rate, weight_decay=float(generator.choice([0.0, 1e-3 * beta])), **options)
    start = generator.standard_normal(model.layout("float64").size) * 10.0 ** generator.uniform(-3, 1)
    return clients, kind, model, training, start


def errors_over_allowance(seed: int, make_clients, strategy: str) -> float:
    clients, kind, model, training, start = random_problem(seed, make_clients)
    federation = SimulatedFederation(clients, model, training, SimulationSettings(strategy=strategy))
    assert federation.facts.rounding_bounded
    position = Position(0, seed)
    result = federation.run_round(start, position, np.arange(len(clients)))
    exact = exact_round(clients, kind, training, federation.plan.rates, start, model.outputs, position)
    error = float(np.sqrt(((result.model - exact) ** 2).sum()))
    assert result.rounding > 0.0
    return error / (result.rounding / 2.0)  # the allowance covers the run and its counterfactual; this is one of them


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["loop", "auto"])
def test_the_allowance_covers_every_round_and_is_not_beyond_all_measure(make_clients, strategy):
    """240 random rounds stay below the allowance; a hundred-thousandth of it would not suffice (the control).

    The allowance must hold for every counterfactual up to Psi = 1000, so it is far above the errors measured here.
    """
    ratios = [errors_over_allowance(seed, make_clients, strategy) for seed in range(240)]
    assert max(ratios) < 1.0
    assert max(ratios) > 1e-5


def test_run_and_counterfactual_stay_within_the_exact_distance_plus_the_allowance(make_federation):
    """||fl(theta') - fl(phi')|| <= ||theta - phi|| + rounding holds for the same convex round from two models."""
    federation = make_federation(steps=20)
    generator = np.random.default_rng(0)
    for number in range(50):
        theta = generator.standard_normal(federation.layout.size)
        phi = theta + generator.standard_normal(theta.size) * 10.0 ** -generator.uniform(0, 16)
        result = federation.run_round(theta, Position(0, number), np.arange(5))
        other = federation.run_round(phi, Position(0, number), np.arange(5))
        assert norm_up(result.model - other.model) <= np.linalg.norm(theta - phi) + result.rounding


def test_the_allowance_is_small_beside_what_it_protects(make_clients):
    """On a digits-like federation (160 x 10 samples, 64 features, K = 10) the allowance is below 1e-5 of one round's
    Delta.
    """
    clients = make_clients("softmax", sizes=(10,) * 160, features=64, outputs=10, scale=0.5)
    federation = SimulatedFederation(clients, "softmax", LocalTraining(0.05, 10))
    result = federation.run_round(federation.initial_model(0), Position(0, 0), np.arange(160))
    delta = result.drifts.min() / 159
    assert delta > 1e-3
    assert 0.0 < result.rounding < 1e-5 * delta


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"model": "mlp"}])
def test_nothing_is_claimed_outside_what_is_proven(make_federation, options):
    federation = make_federation(**options)
    assert not federation.facts.rounding_bounded
    result = federation.run_round(federation.initial_model(0), Position(0, 0), np.arange(5))
    assert result.rounding == 0.0


@pytest.mark.parametrize("options", [{"rate": 100.0}, {"rate": 1.0, "batch_size": 1, "scale": 3.0}])
def test_a_rate_that_no_client_can_take_is_only_a_limit(make_federation, options):
    federation = make_federation(**options)
    assert (federation.sizes.steepness <= 2.0).all()
    assert (federation.plan.rates < options["rate"]).all()
    result = federation.run_round(federation.initial_model(0), Position(0, 0), np.arange(5))
    assert federation.facts.rounding_bounded
    assert result.rounding > 0.0


def test_momentum_costs_more(make_federation):
    start = make_federation().initial_model(0)
    plain, heavy = (
        make_federation(momentum=momentum).run_round(start, Position(0, 0), np.arange(5)).rounding
        for momentum in (0.0, 0.9)
    )
    assert plain < heavy
