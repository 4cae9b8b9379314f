"""The three losses of linear models: their gradients in the outputs, their values, their curvature.

For outputs z of one sample and target t (a one-hot row, a 0/1 label, or real values):

    softmax        f = log sum_j exp(z_j) - z_t        df/dz = softmax(z) - t     d2f/dz2 <= 1/2
    logistic       f = log(1 + exp(z)) - t z           df/dz = sigmoid(z) - t     d2f/dz2 <= 1/4
    least_squares  f = 1/2 sum_j (z_j - t_j)^2         df/dz = z - t              d2f/dz2  = 1

The last column is the factor that turns the top eigenvalue of X'X/n into a smoothness. `nn.MSELoss`
averages over outputs and has no half: it has another factor, and is not what `least_squares` means.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

ObjectiveName = Literal["softmax", "logistic", "least_squares"]


@dataclass(frozen=True)
class Objective:
    """One loss, with `curvature_factor` the largest curvature of f in the outputs of a sample.

    Functions of outputs and encoded targets take as `dim` where the outputs of a row lie, by default last.
    """

    name: ObjectiveName
    curvature_factor: float
    residual: Callable[..., Tensor]
    """df/dz of each row, from outputs and encoded targets."""
    row_loss: Callable[..., Tensor]
    """f of each row, from outputs and encoded targets."""
    mean_loss: Callable[[Tensor, Tensor], Tensor]
    """The mean of f over rows as torch itself writes it: what the plain loop differentiates."""

    @property
    def labels(self) -> bool:
        """Whether targets are class labels (otherwise they are real values)."""
        return self.name != "least_squares"

    def encode(self, targets: Tensor, outputs: int, dtype: torch.dtype) -> Tensor:
        """Targets as rows of `outputs` numbers: one-hot for softmax, themselves otherwise."""
        if self.name == "softmax":
            return functional.one_hot(targets, outputs).to(dtype)
        return targets.to(dtype).reshape(targets.shape[0], outputs)

    def hits(self, scores: Tensor, encoded: Tensor, dim: int = -1) -> Tensor:
        """Which rows are predicted correctly (the first of equal scores counts); none when targets are real values."""
        if self.name == "softmax":
            # max finds the same place as argmax, five times as fast.
            return encoded.gather(dim, scores.max(dim=dim, keepdim=True).indices).squeeze(dim) > 0.5
        if self.name == "logistic":
            return ((scores > 0) == (encoded > 0.5)).squeeze(dim)
        return torch.zeros_like(scores.select(dim, 0), dtype=torch.bool)


def _softmax(scores: Tensor, dim: int) -> Tensor:
    """softmax over `dim`; torch's own is quick over any but a short last one, where it takes three times as long."""
    if dim != -1:
        return torch.softmax(scores, dim)
    powers = (scores - scores.amax(dim=-1, keepdim=True)).exp_()
    return powers.div_(powers.sum(dim=-1, keepdim=True))


def _half_squared_error(scores: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (scores - targets.reshape(scores.shape)).square().sum(dim=-1).mean()


def _logistic_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(scores.reshape(-1), targets.to(scores.dtype))


OBJECTIVES: dict[str, Objective] = {
    "softmax": Objective(
        "softmax",
        curvature_factor=0.5,
        residual=lambda z, t, dim=-1: _softmax(z, dim).sub_(t),
        row_loss=lambda z, t, dim=-1: torch.logsumexp(z, dim=dim) - (z * t).sum(dim=dim),
        mean_loss=functional.cross_entropy,
    ),
    "logistic": Objective(
        "logistic",
        curvature_factor=0.25,
        residual=lambda z, t, dim=-1: torch.sigmoid(z).sub_(t),
        row_loss=lambda z, t, dim=-1: (functional.softplus(z) - t * z).sum(dim=dim),
        mean_loss=_logistic_loss,
    ),
    "least_squares": Objective(
        "least_squares",
        curvature_factor=1.0,
        residual=lambda z, t, dim=-1: z - t,
        row_loss=lambda z, t, dim=-1: 0.5 * (z - t).square().sum(dim=dim),
        mean_loss=_half_squared_error,
    ),
}
"""Every loss by its name in a spec."""
