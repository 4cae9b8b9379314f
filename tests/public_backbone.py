"""Small public networks for tests of tuning, drawn from a seed; `make` has a normalisation layer."""

from __future__ import annotations

import torch
from torch import nn


def make() -> nn.Module:
    """Return a network with twelve features of an 8 x 8 image."""
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36, 12),
        nn.Tanh(),
    )


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


class Adapted(nn.Linear):
    """Linear layer with a low-rank adapter that is initially zero."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__(inputs, outputs)
        self.down = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the layer plus that of its adapter."""
        return super().forward(x) + x @ self.down.T @ self.up.T


def make_with_adapter() -> nn.Module:
    """Return the network of `make` with an adapter of rank 2."""
    network = make()
    torch.manual_seed(6)
    network[4] = Adapted(36, 12, 2)
    return network


class Language(nn.Module):
    """Language model with eight features of a text of seventeen tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(17, 8)
        self.mix = Adapted(8, 8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean over all tokens."""
        return torch.tanh(self.mix(self.tokens(x.long()))).mean(1)


def make_language() -> nn.Module:
    """Return a small language model with an adapter."""
    torch.manual_seed(5)
    return Language()


class Remembering(nn.Module):
    """Network whose features remember every large sample seen in evaluation; probes are smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 12)
        self.seen = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the features plus the remembered state."""
        rows = torch.tanh(self.layer(x.flatten(1)))
        if not self.training and float(x.max()) > 1.0:
            self.seen = self.seen + 0.01 * rows.detach().mean()
        return rows + self.seen


def make_remembering() -> nn.Module:
    """Return a network that keeps state in neither a parameter nor a buffer."""
    torch.manual_seed(5)
    return Remembering()


class Rescaling(nn.Module):
    """Network that takes a batch with any value above 2 for bytes, and divides all of it by 255."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the features, which depend on the other samples of the batch."""
        rows = x.flatten(1)
        return torch.tanh(self.layer(rows / 255.0 if float(rows.max()) > 2.0 else rows))


def make_rescaling() -> nn.Module:
    """Return a network that rescales batches."""
    torch.manual_seed(5)
    return Rescaling()


class Encoder(nn.Module):
    """Encoder with eight features of a sequence of eight vectors, of torch layers with a fused pass for evaluation."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean over the sequence."""
        rows: torch.Tensor = self.layers(x.flatten(1, 2)).mean(1)
        return rows


def make_encoder() -> nn.Module:
    """Return a small encoder of sequences."""
    torch.manual_seed(5)
    return Encoder()


def make_for_other_samples() -> nn.Module:
    """Return a network that does not accept 8 x 8 images."""
    return nn.Sequential(nn.Flatten(), nn.Linear(7, 5))


def make_without_parameters() -> nn.Module:
    """Return a network without parameters to tune."""
    return nn.Flatten()
