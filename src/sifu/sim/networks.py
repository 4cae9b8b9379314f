"""Two small networks that a spec can name; neither is certified beyond an assumed regularity."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from sifu.core.errors import InputError


def mlp(input_shape: tuple[int, ...], outputs: int, hidden: int) -> nn.Module:
    """One hidden layer of `hidden` tanh units."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), hidden), nn.Tanh(), nn.Linear(hidden, outputs))


class SmallConvNet(nn.Module):
    """Two 3x3 convolutions with ReLU and 2x2 pooling, then one hidden layer of `hidden` units.

    Takes images as (n, height, width) or (n, channels, height, width).
    """

    def __init__(self, input_shape: tuple[int, ...], outputs: int, hidden: int) -> None:
        super().__init__()
        if len(input_shape) not in (2, 3) or min(input_shape[-2:]) < 4:
            raise InputError(
                "the model 'cnn' needs images of shape (height, width) or (channels, height, width), "
                f"at least 4x4; found samples of shape {input_shape}"
            )
        channels = input_shape[0] if len(input_shape) == 3 else 1
        height, width = input_shape[-2:]
        self.features = nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Sequential(
            nn.Flatten(),
            nn.Linear(32 * (height // 4) * (width // 4), hidden),
            nn.ReLU(),
            nn.Linear(hidden, outputs),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Class scores of a batch of images."""
        if images.dim() == 3:
            images = images.unsqueeze(1)
        scores: Tensor = self.head(self.features(images))
        return scores


class LinearScores(nn.Module):
    """z = x W + b with W of shape (features, outputs), parameters named `weight` and `bias`."""

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(features, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, samples: Tensor) -> Tensor:
        """Scores of a batch of flat samples."""
        return samples @ self.weight + self.bias
