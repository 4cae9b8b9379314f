"""Own safe steps (docs/theory.md, section 5.8): each client limits its step by its own curvature, nobody else's.

`tiny_federation` trains every counterfactual; here the library computes steps and expansions from the same data.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_psi_dominates import by_tracker
from tiny_federation import Array, Federation, Run, momentum_limit, random_clients, random_schedule, train, violations

from sifu.engines.sim import LinearModel, LocalTraining, SimulatedFederation, SimulationSettings
from sifu.engines.sim.embedded_clients import CheckedClient
from sifu.engines.sim.own_steps import safe_step
from sifu.theory.regularity import expansions, largest_momentum_step, own_rates, safe_rates

SEEDS = st.integers(0, 2**32 - 1)
LOSSES = {"quadratic": "least_squares", "logistic": "logistic", "softmax": "softmax"}


def draw(seed: int, stretch: float = 1.0) -> Run:
    """Return a run of a random federation in which each client takes its own step, times `stretch`."""
    generator = np.random.default_rng(seed)
    loss = str(generator.choice(list(LOSSES)))
    clients = random_clients(generator, loss, int(generator.integers(3, 7)), int(generator.integers(1, 4)))
    for client in clients:
        client.rows[:] *= 3.0 ** generator.uniform(-1.0, 1.0)
        client.rows[:, -1] = 1.0  # the constant of the bias
    limit = float(generator.choice((np.inf, np.inf, 0.1, 1.0)))
    momentum = float(generator.choice((0.0, 0.0, 0.5, 0.9)))
    decay, batch = float(generator.choice((0.0, 0.0, 0.05, 0.5))), int(generator.choice((0, 0, 1, 2)))
    federation = Federation(loss, clients, limit, momentum, decay, batch, seed % 1000, stretch=stretch)
    schedule = random_schedule(generator, len(clients), 15, float(generator.choice((0.3, 0.6, 1.0))))
    removed = [frozenset([i]) for i in range(len(clients))]
    return train(federation, removed, schedule, 2.0 * generator.normal(size=federation.size))


def library_rates(federation: Federation) -> tuple[Array, Array]:
    """Return steps and expansions of all clients, from `safe_step` and the samples without the constant."""
    found = [
        safe_step(
            client.rows[:, :-1] if client.rows.shape[1] > 1 else np.zeros((len(client.rows), 1)),
            LOSSES[federation.loss],  # type: ignore[arg-type]
            client.steps,
            rate=federation.local_rate,
            batch=federation.batch,
            momentum=federation.momentum,
            weight_decay=federation.weight_decay,
        )
        for client in federation.clients
    ]
    return np.array([one.rate for one in found]), np.array([one.expansion for one in found])


@given(seed=SEEDS)
def test_the_distance_is_never_above_psi(seed: int) -> None:
    """The largest safe steps (twice those of `safe_step` for squares), and the library's steps with its expansions."""
    run = draw(seed)
    assert violations(run, by_tracker) == []
    again = run.federation
    rates, factors = library_rates(again)
    assert np.all(rates <= np.array(again.rates) * (1.0 + 1e-6))
    again.rates, again.factors = rates.tolist(), factors.tolist()
    schedule = [record.participants.tolist() for record in run.records]
    assert violations(train(again, run.removed, schedule, run.models[0][0]), by_tracker) == []


def test_control_steps_four_times_too_large_are_caught() -> None:
    """Negative control: with unsafe steps the distance is above Psi in at least a third of 120 federations."""
    caught = sum(bool(violations(draw(seed, stretch=4.0), by_tracker)) for seed in range(120))
    assert caught >= 40


@given(seed=SEEDS)
def test_removing_any_client_changes_no_other_step(seed: int) -> None:
    generator = np.random.default_rng(seed)
    sizes = generator.integers(1, 12, int(generator.integers(2, 6))).tolist()
    loss = str(generator.choice(("softmax", "logistic")))
    clients = []
    for number, size in enumerate(sizes):
        x = generator.normal(size=(size, 4)) * 10.0 ** generator.uniform(-2, 2)
        clients.append(CheckedClient(f"c{number}", x, np.arange(size) % 2))
    batch, momentum, decay = generator.choice((0, 1, 3)), generator.choice((0.0, 0.9)), generator.choice((0.0, 0.1))
    training = LocalTraining(float(generator.choice((np.inf, 0.1))), 3, int(batch) or None, momentum, decay)

    def steps(there: list[int]) -> tuple[list[float], list[float | None]]:
        chosen = [clients[number] for number in there]
        engine = SimulatedFederation(chosen, loss_model(loss), training, SimulationSettings(numbers=there))
        return engine.plan.rates.tolist(), [client.expansion for client in engine.clients]

    everyone = list(range(len(sizes)))
    rates, factors = steps(everyone)
    for leaver in everyone:
        stay = [number for number in everyone if number != leaver]
        assert steps(stay) == ([rates[i] for i in stay], [factors[i] for i in stay])
    for number, client in enumerate(clients):  # and `safe_step` is what the engine takes
        own = safe_step(client.x, loss, 3, rate=training.rate, batch=int(batch), momentum=momentum, weight_decay=decay)
        assert own == (rates[number], factors[number])


def loss_model(loss: str) -> LinearModel:
    """Return a linear model, so that outputs are not counted from the labels of those present."""
    return LinearModel(loss, 4, 1 if loss == "logistic" else 2)


@given(
    st.floats(1e-6, 1e6),
    st.floats(0.0, 0.9),
    st.integers(1, 20),
    st.sampled_from((0.0, 0.5, 0.9)),
    st.sampled_from(("softmax", "logistic", "least_squares")),
)
def test_safe_rates_are_never_above_the_edge(
    beta: float, share: float, steps: int, momentum: float, model: str
) -> None:
    """Rates are rounded down from 2 / (beta + lambda) or x_max / beta, and hardly below; half of it for squares."""
    decay = share * beta
    rate = float(safe_rates(np.array([beta]), steps, momentum, decay, model)[0])
    if momentum:
        edge = Fraction(largest_momentum_step(steps, momentum)) / Fraction(beta)
        assert largest_momentum_step(steps, momentum) == pytest.approx(momentum_limit(steps, momentum), rel=1e-6)
    else:
        edge = Fraction(2) / (Fraction(beta) + Fraction(decay))
    edge = edge / 2 if model == "least_squares" else edge
    assert edge * (1 - Fraction(1, 2**40)) <= Fraction(rate) <= edge


def test_a_rate_is_a_limit_and_nothing_to_limit_it_gives_one() -> None:
    assert own_rates(0.1, np.array([0.05, 0.2, np.inf])).tolist() == [0.05, 0.1, 0.1]
    assert own_rates(np.inf, np.array([0.05, np.inf])).tolist() == [0.05, 1.0]


@given(seed=SEEDS, decay=st.floats(1e-6, 5.0), steps=st.integers(1, 30))
def test_expansions_are_never_below_those_of_quadratics(seed: int, decay: float, steps: int) -> None:
    """K steps on a quadratic loss with decay lengthen the worst distance by the norm of a product of matrices."""
    generator = np.random.default_rng(seed)
    losses = [generator.normal(size=(int(generator.integers(1, 4)), 3)) for _ in range(steps)]
    hessians = [rows.T @ rows / len(rows) + decay * np.eye(3) for rows in losses]
    beta = np.array([max(float(np.linalg.eigvalsh(hessian)[-1]) for hessian in hessians) * (1.0 + 1e-12)])
    limit = float(generator.choice((np.inf, 0.01, 0.3)))
    rates = own_rates(limit, safe_rates(beta, steps, 0.0, decay, "softmax"))
    product = np.eye(3)
    for hessian in hessians:
        product = (np.eye(3) - rates[0] * hessian) @ product
    bound = float(expansions(rates, beta, steps, 0.0, decay)[0])
    assert np.linalg.norm(product, 2) <= bound * (1.0 + 1e-12)
    flat = abs(Fraction(1) - Fraction(float(rates[0])) * Fraction(decay)) ** steps  # where the data bend nothing
    assert flat <= Fraction(bound)
    assert bound <= 1.0
    assert expansions(rates, beta, steps, 0.9, decay).tolist() == [1.0]
    assert expansions(rates, beta, steps, 0.0, 0.0).tolist() == [1.0]
