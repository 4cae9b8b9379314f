"""Appendix A of the paper: with more features than samples, fine-tuning keeps a trace, and SIFU hides it.

f(theta) = |y - X theta|^2 / (2 n), each client holds a few rows, and all rows together are fewer than the features.
Gradients on the remaining rows lie in their span, so a forgotten row's contribution outside that span never disappears.
"""

from __future__ import annotations

import numpy as np
import pytest
from tiny_federation import Array, Client, Federation, largest_smoothness, part_of, path_of, run_round, train

from sifu.theory.calibration import exact_multiplier
from sifu.theory.history import client_curve
from sifu.theory.rollback import Exposure, Subject, choose_node

FEATURES, CLIENTS, FORGOTTEN = 12, 4, 0


def regression() -> Federation:
    generator = np.random.default_rng(4)
    clients = [Client(generator.normal(size=(2, FEATURES)), generator.normal(size=2), 3) for _ in range(CLIENTS)]
    return Federation("quadratic", clients, 1.0 / largest_smoothness("quadratic", clients, 0))


def outside_span(federation: Federation, model: Array) -> Array:
    """Return the component of a model orthogonal to every remaining row."""
    rows = np.vstack([client.rows for index, client in enumerate(federation.clients) if index != FORGOTTEN])
    basis = np.linalg.qr(rows.T)[0]
    return model - basis @ (basis.T @ model)


def keep_training(federation: Federation, model: Array, rounds: int) -> Array:
    models = model[None, :]
    for number in range(rounds):
        models, _ = run_round(federation, models, [], [i for i in range(CLIENTS) if i != FORGOTTEN], 1000 + number)
    return models[0]


@pytest.mark.parametrize("rounds", [0, 1, 50, 1000])
def test_fine_tuning_keeps_the_trace_for_any_number_of_rounds(rounds: int) -> None:
    federation = regression()
    run = train(federation, [frozenset([FORGOTTEN])], [list(range(CLIENTS))] * 40, np.zeros(FEATURES))
    trained, without = run.models[-1]
    trace = outside_span(federation, trained)
    assert np.linalg.norm(trace) > 0.05
    assert np.linalg.norm(outside_span(federation, without)) < 1e-12  # retraining never leaves the span
    tuned = keep_training(federation, trained, rounds)
    retrained = keep_training(federation, without, rounds)
    np.testing.assert_allclose(outside_span(federation, tuned), trace, rtol=0.0, atol=1e-11)
    assert np.linalg.norm(tuned - retrained) >= np.linalg.norm(trace) - 1e-11


def test_fine_tuning_looks_perfect_all_the_same() -> None:
    """Fine-tuning fits the remaining rows as well as retraining does, so no accuracy shows the trace."""
    federation = regression()
    run = train(federation, [frozenset([FORGOTTEN])], [list(range(CLIENTS))] * 40, np.zeros(FEATURES))
    for model in (keep_training(federation, model, 1500) for model in run.models[-1]):
        for index, client in enumerate(federation.clients):
            if index != FORGOTTEN:
                np.testing.assert_allclose(client.rows @ model, client.targets, atol=0.02)


@pytest.mark.parametrize(("epsilon", "delta"), [(10.0, 0.01), (1.0, 1e-5)])
@pytest.mark.parametrize("sigma", [0.01, 0.1, 1.0, 10.0])
def test_rollback_and_noise_hide_the_trace(epsilon: float, delta: float, sigma: float) -> None:
    federation = regression()
    run = train(federation, [frozenset([FORGOTTEN])], [list(range(CLIENTS))] * 40, np.zeros(FEATURES))
    path = path_of(run)
    curve = client_curve(path, part_of(federation, run.records, FORGOTTEN))
    subject = Subject(0, (FORGOTTEN,), exact_multiplier(epsilon, delta), 1)
    choice = choose_node([Exposure(subject, path, lambda: curve)], range(len(path)), sigma)
    distance = run.distance(choice.depth, 0)
    if choice.exact:
        assert distance == 0.0
    else:
        assert (distance / sigma) ** 2 <= choice.charges[0] <= 1.0 / subject.multiplier**2
    # Training without the client is post-processing: the distance to hide does not grow again.
    later = [keep_training(federation, model, 200) for model in run.models[choice.depth]]
    assert np.linalg.norm(later[0] - later[1]) <= distance + 1e-12


def test_control_no_rollback_breaks_the_budget() -> None:
    """Negative control: a small sigma at the last model, as if fine-tuning had been enough, exceeds the budget."""
    federation = regression()
    run = train(federation, [frozenset([FORGOTTEN])], [list(range(CLIENTS))] * 40, np.zeros(FEATURES))
    sigma, multiplier = 0.01, exact_multiplier(10.0, 0.01)
    assert (run.distance(40, 0) / sigma) ** 2 > 1.0 / multiplier**2
    trace = np.linalg.norm(outside_span(federation, run.models[-1][0]))
    assert (trace / sigma) ** 2 > 1.0 / multiplier**2  # and further training would not help
