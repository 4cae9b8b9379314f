"""A small public network for tests of tuned ones: drawn from a seed, with a normalisation layer."""

from __future__ import annotations

import torch
from torch import nn


def make() -> nn.Module:
    """Twelve features of an 8 x 8 image."""
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36, 12),
        nn.Tanh(),
    )
