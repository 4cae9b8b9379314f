"""`local.clip`: every step's gradient is scaled to a norm of at most c (docs/theory.md, section 5.9)."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from covering import covering
from sifu.core.engine import Position
from sifu.core.premises import regularity_premise
from sifu.core.spec import Spec
from sifu.engines.sim import LinearModel, LocalTraining, SimulatedFederation, SimulationSettings, make_model
from sifu.errors import InputError
from sifu.run.regularities import Regularities

TOLERANCE = {"float64": 1e-10, "float32": 2e-3}
HERE = Position(1, 4)


def separate(model: np.ndarray, other: np.ndarray) -> float:
    return float(np.linalg.norm((model - other).astype(np.float64)) / np.linalg.norm(other.astype(np.float64)))


@pytest.mark.parametrize(
    ("kind", "dtype", "momentum", "weight_decay", "batch_size", "features"),
    covering(
        ("softmax", "logistic", "least_squares"),
        ("float64", "float32"),
        ((0.0, False), (0.9, False), (0.5, True)),
        (0.0, 0.3),
        (None, 2, 4),
        (5, 40),  # in float32: passes over features, and passes over samples
    ),
)
def test_the_loop_and_the_linear_passes_agree(
    make_federation, kind, dtype, momentum, weight_decay, batch_size, features
):
    options = {
        "dtype": dtype, "momentum": momentum[0], "nesterov": momentum[1], "weight_decay": weight_decay,
        "batch_size": batch_size, "features": features, "rate": 0.5 / features, "steps": 6,
    }  # fmt: skip
    loop, fast = (make_federation(kind, strategy=name, clip=0.4, **options) for name in ("loop", "vectorised"))
    free = make_federation(kind, strategy="loop", **options)
    start = np.random.default_rng(1).standard_normal(loop.layout.size).astype(dtype)
    expected, clipped, unclipped = (engine.run_round(start, HERE, np.arange(5)) for engine in (loop, fast, free))
    assert separate(clipped.model - start, expected.model - start) < TOLERANCE[dtype]
    assert separate(clipped.drifts, expected.drifts) < TOLERANCE[dtype]
    assert clipped.rounding == expected.rounding
    # Control: clipping matters in this setting.
    assert separate(unclipped.model - start, expected.model - start) > 10 * TOLERANCE[dtype]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "weight_decay": 0.1}, {"momentum": 0.5, "nesterov": True}])
@pytest.mark.parametrize(
    ("name", "shape"), [("cnn", (8, 9)), ("cnn_fashion_mnist", (1, 7, 8)), ("cnn_celeba", (3, 11, 16))]
)
def test_the_loop_and_the_convolutional_passes_agree(name, shape, options, threads, monkeypatch):
    from sifu.engines.sim.cpu_conv import conv_trainer

    monkeypatch.setattr(conv_trainer, "PIECE_BYTES", 1)  # several pieces per batch, shared by several threads
    generator = np.random.default_rng(3)
    clients = [
        SimpleNamespace(name=f"client-{n}", x=generator.standard_normal((n, *shape)), y=np.arange(n) % 4)
        for n in (4, 7, 12, 5)
    ]
    training = LocalTraining(0.05, 3, 5, clip=0.3, **options)
    model = make_model(name, shape, 4)
    start = model.initial(5, 0, "float64")
    free_training, before = replace(training, clip=0.0), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        loop, fast, free = (
            SimulatedFederation(clients, model, chosen, SimulationSettings(seed=5, strategy=strategy)).run_round(
                start, HERE, np.arange(4)
            )
            for chosen, strategy in (
                (training, "loop"),
                (training, "vectorised"),
                (free_training, "loop"),
            )
        )
    finally:
        torch.set_num_threads(before)
    assert separate(fast.model - start, loop.model - start) < 1e-10
    assert separate(free.model - start, loop.model - start) > 1e-3


def test_a_step_is_the_formula_and_that_of_torch():
    """One step agrees with Pi_c by hand and with `clip_grad_norm_` (which divides by norm + 1e-6) and SGD."""
    generator = np.random.default_rng(0)
    x, y = generator.standard_normal((6, 3)), generator.standard_normal((6, 1))
    client = SimpleNamespace(name="a", x=x, y=y)
    federation = SimulatedFederation(
        [client], LinearModel("least_squares", 3, 1), LocalTraining(0.1, 1, clip=0.7, weight_decay=0.2)
    )
    start = generator.standard_normal(4)
    model = federation.run_round(start, HERE, np.arange(1)).model

    extended = np.column_stack([x, np.ones(6)])
    gradient = extended.T @ (extended @ start - y[:, 0]) / 6
    assert np.linalg.norm(gradient) > 0.7
    clipped = gradient * 0.7 / np.linalg.norm(gradient)
    np.testing.assert_allclose(model, start - 0.1 * (clipped + 0.2 * start), rtol=1e-13)

    weights = torch.nn.Parameter(torch.tensor(start))
    optimizer = torch.optim.SGD([weights], lr=0.1, weight_decay=0.2)
    (((torch.tensor(extended) @ weights - torch.tensor(y[:, 0])) ** 2).mean() / 2).backward()
    clip_grad_norm_([weights], 0.7)
    optimizer.step()
    np.testing.assert_allclose(model, weights.detach().numpy(), rtol=1e-6)


def test_a_bound_that_is_never_reached_changes_nothing(make_federation):
    for dtype, features in itertools.product(("float64", "float32"), (5, 40)):
        free, clipped = (make_federation(clip=clip, dtype=dtype, features=features) for clip in (0.0, 1e6))
        start = np.random.default_rng(2).standard_normal(free.layout.size).astype(dtype)
        results = [engine.run_round(start, HERE, np.arange(5)).model for engine in (free, clipped)]
        np.testing.assert_allclose(results[1], results[0], rtol=1e-12 if dtype == "float64" else 1e-4, atol=1e-6)


def test_no_client_moves_further_than_its_reach(make_federation):
    """No client moves further than reach = eta c K (section 5.9, without momentum and decay)."""
    federation = make_federation("least_squares", clip=0.25, rate=0.1, steps=7, scale=5.0)
    start = np.random.default_rng(1).standard_normal(federation.layout.size)
    updates = federation.local_updates(start, HERE, np.arange(5), 7)
    lengths = np.linalg.norm(updates, axis=1)
    assert (lengths <= 0.1 * 0.25 * 7 * (1 + 1e-12)).all()
    assert lengths.max() > 0.9 * 0.1 * 0.25 * 7  # the bound is nearly reached
    free = make_federation("least_squares", rate=0.1, steps=7, scale=5.0)
    assert np.linalg.norm(free.local_updates(start, HERE, np.arange(5), 7), axis=1).max() > 1.0


def ellipse(clip: float) -> SimulatedFederation:
    """Return a federation of one client with loss (w_1^2 + 9 w_2^2 + b^2)/2: the example of section
    5.9, with a bias.
    """
    x = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 3.0], [0.0, -3.0]]) * np.sqrt(2.0)
    client = SimpleNamespace(name="a", x=x, y=np.zeros((4, 1)))
    return SimulatedFederation([client], LinearModel("least_squares", 2, 1), LocalTraining(0.01, 1, clip=clip))


def test_a_clipped_step_expands_and_stays_within_the_smooth_bound():
    symmetric = np.array([[1.0, -5.0], [-5.0, 9.0]]) / 2.0
    direction = np.append(np.linalg.eigh(symmetric)[1][:, 0], 0.0)
    point = np.array([9.0, 1.0, 0.0])

    def growth(federation: SimulatedFederation) -> float:
        ends = [federation.run_round(p, HERE, np.arange(1)).model for p in (point, point + 1e-4 * direction)]
        return float(np.linalg.norm(ends[0] - ends[1]) / 1e-4)

    clipped, free = ellipse(1.0), ellipse(0.0)
    beta = clipped.clients[0].smoothness
    assert beta is not None
    assert beta == pytest.approx(9.0)
    assert growth(free) <= 1.0  # a convex round does not expand
    assert 1.0 + 0.7 * 0.01 / np.hypot(9, 9) * 0.9 < growth(clipped) <= 1.0 + 0.01 * beta
    # The recorded class is smooth for the clipped federation and convex for the other.
    spec = Spec()
    claimed = Regularities.of(clipped.clients, clipped.facts, spec)
    assert claimed.measured.kind == "smooth"
    assert claimed.factors[0] == pytest.approx(1.0 + 0.01 * beta)
    assert Regularities.of(free.clients, free.facts, spec).measured.kind == "convex"
    premise = regularity_premise(clipped.facts, claimed.measured)
    assert premise.status == "met"
    assert "clipped to a norm of at most 1" in premise.statement


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_run_and_counterfactual_stay_within_what_is_claimed(make_federation, momentum):
    federation = make_federation(clip=0.1, momentum=momentum, weight_decay=0.05, steps=4, rate=0.3)
    factor = Regularities.of(federation.clients, federation.facts, Spec()).factors.max()
    generator = np.random.default_rng(0)
    for number in range(40):
        theta = generator.standard_normal(federation.layout.size)
        phi = theta + generator.standard_normal(theta.size) * 10.0 ** -generator.uniform(0, 12)
        ends = [federation.run_round(model, Position(0, number), np.arange(5)) for model in (theta, phi)]
        distance = np.linalg.norm(ends[0].model - ends[1].model)
        assert distance <= factor * np.linalg.norm(theta - phi) + ends[0].rounding


def test_bounds_that_make_no_sense_are_refused():
    with pytest.raises(InputError, match=r"clip\) must be a number of at least 0"):
        LocalTraining(0.1, 1, clip=-1.0)
    with pytest.raises(InputError, match=r"local\.clip must be 0, or in 1e-9 to 1e9, found -1"):
        Spec.from_mapping({"local": {"clip": -1}})
