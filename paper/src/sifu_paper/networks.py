"""The paper's networks as functions of one flat vector, so that many clients train in one call.

A ReLU follows every convolution of the paper's networks. The authors' code omits it after the third convolution for
CIFAR-10 and CIFAR-100, and after all convolutions for CelebA.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sifu.errors import InputError
from sifu_paper.draws import keyed

DROPOUT = 0.1


@dataclass(frozen=True)
class Convolution:
    """3x3 convolution with this padding, then ReLU and 2x2 max pooling if wanted."""

    channels: int
    padding: int = 0
    pool: bool = True
    relu: bool = True


@dataclass(frozen=True)
class Network:
    """Classifier: convolutions, hidden layers with ReLU (and dropout after them), a linear layer.

    >>> network_named("cnn_cifar10", (3, 32, 32), 10).size, network_named("softmax", (784,), 10).size
    (122570, 7850)
    """

    shape: tuple[int, ...]
    convolutions: tuple[Convolution, ...]
    hidden: tuple[int, ...]
    classes: int
    dropout: bool = False

    @cached_property
    def _shapes(self) -> tuple[tuple[int, ...], ...]:
        shapes: list[tuple[int, ...]] = []
        size = self.shape
        for layer in self.convolutions:
            shapes += [(layer.channels, size[0], 3, 3), (layer.channels,)]
            height, width = (side + 2 * layer.padding - 2 for side in size[1:])
            size = (layer.channels, height // 2, width // 2) if layer.pool else (layer.channels, height, width)
        features = math.prod(size)
        for units in (*self.hidden, self.classes):
            shapes += [(features, units), (units,)]
            features = units
        return tuple(shapes)

    @cached_property
    def size(self) -> int:
        """Number of parameters."""
        return sum(map(math.prod, self._shapes))

    def initial(self, seed: int, branch: int) -> np.ndarray:
        """Return an initial vector: uniform on +-1/sqrt(inputs of the layer), as in torch."""
        generator = keyed(seed, "initial model", branch)
        parts = []
        for weight, bias in zip(self._shapes[::2], self._shapes[1::2], strict=True):
            inputs = weight[0] if len(weight) == 2 else math.prod(weight[1:])
            parts += [generator.uniform(-1, 1, math.prod(one)) / math.sqrt(inputs) for one in (weight, bias)]
        return np.concatenate(parts).astype(np.float32)

    def scores(self, vector: Tensor, x: Tensor, kept: Tensor | None = None) -> Tensor:
        """Return the class scores of samples; `kept` are the factors of dropout on the hidden units."""
        cut = iter(torch.split(vector, [math.prod(shape) for shape in self._shapes]))
        parts = iter([next(cut).view(shape) for shape in self._shapes])
        for layer in self.convolutions:
            x = functional.conv2d(x, next(parts), next(parts), padding=layer.padding)
            x = functional.relu(x) if layer.relu else x
            x = functional.max_pool2d(x, 2) if layer.pool else x
        x = x.flatten(1)
        for _ in self.hidden:
            x = functional.relu(x @ next(parts) + next(parts))
            x = x if kept is None else x * kept
        scores: Tensor = x @ next(parts) + next(parts)
        return scores

    def keep_units(self, generator: np.random.Generator, steps: int, batch: int) -> np.ndarray | None:
        """Draw the factors of dropout of one client's steps, or None without dropout."""
        if not self.dropout:
            return None
        kept = generator.random((steps, batch, self.hidden[-1])) >= DROPOUT
        return (kept / (1.0 - DROPOUT)).astype(np.float32)


_CIFAR = (Convolution(32), Convolution(64), Convolution(64, pool=False))
_AUTHORS_CIFAR = (Convolution(32), Convolution(64), Convolution(64, pool=False, relu=False))
_LAYERS: dict[str, tuple[tuple[Convolution, ...], tuple[int, ...]]] = {
    "softmax": ((), ()),
    "cnn_fashion_mnist": ((Convolution(32, 1), Convolution(64, 1)), (256,)),
    "cnn_cifar10": (_CIFAR, (64,)),
    "cnn_cifar100": (_CIFAR, (256,)),
    "cnn_celeba": (tuple(Convolution(channels, 1) for channels in (8, 16, 32)), ()),
    "authors_cifar10": (_AUTHORS_CIFAR, (64,)),
    "authors_cifar100": (_AUTHORS_CIFAR, (256,)),
    "authors_celeba": (tuple(Convolution(channels, 1, relu=False) for channels in (8, 16, 32)), ()),
}


def network_named(name: str, shape: Sequence[int], classes: int) -> Network:
    """Return the network that settings.toml names, for samples of this shape."""
    if name not in _LAYERS:
        raise InputError(f"network {name!r} is unknown: write one of {', '.join(_LAYERS)}")
    convolutions, hidden = _LAYERS[name]
    return Network(tuple(shape), convolutions, hidden, classes, dropout=name == "cnn_fashion_mnist")
