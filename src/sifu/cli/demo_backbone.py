"""The public network of `sifu demo`, trained from a seed on digits that no client of the demo holds."""

from __future__ import annotations

import torch
from torch import nn

from sifu.data import load

STEPS, RATE = 150, 0.5


def make() -> nn.Module:
    """Return a trained network that maps a digit of 8 x 8 pixels to 24 features."""
    digits = load("digits")
    x = torch.tensor(digits.features("test", dtype="float32", flat=True))
    y = torch.tensor(digits.y_test, dtype=torch.int64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        backbone = nn.Sequential(nn.Flatten(), nn.Linear(x.shape[1], 48), nn.Tanh(), nn.Linear(48, 24), nn.Tanh())
        scores = nn.Linear(24, 10)
        optimizer = torch.optim.SGD([*backbone.parameters(), *scores.parameters()], lr=RATE)
        for _ in range(STEPS):
            optimizer.zero_grad()
            nn.functional.cross_entropy(scores(backbone(x)), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return backbone
