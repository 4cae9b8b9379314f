"""Scorers of a user's module: none of its methods meets a trained model in this process."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from sifu.engines.sim.models import ModuleModel
from sifu.engines.sim.scorers import Scorer

SEEN: list[float] = []


class Notes(nn.Module):
    """Network that remembers its weights whenever its parameters are listed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        nn.init.zeros_(self.layer.weight)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the parameters."""
        SEEN.append(float(self.layer.weight.detach().abs().sum()))
        return super().parameters(recurse)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores."""
        scores: Tensor = self.layer(x)
        return scores


def test_a_scorer_gives_trained_models_to_the_copy_only() -> None:
    scorer = Scorer(ModuleModel(Notes), "float64")
    x = np.ones((4, 3))
    first, second = (scorer.outputs(np.full(8, value), x) for value in (1.0, 2.0))
    np.testing.assert_array_equal(second, 2.0 * first)
    assert torch.tensor(SEEN).sum() == 0.0
