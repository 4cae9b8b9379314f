"""Lanes in the setting of the paper's authors: clipped steps, networks without ReLU, their evaluation rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sifu.core.engine import Position
from sifu.core.round_stream import RoundsWanted, stream_rounds
from sifu.core.spec import StopSpec
from sifu.engines.sim import LocalTraining
from sifu.engines.sim.gpu.conv_plan import DeviceLayout, in_flight
from sifu.engines.sim.lanes import lane_engines
from sifu.engines.sim.networks import ConvNet, Convolution

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HERE = Position(1, 3)


def one_round(federation: Any, data: Any) -> np.ndarray:
    """Return the step of one round on a lane."""
    (engine,) = lane_engines([federation], [data], DEVICE)
    try:
        start = federation.initial_model(0)
        return engine.run_round(start, HERE, np.arange(len(federation.clients))).model - start
    finally:
        engine.close()


def round_of_the_loop(federation: Any) -> np.ndarray:
    """Return the same step computed by the plain loop."""
    start = federation.initial_model(0)
    return federation.run_round(start, HERE, np.arange(len(federation.clients))).model - start


def check_clipping(make_federation: Any, model: Any, training: LocalTraining, tolerance: float, **options: Any) -> None:
    """Check a clipped step against the loop; without the bound, or with another bound, the loop's step must differ."""
    federation, data = make_federation(model, training=training, strategy="loop", **options)
    step = one_round(federation, data)
    scale = np.abs(step).max()
    assert np.abs(step - round_of_the_loop(federation)).max() <= tolerance * scale
    for wrong in (0.0, training.clip * 1.1):
        other, _ = make_federation(model, training=replace(training, clip=wrong), strategy="loop", **options)
        assert np.abs(step - round_of_the_loop(other)).max() > 10 * tolerance * scale


@pytest.mark.long
@pytest.mark.parametrize(
    ("network", "training"),
    [
        (
            ConvNet((2, 6, 6), (Convolution(3, 1), Convolution(4, 0, pool=False, relu=False)), (5,), 3, dropout=0.2),
            LocalTraining(0.05, 2, 2, 0.9, clip=0.3),
        ),
        (
            ConvNet((3, 6, 6), (Convolution(8, 1, relu=False), Convolution(16, 1, relu=False)), (), 2),
            LocalTraining(0.05, 2, 2, 0.5, nesterov=True, weight_decay=0.2, clip=0.3),
        ),
    ],
    ids=["as CIFAR's", "as CelebA's"],
)
def test_clipped_steps_of_networks(make_federation: Any, network: ConvNet, training: LocalTraining) -> None:
    check_clipping(make_federation, network, training, 1e-5)


@pytest.mark.long
@pytest.mark.parametrize("pool", [True, False])
def test_networks_without_relu(make_federation: Any, pool: bool) -> None:
    network = ConvNet((1, 6, 6), (Convolution(4, 1, pool=pool, relu=False),), (), 3)
    training = LocalTraining(0.05, 1, 2)
    federation, data = make_federation(network, training=training, strategy="loop")
    step = one_round(federation, data)
    scale = np.abs(step).max()
    assert np.abs(step - round_of_the_loop(federation)).max() <= 1e-5 * scale
    with_relu = replace(network, convolutions=(Convolution(4, 1, pool=pool),))
    other, _ = make_federation(with_relu, training=training, strategy="loop")
    assert np.abs(step - round_of_the_loop(other)).max() > 1e-3 * scale


@pytest.mark.parametrize(
    ("samples", "features", "dtype"), [(5, 40, "float64"), (5, 40, "float32"), (30, 4, "float64"), (30, 4, "float32")]
)
def test_clipped_steps_of_linear_models(make_federation: Any, samples: int, features: int, dtype: str) -> None:
    training = LocalTraining(0.1, 4, 3, 0.9, weight_decay=0.1, clip=0.3)
    tolerance = 1e-12 if dtype == "float64" else 1e-4
    check_clipping(make_federation, (features, 3), training, tolerance, samples=samples, dtype=dtype)


def test_channels_are_stored_in_eights() -> None:
    """Output channels are padded to multiples of 8; a convolution of three channels into four was once wrong on an
    H200.
    """
    network = ConvNet((2, 6, 6), (Convolution(3, 1), Convolution(9, 1)), (5,), 3)
    layout = DeviceLayout.of(network)
    assert [(place.channels_in, place.channels_out) for place in layout.convolutions] == [(4, 8), (8, 16)]
    assert np.unique(layout.entries).size == network.parameters
    assert in_flight(3, 27, 16) == 1  # a loop over 27 in steps of 16 has two passes
    assert in_flight(3, 72, 16) == in_flight(3, 16, 16) == 3


@pytest.mark.long
def test_a_bound_that_is_never_reached_changes_nothing(make_federation: Any) -> None:
    network = ConvNet((1, 4, 4), (Convolution(3, 1),), (5,), 3)
    free, data = make_federation(network)
    far, _ = make_federation(network, training=LocalTraining(0.05, 2, 2, 0.9, clip=1e6))
    expected = one_round(free, data)
    assert np.abs(one_round(far, data) - expected).max() <= 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize("start", [0, 21])
def test_accuracy_is_looked_at_when_it_is_due(make_federation: Any, start: int) -> None:
    """An evaluation that the device did not plan when it ran ahead is made on demand, as in the loop."""
    federation, data = make_federation((6, 3), clients=5, samples=40, dtype="float64")
    begin, active = federation.initial_model(0), np.arange(5)
    stop = StopSpec(target=0.42, max_rounds=70, evaluation="authors")
    wanted = RoundsWanted(stop, begin, accuracy=0.39 if start else None)
    (engine,) = lane_engines([federation], [data], DEVICE)

    def looked(used: Any) -> dict[int, float]:
        rounds = stream_rounds(used, begin, Position(0, start), active, wanted)
        return {
            start + number: done.evaluation.accuracy
            for number, done in enumerate(rounds, 1)
            if done.evaluation is not None
        }

    try:
        seen = looked(engine)
    finally:
        engine.close()
    assert seen == looked(federation)
    gaps = np.diff(list(seen))
    assert len(set(gaps.tolist())) > 2  # the rule changes its interval on the way
