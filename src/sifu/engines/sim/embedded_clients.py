"""Data of the embedded clients, checked once, and the losses of models.

For outputs z of one sample and target t (a one-hot row, a 0/1 label, or real values):

    softmax        f = log sum_j exp(z_j) - z_t        df/dz = softmax(z) - t     d2f/dz2 <= 1/2
    logistic       f = log(1 + exp(z)) - t z           df/dz = sigmoid(z) - t     d2f/dz2 <= 1/4
    least_squares  f = 1/2 sum_j (z_j - t_j)^2         df/dz = z - t              d2f/dz2  = 1

The last column is the factor that turns the largest eigenvalue of X'X/n into a smoothness constant. `least_squares`
differs from `nn.MSELoss`, which averages over outputs, has no factor 1/2, and so has another curvature factor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sifu.data.dataset import check_finite
from sifu.errors import InputError
from sifu.theory.arrays import Array

ObjectiveName = Literal["softmax", "logistic", "least_squares"]


@dataclass(frozen=True)
class Objective:
    """Loss function; `curvature_factor` is its largest curvature with respect to the outputs of a sample.

    `residual`, `row_loss` and `hits` take the dimension of the outputs as `dim`, by default the last dimension.
    """

    name: ObjectiveName
    curvature_factor: float
    residual: Callable[..., Tensor]
    """df/dz of each row, from outputs and encoded targets."""
    row_loss: Callable[..., Tensor]
    """Loss f of each row, from outputs and encoded targets."""
    mean_loss: Callable[[Tensor, Tensor], Tensor]
    """Mean of f over rows, in torch's own implementation, which the plain loop differentiates."""

    @property
    def labels(self) -> bool:
        """True if targets are class labels, false if they are real values."""
        return self.name != "least_squares"

    def encode(self, targets: Tensor, outputs: int, dtype: torch.dtype) -> Tensor:
        """Return targets as rows of `outputs` numbers: one-hot for softmax, unchanged otherwise."""
        if self.name == "softmax":
            return functional.one_hot(targets, outputs).to(dtype)
        return targets.to(dtype).reshape(targets.shape[0], outputs)

    def hits(self, scores: Tensor, encoded: Tensor, dim: int = -1) -> Tensor:
        """Return whether each row is predicted correctly, which is always False for real-valued targets.

        The first of equal scores is the prediction.
        """
        if self.name == "softmax":
            # `max` returns the same index as `argmax`, five times as fast.
            return encoded.gather(dim, scores.max(dim=dim, keepdim=True).indices).squeeze(dim) > 0.5
        if self.name == "logistic":
            return ((scores > 0) == (encoded > 0.5)).squeeze(dim)
        return torch.zeros_like(scores.select(dim, 0), dtype=torch.bool)


def _softmax(scores: Tensor, dim: int) -> Tensor:
    """Return the softmax over `dim`; for a short last dimension this is three times as fast as torch's function."""
    if dim != -1:
        return torch.softmax(scores, dim)
    powers = (scores - scores.amax(dim=-1, keepdim=True)).exp_()
    return powers.div_(powers.sum(dim=-1, keepdim=True))


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
        mean_loss=lambda z, t: functional.binary_cross_entropy_with_logits(z.reshape(-1), t.to(z.dtype)),
    ),
    "least_squares": Objective(
        "least_squares",
        curvature_factor=1.0,
        residual=lambda z, t, dim=-1: z - t,
        row_loss=lambda z, t, dim=-1: 0.5 * (z - t).square().sum(dim=dim),
        mean_loss=lambda z, t: 0.5 * (z - t.reshape(z.shape)).square().sum(dim=-1).mean(),
    ),
}
"""Losses by their name in a spec."""


class ClientData(Protocol):
    """Interface of a client's data: a name, samples `x` (n, ...) and targets `y` (n,) or (n, outputs)."""

    @property
    def name(self) -> str:
        """Name of the client."""

    @property
    def x(self) -> Array:
        """Samples."""

    @property
    def y(self) -> Array:
        """Targets."""


@dataclass(frozen=True)
class CheckedClient:
    """Client with validated data: `x` in the training type, `y` as int64 labels or real values."""

    name: str
    x: Array
    y: Array

    @property
    def samples(self) -> int:
        """Number of samples |D_i|."""
        return int(self.x.shape[0])


def input_shape(clients: Sequence[ClientData]) -> tuple[int, ...]:
    """Return the shape of one sample.

    Raises:
        InputError: If there are no clients or their shapes differ.
    """
    if not clients:
        raise InputError("a federation needs at least one client, found none")
    first = clients[0]
    for client in clients:
        if np.ndim(client.x) < 2 or np.shape(client.x)[1:] != np.shape(first.x)[1:]:
            raise InputError(
                f"client {client.name!r} has samples of shape {np.shape(client.x)}; one row per sample was expected, "
                f"and rows of shape {np.shape(first.x)[1:]} as client {first.name!r} has"
            )
    return tuple(np.shape(first.x)[1:])


def count_outputs(clients: Sequence[ClientData], objective: Objective) -> int:
    """Return the number of outputs the targets require.

    This is the number of classes for softmax, 1 for logistic, and the number of target columns for least squares.
    """
    if objective.name == "logistic":
        return 1
    if objective.name == "softmax":
        return 1 + max((int(np.max(client.y)) for client in clients if np.size(client.y)), default=0)
    return int(np.shape(clients[0].y)[1]) if np.ndim(clients[0].y) == 2 else 1


def check_names(clients: Sequence[ClientData]) -> None:
    """Refuse two clients of the same name, and clients without samples."""
    names: set[str] = set()
    for client in clients:
        if client.name in names:
            raise InputError(f"two clients are called {client.name!r}; every client needs its own name")
        names.add(client.name)
        if not len(client.x):
            raise InputError(f"client {client.name!r} has no samples; leave it out of the federation")


def check_clients(
    clients: Sequence[ClientData], objective: Objective, outputs: int, dtype: str, *, flat: bool
) -> tuple[CheckedClient, ...]:
    """Return the clients in the given order, with their data in the training type.

    Raises:
        InputError: If the data of a client cannot be used; the message names the client.
    """
    check_names(clients)
    checked = []
    for client in clients:
        samples = np.shape(client.x)[0]
        if np.shape(client.y)[:1] != (samples,):
            raise InputError(f"client {client.name!r} has {samples} samples but targets of shape {np.shape(client.y)}")
        with np.errstate(over="ignore"):
            x = np.ascontiguousarray(client.x, dtype=dtype)
        check_finite(f"client {client.name!r}", "x", x)
        y = _targets(client, objective, outputs, dtype)
        checked.append(CheckedClient(client.name, x.reshape(samples, -1) if flat else x, y))
    return tuple(checked)


def _targets(client: ClientData, objective: Objective, outputs: int, dtype: str) -> Array:
    y = np.asarray(client.y)
    check_finite(f"client {client.name!r}", "y", y)
    if not objective.labels:
        if y.reshape(y.shape[0], -1).shape[1] != outputs:
            raise InputError(
                f"client {client.name!r} has targets of shape {y.shape}; {outputs} values each were expected"
            )
        with np.errstate(over="ignore"):
            values = y.reshape(y.shape[0], outputs).astype(dtype)
        check_finite(f"client {client.name!r}", "y", values)
        return values
    classes = 2 if objective.name == "logistic" else outputs
    if y.size != y.shape[0]:
        raise InputError(f"client {client.name!r} has labels of shape {y.shape}; one label per sample was expected")
    labels = y.reshape(-1).astype(np.int64)
    wrong = (labels < 0) | (labels >= classes) | (labels != y.reshape(-1))
    if wrong.any():
        raise InputError(
            f"client {client.name!r} has {int(wrong.sum())} labels outside 0..{classes - 1}, "
            f"the first is {y.reshape(-1)[wrong][0]}"
        )
    return labels
