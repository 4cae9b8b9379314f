"""Theorem 1 on random federations: the distance to the counterfactual never exceeds Psi (docs/theory.md, section 4.1).

`tiny_federation` runs every class of losses in all counterfactuals at once. The same checker, `violations`, then
receives mutated rules on stored seeds and must find each of them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_federation import (
    CONVEX,
    Array,
    Client,
    Federation,
    Run,
    largest_smoothness,
    part_of,
    path_of,
    random_clients,
    random_schedule,
    tracked,
    train,
    violations,
)

from sifu.theory.history import client_curve
from sifu.theory.regularity import classify, largest_momentum_step
from suite_setup import examples

SEEDS = st.integers(0, 2**32 - 1)


def draw_federation(generator: np.random.Generator, family: str) -> Federation:
    """Draw a random federation of one regularity class, with hyper-parameters up to the edge of the class."""
    growing, heavy = family.endswith("growing"), family.startswith("momentum")
    loss = str(generator.choice(("cosine", "tanh") if growing and generator.random() < 0.7 else CONVEX))
    clients = random_clients(generator, loss, int(generator.integers(2, 7)), int(generator.integers(1, 5)))
    batch = int(generator.choice((0, 0, 1, 2)))
    decay = float(generator.choice((0.05, 0.5, 2.0) if family == "strongly convex" else (0.0, 0.05, 0.5)))
    momentum = float(generator.choice((0.3, 0.9, 0.99))) if heavy else 0.0
    true_curvature = family == "strongly convex" and bool(generator.random() < 0.5)
    beta = largest_smoothness(loss, clients, batch) + decay
    rate, assumed = float(generator.choice((0.05, 0.5, 1.8, np.inf))) / beta, None
    if growing:
        rate = float(generator.choice((0.02, 0.1, 0.5) if heavy else (0.1, 0.5, 1.3, 2.5))) / beta
        assumed = max(growth(rate * beta, momentum, steps) for steps in {client.steps for client in clients})
    seed = int(generator.integers(1e9))
    return Federation(loss, clients, rate, momentum, decay, batch, seed, true_curvature, assumed)


def growth(product: float, momentum: float, steps: int) -> float:
    """Return B such that `steps` steps at eta beta = `product` push two models apart by at most B^steps.

    Without convexity only the triangle inequality is left: v' = rho v + product d, d' = d + v'.
    """
    distance, velocity = 1.0, 0.0
    for _ in range(steps):
        velocity = momentum * velocity + product * distance
        distance += velocity
    return float(distance ** (1.0 / steps)) * (1.0 + 1e-9)


def draw_run(seed: int, family: str, *, rounds: int = 12) -> Run:
    generator = np.random.default_rng(seed)
    federation = draw_federation(generator, family)
    count = len(federation.clients)
    removed = [frozenset([i]) for i in range(count)]
    schedule = random_schedule(generator, count, rounds, float(generator.choice((0.2, 0.5, 1.0))))
    lonely = [int(generator.integers(count))]
    schedule[int(generator.integers(rounds))] = []
    schedule[int(generator.integers(rounds))] = lonely  # a round of one client alone
    return train(federation, removed, schedule, 2.0 * generator.normal(size=federation.size))


def by_tracker(run: Run) -> list[list[float]]:
    assert all(len(clients) == 1 for clients in run.removed)
    return [[float(values[min(clients)]) for clients in run.removed] for values in tracked(run)]


def by_client_curve(run: Run) -> list[list[float]]:
    path = path_of(run)
    curves = [client_curve(path, part_of(run.federation, run.records, min(clients))) for clients in run.removed]
    return [[curve.one(depth) for curve in curves] for depth in range(len(path))]


FAMILIES = ("strongly convex", "convex", "growing", "momentum convex", "momentum growing")


@pytest.mark.parametrize("family", FAMILIES)
@given(seed=SEEDS)
def test_distance_never_exceeds_psi_of_a_client(family: str, seed: int) -> None:
    run = draw_run(seed, family)
    assert violations(run, by_tracker) == []
    assert violations(run, by_client_curve) == []


@pytest.mark.parametrize("family", FAMILIES)
@given(seed=SEEDS)
def test_tracker_and_history_agree(family: str, seed: int) -> None:
    """Tracker and history agree to 1e-12, and bit for bit if every L is 1, with and without a rounding allowance."""
    run = draw_run(seed, family)
    rounding = float(np.random.default_rng(seed).choice((0.0, 1e-13)))
    path = path_of(run, rounding=rounding)
    online = np.array(tracked(run, rounding))
    for client in range(len(run.federation.clients)):
        curve = client_curve(path, part_of(run.federation, run.records, client))
        offline = curve.at(np.arange(len(path)))
        if path.constant_when_absent and all(factor == 1.0 for factor in run.federation.factors):
            assert offline.tolist() == online[:, client].tolist()
        np.testing.assert_allclose(offline, online[:, client], rtol=1e-12, atol=0.0)


def test_classes_are_reached() -> None:
    """The families above belong to their classes; otherwise the tests before this one would prove less."""
    seen = set()
    for family in FAMILIES:
        for seed in range(30):
            federation = draw_run(seed, family, rounds=1).federation
            seen.add((family, classify(np.array(federation.factors), federation.assumed is not None)))
            if len(set(federation.rates)) == len(federation.rates) > 1:
                seen.add((family, "steps of their own"))
            if max(federation.factors) > 1.0:
                seen.add((family, "L above 1"))
    assert {
        ("strongly convex", "strongly convex"),
        ("convex", "convex"),
        ("growing", "assumed"),
        ("momentum convex", "convex"),
        ("momentum growing", "assumed"),
        ("growing", "L above 1"),
        ("momentum growing", "L above 1"),
        ("convex", "steps of their own"),
        ("strongly convex", "steps of their own"),
        ("momentum convex", "steps of their own"),
    } <= seen


# Equality: one dimension, quadratics of known curvature; the removed client always pulls in the same direction.


def tight_run(seed: int, rounds: int = 8, population: int = 6) -> Run:
    """Return a run with equality in the recursion of theorem 1, so that every smaller mutated rule fails.

    The optimum of client 0 is far to the right, and every step factor 1 - eta beta_i is positive, so no sign changes.
    """
    generator = np.random.default_rng(seed)
    clients = []
    for index in range(population):
        n = int(generator.integers(1, 6))
        slope = float(generator.uniform(0.3, 1.0))
        rows = np.full((n, 1), slope)
        target = 50.0 if index == 0 else float(generator.uniform(-1.0, 1.0))
        clients.append(Client(rows, np.full(n, target * slope), int(generator.integers(1, 4))))
    federation = Federation("quadratic", clients, 0.4, true_curvature=True)
    schedule = [[0, *np.flatnonzero(generator.random(population - 1) < 0.7) + 1] for _ in range(rounds)]
    for number in range(rounds // 2, rounds):  # then client 0 is absent, so that only L acts
        schedule[number] = [i for i in schedule[number] if i != 0] or [1]
    return train(federation, [frozenset([0])], schedule, np.zeros(1))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_psi_is_reached_in_one_dimension(seed: int) -> None:
    run = tight_run(seed)
    for depth, values in enumerate(by_tracker(run)):
        assert values[0] == pytest.approx(run.distance(depth, 0), rel=1e-7, abs=1e-12)
    assert violations(run, by_tracker) == []


# Negative controls: the plain recursion with one defect each.


def plain_recursion(
    run: Run,
    *,
    factor: Callable[[int], float] | None = None,
    drop_increment_at: int = -1,
    drop_growth: bool = False,
    population_weights: bool = False,
    renormalise: bool = True,
    lonely_is_zero: bool = False,
) -> list[list[float]]:
    """Compute Psi' = L Psi + Delta for single clients, optionally with a defect that the checker must find."""
    federation = run.federation
    local = factor or (lambda i: federation.factors[i])
    everyone = int(federation.samples(range(len(federation.clients))).sum())
    values = [[0.0] * len(run.removed)]
    for number, record in enumerate(run.records):
        present = record.participants.tolist()
        total = int(record.samples.sum())
        row = []
        for counterfactual, gone in enumerate(run.removed):
            (client,) = gone
            psi = values[-1][counterfactual]
            rest = {i: int(n) for i, n in zip(present, record.samples, strict=True) if i != client}
            mass = sum(rest.values())
            growth = 1.0
            if mass and not drop_growth:
                share = mass if renormalise else total
                growth = sum(n * local(i) for i, n in rest.items()) / share
            increment = 0.0
            if client in present:
                index = present.index(client)
                n, drift = int(record.samples[index]), float(record.drifts[index])
                whole = everyone if population_weights else total
                increment = n / (whole - n) * drift if whole > n else record.mean_shift
                if mass == 0 and lonely_is_zero:
                    increment = 0.0
            row.append(growth * psi + (0.0 if number == drop_increment_at else increment))
        values.append(row)
    return values


@settings(max_examples=examples(30))
@given(seed=SEEDS, family=st.sampled_from(FAMILIES))
def test_the_plain_recursion_is_the_tracker(seed: int, family: str) -> None:
    """Without a defect the plain recursion equals the tracker, so each control has one defect."""
    run = draw_run(seed, family)
    np.testing.assert_allclose(by_tracker(run), plain_recursion(run), rtol=1e-9, atol=1e-300)


def test_control_a_dropped_term_is_caught() -> None:
    run = tight_run(seed=1)
    assert violations(run, plain_recursion) == []
    for number in range(4):
        assert violations(run, lambda r, n=number: plain_recursion(r, drop_increment_at=n))


def test_control_population_weights_are_caught() -> None:
    run = tight_run(seed=2)
    assert violations(run, lambda r: plain_recursion(r, population_weights=True))


def test_control_a_round_of_the_removed_client_alone_is_caught() -> None:
    run = tight_run(seed=3)
    alone = train(run.federation, run.removed, [[0], [0, 1], [0]], np.zeros(1))
    assert violations(alone, by_tracker) == []
    assert violations(alone, lambda r: plain_recursion(r, lonely_is_zero=True))


PAIRS = [[0, 1], *[[1, 2]] * 5]
"""Schedule in which client 0 takes part once."""


def diverging_run() -> Run:
    """Return a run in which client 0 takes part once, and the others then step at eta beta = 2.5
    around their optimum.
    """
    clients = [Client(np.array([[1.0]]), np.array([t]), 2) for t in (5.0, 0.0, 0.0)]
    return train(Federation("quadratic", clients, 2.5, assumed=1.5), [frozenset([0])], PAIRS, np.zeros(1))


def test_control_b_of_one_beyond_two_over_beta_is_caught() -> None:
    run = diverging_run()
    assert violations(run, by_tracker) == []
    assert violations(run, lambda r: plain_recursion(r, factor=lambda _: 1.0))


def test_control_growth_left_out_is_caught() -> None:
    run = diverging_run()
    assert violations(run, lambda r: plain_recursion(r, drop_growth=True))


def test_control_weights_not_renormalised_are_caught() -> None:
    """Negative control: L with w_i instead of q_i = w_i / (1 - w_W) is too small if the removed client took part."""
    run = tight_run(seed=1)
    assert violations(run, lambda r: plain_recursion(r, renormalise=False))


def test_control_momentum_past_x_max_as_convex_is_caught() -> None:
    """Negative control: with K = 2 heavy-ball steps at rho = 0.9, eta beta = 1.45 is convex without momentum, but
    beyond x_max = 0.892.

    A round then expands by |p_2(1.45)| = 1.1025 on any quadratic of that curvature.

    """
    clients = [Client(np.array([[1.0]]), np.array([t]), 2) for t in (5.0, 0.0, 0.0)]

    def run_at(rate: float, assumed: float | None) -> Run:
        federation = Federation("quadratic", clients, rate, momentum=0.9, assumed=assumed)
        return train(federation, [frozenset([0])], PAIRS, np.zeros(1))

    past = run_at(1.45, 1.05 * (1.0 + 1e-9))  # 1.05^2 = 1.1025
    assert violations(past, by_tracker) == []
    assert violations(past, lambda r: plain_recursion(r, factor=lambda _: 1.0))
    own = run_at(1.45, None)
    assert own.federation.rates[0] == pytest.approx(largest_momentum_step(2, 0.9), rel=1e-7)
    assert violations(own, by_tracker) == []


def worst_momentum_growth(steps: int, momentum: float, product: float, tries: int, seed: int) -> float:
    """Return the largest |delta_K| found over convex losses (quadratics in the plane) that change with each step."""
    generator = np.random.default_rng(seed)
    delta = np.tile([1.0, 0.0], (tries, 1))
    velocity = np.zeros_like(delta)
    for _ in range(steps):
        angle = generator.uniform(0.0, np.pi, tries)
        direction = np.stack([np.cos(angle), np.sin(angle)], axis=1)
        strength = generator.choice((0.0, 1.0), tries)[:, None]
        gradient = strength * np.sum(direction * delta, axis=1, keepdims=True) * direction
        velocity = momentum * velocity + gradient
        delta = delta - product * velocity
    return float(np.max(np.linalg.norm(delta, axis=1)))


@pytest.mark.parametrize("momentum", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("steps", [2, 3, 5, 10])
def test_x_max_holds_for_losses_that_change_every_step(steps: int, momentum: float) -> None:
    """20,000 random sequences of rank-one quadratics never expand at x_max; far beyond it some do."""
    edge = largest_momentum_step(steps, momentum)
    assert worst_momentum_growth(steps, momentum, edge, 20_000, seed=steps) <= 1.0 + 1e-12
    assert worst_momentum_growth(steps, momentum, 4.0 * edge, 20_000, seed=steps) > 1.0


def test_fixed_size_sampling_is_another_counterfactual() -> None:
    """If another client fills the slot, the distance may exceed Psi, so such a run is never `proven`."""
    generator = np.random.default_rng(0)
    exceeded = 0
    for trial in range(40):
        clients = random_clients(generator, "logistic", 6, 2)
        federation = Federation("logistic", clients, 1.0 / largest_smoothness("logistic", clients, 0), seed=trial)
        rounds = [generator.permutation(6)[:2].tolist() for _ in range(8)]
        real = train(federation, [frozenset([0])], rounds, np.zeros(2))
        refilled = [
            [int(generator.choice([j for j in range(1, 6) if j not in r])) if i == 0 else i for i in r] for r in rounds
        ]
        other: Array = train(federation, [], refilled, np.zeros(2)).models[-1][0]
        exceeded += float(np.linalg.norm(real.models[-1][0] - other)) > by_tracker(real)[-1][0]
        assert violations(real, by_tracker) == []
    assert exceeded > 0
