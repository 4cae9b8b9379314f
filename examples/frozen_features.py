"""A linear head on frozen features: a `proven` certificate for an image task.

    python examples/frozen_features.py      digits, 120 clients, a few seconds

The features are random convolutions, drawn from a seed without any client's data; you can use any pretrained torch
module instead. Only the head is trained by softmax regression: it is convex, and every premise is measured.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sifu
from sifu.data import ClientData, from_dataset, load, partition
from sifu.data.feature_maps.fixed_networks import NetworkFeatures


class BothSigns(torch.nn.Module):
    """Module that concatenates ReLU(x) and ReLU(-x)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return twice as many channels."""
        return torch.cat([x.relu(), (-x).relu()], dim=1)


def random_convolutions(filters: int = 16) -> torch.nn.Module:
    """Return seeded filters of mean zero and length one, followed by means over 2 x 2 regions."""
    weights = torch.randn(filters, 1, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = weights - weights.mean(dim=(1, 2, 3), keepdim=True)
    convolution = torch.nn.Conv2d(1, filters, 3, padding=1, bias=False, dtype=torch.float64)
    convolution.weight.data = weights / weights.flatten(1).norm(dim=1)[:, None, None, None]
    return torch.nn.Sequential(convolution, BothSigns(), torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten())


def make_clients(count: int, samples: int) -> Any:
    """Return the clients with their images turned into features once."""
    dataset = load("digits")
    parts = partition("iid", dataset.y_train, count, samples, np.random.default_rng(0))
    images = from_dataset(dataset, parts, flat=False, normalise="unit")
    # With features of length 4 the bias, whose input is 1, does not slow down the other parameters.
    features = NetworkFeatures(random_convolutions(), (1, 8, 8), norm=4.0)
    return [ClientData(client.name, features(client.x), client.y) for client in images]


def make_spec(target: float, steps: int = 20) -> dict[str, Any]:
    """Return a spec of softmax regression; `fixed` declares that no client's data shaped the features."""
    return {
        "data": {"preprocessing": "fixed"},
        "model": {"kind": "softmax", "outputs": 10},
        "local": {"steps": steps},
        "stop": {"target": target, "max_rounds": 2000},
        "privacy": {"epsilon": 10.0, "delta": 0.01},
    }


def main(folder: Path) -> sifu.Run:
    """Train the head, forget one client, verify; return the run."""
    run = sifu.train(make_spec(0.93), run=folder, clients=make_clients(120, 12))
    plan = run.plan(["client-003"])
    print(f"{plan.tip_rounds} rounds so far; would go back to {plan.source_rounds}, sigma {plan.noise_std:g}")
    (outcome,) = run.forget(["client-003"], level="proven")
    print(f"forgotten in {outcome.rounds} rounds; level {outcome.level}")
    print("verified:", run.verify().holds)
    return run


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary) / "run")
