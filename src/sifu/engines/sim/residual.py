"""A small residual network, normalised within each sample, so that nothing but parameters is trained."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

CHANNELS = (8, 16, 32)
"""Of each stage; every stage but the first halves height and width."""
NORMALISED_TOGETHER = 4
"""Channels that one mean and one variance are taken of."""


def _normalisation(channels: int) -> nn.Module:
    return nn.GroupNorm(channels // NORMALISED_TOGETHER, channels)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.first_norm = _normalisation(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = _normalisation(channels)
        same = stride == 1 and channels_in == channels
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        """The shortcut and what the convolutions add to it."""
        inner = functional.relu(self.first_norm(self.first(values)))
        return functional.relu(self.second_norm(self.second(inner)) + self.shortcut(values))


class SmallResidualNet(nn.Module):
    """A 3x3 convolution, one residual block for each of `CHANNELS`, the mean over places, and a linear layer.

    >>> import torch
    >>> network = SmallResidualNet((3, 32, 32), 10)
    >>> tuple(network(torch.zeros(2, 3, 32, 32)).shape), sum(values.numel() for values in network.parameters())
    ((2, 10), 19858)
    """

    def __init__(self, input_shape: tuple[int, int, int], outputs: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(input_shape[0], CHANNELS[0], 3, padding=1, bias=False)
        self.stem_norm = _normalisation(CHANNELS[0])
        before = (CHANNELS[0], *CHANNELS)
        self.blocks = nn.Sequential(
            *(
                ResidualBlock(before[place], channels, stride=1 if place == 0 else 2)
                for place, channels in enumerate(CHANNELS)
            )
        )
        self.last = nn.Linear(CHANNELS[-1], outputs)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores of a batch of images (n, channels, height, width), or (n, height, width) if grey."""
        values = images.unsqueeze(1) if images.dim() == 3 else images
        values = functional.relu(self.stem_norm(self.stem(values)))
        scores: Tensor = self.last(self.blocks(values).mean(dim=(2, 3)))
        return scores
