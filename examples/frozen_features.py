"""A linear head on frozen features: a `proven` certificate for an image task.

    python examples/frozen_features.py      digits, 120 clients, some seconds

The features are random convolutions, made from a seed and from no client's data; put any pretrained torch module of
yours in their place. Only the head is trained, and that is softmax regression: convex, every premise measured.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sifu
from sifu.data import from_dataset, frozen_features, load, partition


class BothSigns(torch.nn.Module):
    """ReLU(x) and ReLU(-x), side by side."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Twice as many channels."""
        return torch.cat([x.relu(), (-x).relu()], dim=1)


def random_convolutions(filters: int = 16) -> torch.nn.Module:
    """Filters of mean zero and length one, drawn from a seed, and means over 2 x 2 regions of what they see."""
    weights = torch.randn(filters, 1, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = weights - weights.mean(dim=(1, 2, 3), keepdim=True)
    convolution = torch.nn.Conv2d(1, filters, 3, padding=1, bias=False, dtype=torch.float64)
    convolution.weight.data = weights / weights.flatten(1).norm(dim=1)[:, None, None, None]
    return torch.nn.Sequential(convolution, BothSigns(), torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten())


def make_clients(count: int, samples: int) -> Any:
    """Images of every client, turned into features once."""
    dataset = load("digits")
    parts = partition("iid", dataset.y_train, count, samples, np.random.default_rng(0))
    images = from_dataset(dataset, parts, flat=False, normalise="unit")
    # With features of length 4 the bias, whose input is 1, does not slow the other parameters down.
    return frozen_features(images, random_convolutions(), norm=4.0)


def make_spec(target: float, steps: int = 20) -> dict[str, Any]:
    """Softmax regression on features; `fixed` is our declaration that no client's data shaped them."""
    return {
        "data": {"preprocessing": "fixed"},
        "model": {"kind": "softmax", "outputs": 10},
        "local": {"steps": steps},
        "stop": {"target": target, "max_rounds": 2000},
        "privacy": {"epsilon": 10.0, "delta": 0.01},
    }


def main(folder: Path) -> sifu.Run:
    """Train the head, forget one client, verify."""
    run = sifu.train(make_spec(0.93), run=folder, clients=make_clients(120, 12))
    plan = run.plan(["client-003"])
    print(f"{plan.tip_rounds} rounds so far; would go back to {plan.source_rounds}, sigma {plan.noise_std:g}")
    (outcome,) = run.forget(["client-003"], level="proven", compare_scratch=True)
    print(f"forgotten in {outcome.rounds} rounds, Scratch takes {outcome.scratch_rounds}; level {outcome.level}")
    print("verified:", run.verify().holds)
    return run


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary) / "run")
