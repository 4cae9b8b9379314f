"""Small public networks, drawn from a seed."""

from __future__ import annotations

import torch
from torch import nn


class Showing(nn.Module):
    """Network with ten features of an 8 x 8 image that exposes the activations of its two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 3)
        self.last = nn.Linear(6, 10)

    def activations(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the outputs of both blocks and of the last layer."""
        first = torch.relu(self.first(x))
        second = torch.relu(self.second(first))
        return [first, second.flatten(2).transpose(1, 2), torch.tanh(self.last(second.mean(dim=(2, 3))))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the last layer."""
        return self.activations(x)[-1]


def make_showing() -> nn.Module:
    """Return a small backbone."""
    torch.manual_seed(5)
    return Showing()
