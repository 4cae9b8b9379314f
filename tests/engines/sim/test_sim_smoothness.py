"""Smoothness beta: an upper bound on the eigensolver's value, on every batch drawn, and on the true curvature."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sifu.core.engine import Position
from sifu.engines.sim import LocalTraining
from sifu.engines.sim.embedded_clients import OBJECTIVES, CheckedClient
from sifu.engines.sim.float_rounding import linear_curvature
from sifu.engines.sim.local_training import batch_sequence
from sifu.errors import InputError
from suite_setup import examples

FACTORS = {"softmax": 0.5, "logistic": 0.25, "least_squares": 1.0}


def curvature(x: np.ndarray, objective, training: LocalTraining, name: str) -> SimpleNamespace:
    """Return smoothness and energy of a single client."""
    smoothness, energy = linear_curvature([CheckedClient(name, x, np.zeros(len(x), int))], objective, training)
    return SimpleNamespace(smoothness=float(smoothness[0]), energy=float(energy[0]))


def reference(x: np.ndarray, factor: float) -> float:
    extended = np.column_stack([x.astype(np.float64), np.ones(len(x))])
    return factor * float(np.linalg.norm(extended, 2)) ** 2 / len(x)


@pytest.mark.parametrize("kind", FACTORS)
@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 10**6), st.sampled_from([1e-3, 1.0, 1e4]), st.booleans())
def test_beta_is_never_below_the_reference_and_hardly_above(kind, samples, features, seed, scale, single):
    x = scale * np.random.default_rng(seed).standard_normal((samples, features))
    x = x.astype(np.float32) if single else x
    measured = curvature(x, OBJECTIVES[kind], LocalTraining(0.1, 1, weight_decay=0.25), "a")
    exact = reference(x, FACTORS[kind]) + 0.25
    assert exact <= measured.smoothness <= exact * (1 + 1e-8)
    assert measured.energy >= measured.smoothness - 0.25 - 1e-8 * measured.smoothness


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(2, 40), st.integers(1, 12), st.integers(1, 12), st.integers(0, 10**6))
def test_the_batch_beta_bounds_every_batch_drawn(samples, batch_size, features, seed):
    x = np.random.default_rng(seed).standard_normal((samples, features)) * 3.0
    training = LocalTraining(0.1, steps=15, batch_size=batch_size, weight_decay=0.5)
    measured = curvature(x, OBJECTIVES["softmax"], training, "a")
    for batch in batch_sequence(batch_size, samples, seed, Position(0, seed), 0, training.steps):
        assert reference(x[batch], 0.5) + 0.5 <= measured.smoothness * (1 + 1e-14)
        energy = 0.5 * (np.square(x[batch]).sum() + batch.size) / batch.size
        assert energy <= measured.energy * (1 + 1e-14)
    rows = 0.5 * (np.square(x).sum(axis=1).max() + 1.0) + 0.5
    assert measured.smoothness <= rows * (1 + 1e-8)


def test_a_batch_beta_of_the_whole_data_would_be_too_small():
    """Negative control: the beta of the whole data does not bound the batches."""
    x = np.array([[10.0], [0.0], [0.0], [0.0]])
    whole = curvature(x, OBJECTIVES["softmax"], LocalTraining(0.1, 4), "a").smoothness
    assert reference(x[:1], 0.5) > 3 * whole
    batched = curvature(x, OBJECTIVES["softmax"], LocalTraining(0.1, 4, batch_size=1), "a").smoothness
    assert batched >= reference(x[:1], 0.5)


@pytest.mark.parametrize("kind", FACTORS)
def test_beta_bounds_the_true_hessian(kind):
    """beta bounds autograd's Hessian at random models; it is tight for least squares, whose Hessian is constant."""
    generator = np.random.default_rng(0)
    objective = OBJECTIVES[kind]
    outputs = 1 if kind == "logistic" else 3
    for _ in range(10):
        x = generator.standard_normal((6, 2)) * 2.0
        if kind == "least_squares":
            y = torch.tensor(generator.standard_normal((6, outputs)))
        else:
            y = torch.tensor(generator.integers(0, 2 if kind == "logistic" else 3, 6))
        extended = torch.tensor(np.column_stack([x, np.ones(6)]))

        def loss(flat, extended=extended, y=y):
            return objective.mean_loss(extended @ flat.reshape(3, outputs), y)

        weights = torch.tensor(generator.standard_normal(3 * outputs) * 0.3)
        top = float(torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss, weights))[-1])
        beta = curvature(x, objective, LocalTraining(0.1, 1), "a").smoothness
        assert top <= beta
        if kind == "least_squares":
            assert top == pytest.approx(beta, rel=1e-8)


def test_the_engine_reports_expansions_of_linear_models_only(make_federation):
    plain, heavy, decayed = (make_federation(**some) for some in ({}, {"momentum": 0.9}, {"weight_decay": 0.2}))
    assert all(client.expansion == 1.0 for engine in (plain, heavy) for client in engine.clients)
    assert [client.expansion for client in decayed.clients] == pytest.approx([(1 - 0.1 * 0.2) ** 5] * 5, rel=1e-9)
    assert decayed.facts.smooth_model
    network = make_federation(model="mlp")
    assert all(client.expansion is None for client in network.clients)
    assert (network.plan.rates == 0.1).all()
    assert not network.facts.smooth_model


def test_a_network_needs_a_number_as_its_rate(make_federation):
    with pytest.raises(InputError, match="needs a linear model: give a number"):
        make_federation(model="mlp", rate=np.inf)


def test_steps_of_float32_training_are_those_of_the_float32_data(make_federation):
    single = make_federation(rate=np.inf, dtype="float32", scale=1 / 3)
    double = make_federation(rate=np.inf, dtype="float64", scale=1 / 3)
    assert (single.plan.rates != double.plan.rates).all()


def test_samples_whose_squares_overflow_are_refused():
    with pytest.raises(InputError, match="client 'huge' are so large that their squares overflow"):
        curvature(np.full((2, 2), 1e200), OBJECTIVES["softmax"], LocalTraining(0.1, 1), "huge")


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=12), st.integers(1, 40), st.sampled_from([None, 3, 8]))
def test_clients_side_by_side_have_the_curvature_they_have_alone(sizes, features, batch_size):
    """Padding to a common size and processing in pieces do not change a client's curvature."""
    generator = np.random.default_rng(sum(sizes))
    clients = [
        CheckedClient(f"{number}", generator.standard_normal((size, features)), np.zeros(size, int))
        for number, size in enumerate(sizes)
    ]
    training = LocalTraining(0.1, 3, batch_size=batch_size, weight_decay=0.1)
    smoothness, energy = linear_curvature(clients, OBJECTIVES["softmax"], training)
    for place, client in enumerate(clients):
        alone = curvature(client.x, OBJECTIVES["softmax"], training, client.name)
        assert smoothness[place] == pytest.approx(alone.smoothness, rel=1e-12)
        assert energy[place] == pytest.approx(alone.energy, rel=1e-12)
