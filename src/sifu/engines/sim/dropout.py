"""Dropout whose masks are keyed by their place, so that every path and device drops the same units.

In step k of a client's round, unit u of the b-th sample of the batch is kept by dropout layer l iff

    fraction(score(key, b * units + u)) >= p,    key = place(seed, "dropout"; branch, round, client, k, l),

and kept units are scaled by 1/(1 - p). See `sifu.theory.participation` for what a place is.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn.modules.dropout import _DropoutNd

from sifu.core.engine import Position
from sifu.theory.arrays import Booleans
from sifu.theory.participation import Scores, base_key, fractions, place_key, scores


def dropout_key(seed: int, position: Position, client: int, step: ArrayLike, layer: ArrayLike) -> Scores:
    """The key of one dropout layer in one step; arrays of steps or layers broadcast."""
    return place_key(base_key(seed, "dropout"), position.branch, position.round, client, step, layer)


def kept_units(key: ArrayLike, first: int, samples: int, units: int, rate: float) -> Booleans:
    """Which of `units` units are kept for `samples` samples of a batch, from its sample `first` on.

    >>> whole = kept_units(5, 0, 4, 3, 0.5)
    >>> bool((kept_units(5, 2, 2, 3, 0.5) == whole[2:]).all())
    True
    """
    places = np.arange(first * units, (first + samples) * units, dtype=np.uint64).reshape(samples, units)
    return fractions(scores(key, places)) >= rate


class KeyedDropout(_DropoutNd):
    """Dropout under a `key` that the trainer sets before each step; none in evaluation."""

    def __init__(self, rate: float) -> None:
        super().__init__(rate)
        self.key = 0

    def forward(self, activations: Tensor) -> Tensor:
        """The kept units, scaled by 1/(1 - p)."""
        if not self.training or self.p == 0.0:
            return activations
        kept = kept_units(self.key, 0, activations.shape[0], activations[0].numel(), self.p)
        factors = torch.from_numpy(kept).to(activations.dtype).mul_(1.0 / (1.0 - self.p))
        return activations * factors.to(activations.device).reshape(activations.shape)
