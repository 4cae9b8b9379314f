"""Deep features of a public backbone: the means of its activations, concatenated (docs/theory.md, section 14.6).

h_j(x) is the mean over positions of the activation of block j: it records that a pattern occurs, not where. The last
layer is specific to the classes the backbone was trained on; earlier blocks hold more information for other tasks. The
features are h_j(x) / ||h_j(x)|| of the last blocks and of the last layer; with `mirror`, they are averaged over x and
its mirror image. They are not trained and depend on no client's data, so every proof for fixed features applies.
"""

from __future__ import annotations

import math
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sifu.errors import InputError
from sifu.theory.participation import base_key, scores


@runtime_checkable
class Backbone(Protocol):
    """A network that exposes its intermediate activations."""

    def activations(self, x: Tensor) -> list[Tensor]:
        """Return the activation of each block in order, then the activation of the last layer.

        Each activation has the shape (n, numbers), (n, positions, numbers) or (n, channels, height, width).
        """


class DeepNetwork(nn.Module):
    """Deep features: pooled activations of a backbone's last `blocks` blocks and of its last layer."""

    project: Tensor | None

    def __init__(
        self, backbone: nn.Module, blocks: int, width: int, *, mirror: bool = False, count: int = 0, seed: int = 0
    ) -> None:
        """Create a module that computes deep features with a backbone.

        Args:
            backbone: A module, which must be a `Backbone` if blocks are read.
            blocks: Number of blocks read before the last layer.
            width: Number of features before the projection.
            mirror: True to average the features of an image and its mirror image.
            count: Number of features after the projection, or 0 for no projection.
            seed: Public seed of the projection.
        """
        super().__init__()
        self.backbone, self.blocks, self.width, self.mirror, self.seed = backbone, blocks, width, mirror, seed
        self.register_buffer("project", signs(seed, width, count) if 0 < count < width else None)

    def forward(self, x: Tensor) -> Tensor:
        """Return a row of features for each sample."""
        rows = self._rows(x)
        if self.mirror:
            rows = (rows + self._rows(x.flip(-1))) / 2
        return rows if self.project is None else rows @ self.project.to(rows.dtype)

    @property
    def features(self) -> int:
        """Number of features of a sample."""
        return self.width if self.project is None else self.project.shape[1]

    def settings(self) -> dict[str, Any]:
        """Return the options, for the digest of the map."""
        chosen: dict[str, Any] = {"blocks": self.blocks, "mirror": self.mirror}
        if self.project is not None:
            chosen |= {"projected from": self.width, "seed": self.seed}
        return chosen | getattr(self.backbone, "settings", dict)()

    def _rows(self, x: Tensor) -> Tensor:
        if not self.blocks:
            return F.normalize(self.backbone(x).flatten(1), dim=1)
        assert isinstance(self.backbone, Backbone)  # `deep_network` refuses other modules
        taken = self.backbone.activations(x)[-1 - self.blocks :]
        return torch.cat([F.normalize(pooled(part), dim=1) for part in taken], dim=1)


def pooled(activation: Tensor) -> Tensor:
    """Return the mean of an activation over its positions, (n, numbers)."""
    if activation.ndim == 4:
        return activation.mean(dim=(2, 3))
    return activation.mean(dim=1) if activation.ndim == 3 else activation.flatten(1)


def deep_network(
    backbone: nn.Module, shape: tuple[int, ...], blocks: int, *, mirror: bool = False, count: int = 0, seed: int = 0
) -> DeepNetwork:
    """Return a `DeepNetwork` over a backbone for samples of `shape`, projected to `count` features if it gives more.

    Raises:
        InputError: If the backbone exposes fewer than `blocks` blocks.
    """
    found = blocks_of(backbone, shape) if isinstance(backbone, Backbone) else 0
    if found < blocks:
        raise InputError(
            f"features.layers = {blocks} asks for {blocks} blocks, and the network exposes {found}: lower it, or give "
            "the module a method activations(x) that returns the activations of its blocks and of its last layer"
        )
    width = output_width(DeepNetwork(backbone, blocks, 0), shape)
    return DeepNetwork(backbone, blocks, width, mirror=mirror, count=count, seed=seed)


def blocks_of(backbone: Backbone, shape: tuple[int, ...]) -> int:
    """Return the number of blocks that a backbone exposes before its last layer."""
    with torch.no_grad():
        return len(backbone.activations(_example(backbone, shape))) - 1


def output_width(network: nn.Module, shape: tuple[int, ...]) -> int:
    """Return the size of a network's flattened output for one sample."""
    with torch.no_grad():
        return int(network(_example(network, shape)).flatten(1).shape[1])


def _example(backbone: Any, shape: tuple[int, ...]) -> Tensor:
    """Set the backbone to evaluation mode and return a sample of zeros in the type of its weights."""
    weight = next(iter(backbone.eval().parameters()), torch.zeros(()))
    return torch.zeros(1, *shape, dtype=weight.dtype, device=weight.device)


def signs(seed: int, inputs: int, count: int) -> Tensor:
    """Return an `inputs` x `count` matrix of random signs, divided by sqrt(count), from a public seed.

    Each 64-bit draw gives 64 signs.

    >>> signs(0, 2, 4)
    tensor([[-0.5000, -0.5000, -0.5000, -0.5000],
            [ 0.5000, -0.5000,  0.5000, -0.5000]])
    """
    words = scores(base_key(seed, "projection of deep features"), np.arange(-(-inputs * count // 64)))
    bits = np.unpackbits(words.astype("<u8").view(np.uint8), count=inputs * count, bitorder="little")
    drawn = np.where(bits, np.float32(1.0), np.float32(-1.0)).reshape(inputs, count)
    return torch.from_numpy(drawn) / math.sqrt(count)
