"""A tiny frozen network for the guard on deep features."""

from __future__ import annotations

import torch
from torch import nn


def make() -> nn.Module:
    """Return a network with twelve features of an 8 x 8 image."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 12), nn.Tanh())
