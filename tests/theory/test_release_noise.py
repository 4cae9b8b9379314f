"""Noise on releases: distances against direct solves, composition against an independent accountant, and attackers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant

from sifu.errors import InputError
from sifu.theory.calibration import delta_reached
from sifu.theory.closed_form import FixedPoint, statistics_of, total
from sifu.theory.release_noise import Release, epsilon_reached, ratio_of

FIXED = FixedPoint(features=6, outputs=3, norm=10.0)
R = 0.05


def _clients(seed: int, sizes: tuple[int, ...] = (9, 4, 1, 12)) -> list[tuple[np.ndarray, np.ndarray]]:
    draw = np.random.default_rng(seed)
    clients = []
    for size in sizes:
        phi = draw.normal(size=(size, FIXED.features))
        targets = np.eye(FIXED.outputs)[draw.integers(FIXED.outputs, size=size)] - 1.0 / FIXED.outputs
        clients.append((phi, targets))
    return clients


def _direct(phi: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return the head by the formula of docs/theory.md, section 14.4, on rounded samples, without the tested code."""
    rows = np.hstack([np.rint(phi * 2.0**16) / 2.0**16, np.ones((len(phi), 1))])
    wanted = np.rint(targets * 2.0**16) / 2.0**16
    gram = rows.T @ rows
    penalty = R * np.trace(gram) / len(gram)
    return np.linalg.solve(gram + penalty * np.eye(len(gram)), rows.T @ wanted)


def _release(clients: list[tuple[np.ndarray, np.ndarray]]) -> Release:
    return Release(total(FIXED, [statistics_of(FIXED, *client) for client in clients]), R)


@pytest.mark.parametrize("seed", range(4))
def test_the_distance_of_a_client_is_that_of_the_head_without_it(seed):
    clients = _clients(seed)
    release, head = _release(clients), _direct(*map(np.concatenate, zip(*clients, strict=True)))
    for place, client in enumerate(clients):
        others = clients[:place] + clients[place + 1 :]
        truth = float(np.linalg.norm(head - _direct(*map(np.concatenate, zip(*others, strict=True)))))
        bound = release.distance_without(statistics_of(FIXED, *client))
        assert truth * (1.0 - 1e-9) <= bound <= truth * (1.0 + 1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_the_distance_of_a_record_is_that_of_the_head_without_it(seed):
    clients = _clients(seed)
    phi, targets = map(np.concatenate, zip(*clients, strict=True))
    bounds = _release(clients).distances_of_records(phi, targets)
    head, rows = _direct(phi, targets), np.arange(len(phi))
    for row in rows:
        truth = float(np.linalg.norm(head - _direct(phi[rows != row], targets[rows != row])))
        assert truth * (1.0 - 1e-9) <= bounds[row] <= truth * (1.0 + 1e-6)


def test_control_with_lambda_left_as_it_was_the_distance_is_another():
    """Negative control: the usual influence formula keeps lambda, but the counterfactual's lambda depends on its own
    trace.
    """
    clients = _clients(0)
    phi, targets = map(np.concatenate, zip(*clients, strict=True))
    rows = np.hstack([phi, np.ones((len(phi), 1))])
    gram = rows.T @ rows
    solved = np.linalg.solve(gram + R * np.trace(gram) / len(gram) * np.eye(len(gram)), rows.T)
    left = targets - rows @ _direct(phi, targets)
    influence = np.linalg.norm(solved, axis=0) * np.linalg.norm(left, axis=1)
    influence /= 1.0 - np.einsum("ij,ji->i", rows, solved)
    assert np.max(np.abs(influence / _release(clients).distances_of_records(phi, targets) - 1.0)) > 0.01


def test_a_client_alone_is_as_far_as_the_whole_head():
    clients = _clients(1, sizes=(7,))
    release = _release(clients)
    truth = float(np.linalg.norm(_direct(*clients[0])))
    assert release.distance_without(statistics_of(FIXED, *clients[0])) == pytest.approx(truth, rel=1e-6)
    lonely = _clients(2, sizes=(1,))
    with pytest.raises(InputError, match="needs at least one other record"):
        _release(lonely).distances_of_records(*lonely[0])


@pytest.mark.parametrize(("distances", "noise"), [((0.3, 0.4, 0.1), 0.5), ((0.02,) * 7, 0.1), ((1.0,), 4.0)])
def test_the_composition_agrees_with_an_independent_accountant(distances, noise):
    accountant = PLDAccountant()
    for distance in distances:
        accountant.compose(dp_event.GaussianDpEvent(noise / distance))
    reached = epsilon_reached(distances, noise, 1e-5)
    assert reached == pytest.approx(accountant.get_epsilon(1e-5), rel=2e-3)


DRAWS = 2000


def _advantages(noise: float, stated: float, seed: int) -> np.ndarray:
    """Return the likelihood-ratio attacker's true delta(epsilon) over three releases, minus the stated one.

    Both federations release a head three times: with everyone, after another client left, and after a second one left.

    """
    clients, draw = _clients(seed), np.random.default_rng(1000 + seed)
    target = clients[0]
    counterfactuals = []
    for staying in (clients, clients[:3], clients[:2]):
        left = [client for client in staying if client is not target]
        heads = [_direct(*map(np.concatenate, zip(*some, strict=True))).ravel() for some in (staying, left)]
        counterfactuals.append(heads)
    inside, outside = (
        np.concatenate([heads[counterfactual] for heads in counterfactuals]) for counterfactual in (0, 1)
    )
    signal = inside - outside
    logs = []
    for centre in (inside, outside):
        released = centre + noise * draw.normal(size=(DRAWS, centre.size))
        logs.append((released - (inside + outside) / 2.0) @ signal / noise**2)
    epsilons = np.linspace(0.0, 2.0, 9)
    reached = [np.mean(logs[0] > value) - math.exp(value) * np.mean(logs[1] > value) for value in epsilons]
    return np.array(reached) - [delta_reached(value, 1.0 / stated) for value in epsilons]


@pytest.mark.parametrize("seed", range(3))
def test_the_optimal_attacker_never_does_better_than_stated(seed):
    clients = _clients(seed)
    target = statistics_of(FIXED, *clients[0])
    distances = [_release(clients[:count]).distance_without(target) for count in (4, 3, 2)]
    noise = float(np.linalg.norm(distances))  # mu = 1
    stated = ratio_of(distances, noise)
    epsilons = np.linspace(0.0, 2.0, 9)
    tolerance = 4.0 * np.sqrt((1.0 + np.exp(2.0 * epsilons) * 0.3) / 4.0 / DRAWS)
    assert np.all(_advantages(noise, stated, seed) <= tolerance)
    assert np.any(_advantages(noise / 2.0, stated, seed) > tolerance), "half the noise must be caught"
