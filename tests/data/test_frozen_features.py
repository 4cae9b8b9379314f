"""Frozen features: the module is applied to each sample separately, and certificates of a head on them are proven."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import sifu  # noqa: E402
from sifu.data import ClientData, from_dataset, load, partition  # noqa: E402
from sifu.data.feature_maps.fixed_networks import NetworkFeatures  # noqa: E402
from sifu.engines.sim.own_steps import safe_step  # noqa: E402


def digit_clients(count: int, samples: int) -> tuple[ClientData, ...]:
    dataset = load("digits")
    parts = partition("iid", dataset.y_train, count, samples, np.random.default_rng(0))
    return from_dataset(dataset, parts, flat=False)


def filters(count: int) -> torch.nn.Module:
    """Return a module of random filters followed by means over 2 x 2 regions."""
    torch.manual_seed(0)
    convolution = torch.nn.Conv2d(1, count, 3, padding=1, dtype=torch.float64)
    return torch.nn.Sequential(convolution, torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten())


def test_features_of_a_sample_do_not_depend_on_the_samples_beside_it() -> None:
    mixing = torch.nn.Sequential(
        torch.nn.Conv2d(1, 3, 3, dtype=torch.float64),
        torch.nn.BatchNorm2d(3, dtype=torch.float64),
        torch.nn.Dropout(0.5),
    )
    clients = digit_clients(3, 6)
    features = NetworkFeatures(mixing, (1, 8, 8))
    np.testing.assert_array_equal(features(clients[1].x[2:3])[0], features(clients[1].x)[2])
    assert mixing.training  # the mode is unchanged
    # Negative control: in training mode batch norm and dropout would make them differ.
    with torch.no_grad():
        single, all_ = (mixing(torch.as_tensor(x)).numpy() for x in (clients[1].x[2:3], clients[1].x))
    assert not np.allclose(single[0], all_[2])


def test_a_head_on_frozen_features_is_proven(tmp_path: Path) -> None:
    features = NetworkFeatures(filters(12), (1, 8, 8), norm=4.0)
    mapped = [ClientData(client.name, features(client.x), client.y) for client in digit_clients(30, 10)]
    spec = {
        "data": {"preprocessing": "fixed"},
        "model": {"kind": "softmax", "outputs": 10},
        "local": {"steps": 5},
        "stop": {"target": 0.0, "max_rounds": 6},
    }
    run = sifu.train(spec, run=tmp_path / "run", clients=mapped)
    steps = [safe_step(client.x, "softmax", 5).rate for client in mapped]
    assert min(steps) >= 2.0 / ((4.0**2 + 1.0) / 2.0) * (1.0 - 1e-6)
    (outcome,) = run.forget(["client-003"], sigma=0.5, level="proven")
    assert outcome.level == "proven"
    assert run.verify().holds
