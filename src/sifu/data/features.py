"""Frozen features: any torch module with fixed weights, applied once to each client's samples.

A linear head on such features is convex, whatever the module is: the module is preprocessing that no client's data
shaped, and only the head is trained. So certificates of an image task can be `proven` (docs/frozen-features.md).

The weights must not come from the clients' data: take a public pretrained network, one trained on public data
(`trained_convolutions`), or random ones (`random_convolutions`). Each client can compute its own features; nothing of
other clients enters them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sifu.data.client_data import ClientData, check_federation
from sifu.errors import InputError

if TYPE_CHECKING:
    import torch

    from sifu.data.dataset import Dataset

BATCH = 512


def frozen_features(
    clients: Sequence[ClientData], module: torch.nn.Module, *, norm: float | None = 1.0, dtype: str = "float64"
) -> tuple[ClientData, ...]:
    """The clients with `module(x)`, flattened, in the place of x.

    `norm` scales every sample's features to this length (None leaves them). A sample is scaled on its own, so no
    other sample shapes it; and then beta <= (norm^2 + 1) / 2 of softmax regression is known before any data is seen.

    >>> import torch
    >>> client = ClientData("a", np.ones((2, 3)), np.array([0, 1]))
    >>> frozen_features([client], torch.nn.Identity())[0].x.round(3)[0]
    array([0.577, 0.577, 0.577])
    """
    import torch

    if norm is not None and not 0.0 < norm < float("inf"):
        raise InputError(f"the length of a sample's features must be a positive number or None, found {norm}")
    # In training mode batch norm would mix the samples of a client, and dropout would draw again.
    was_training = module.training
    module.eval()
    kind = next((parameter.dtype for parameter in module.parameters()), torch.float64)
    prepared = []
    try:
        with torch.no_grad():
            for client in clients:
                parts = [
                    _flat(module(torch.as_tensor(client.x[start : start + BATCH]).to(kind)), client.name)
                    for start in range(0, client.samples, BATCH)
                ]
                features = np.concatenate(parts)
                if norm is not None:
                    lengths = np.linalg.norm(features, axis=1, keepdims=True)
                    features = np.divide(features * norm, lengths, out=np.zeros_like(features), where=lengths > 0.0)
                prepared.append(ClientData(client.name, features.astype(dtype), client.y))
    finally:
        module.train(was_training)
    return check_federation(prepared)


def _flat(output: Any, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A module's output as rows of float64; an output that is not finite is refused, with the client's name."""
    rows = np.asarray(output.detach().cpu().numpy(), dtype=np.float64)
    if rows.ndim < 2 or not np.all(np.isfinite(rows)):
        raise InputError(
            f"the features of client {name!r} have shape {rows.shape} or are not finite: the module must give finite "
            "numbers, a row for each sample"
        )
    return rows.reshape(rows.shape[0], -1)


def trained_convolutions(public: Dataset, *, filters: int = 32, epochs: int = 8, seed: int = 0) -> torch.nn.Module:
    """The trunk of a small network trained on a public data set that no client's data is part of.

    Two convolutions and means over 2 x 2 regions, 8 * filters features; its last layer, for the public classes, is
    thrown away. It stands for the pretrained network that a real federation would take.
    """
    import torch

    x = torch.as_tensor(public.features("train", dtype="float32", flat=False, normalise="unit"))
    y = torch.as_tensor(np.asarray(public.y_train, dtype=np.int64))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        trunk = torch.nn.Sequential(
            torch.nn.Conv2d(x.shape[1], filters, 5, stride=2, padding=2),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Conv2d(filters, 2 * filters, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(2),
            torch.nn.Flatten(),
        )
        head = torch.nn.Linear(8 * filters, int(y.max()) + 1)
        optimiser = torch.optim.Adam([*trunk.parameters(), *head.parameters()], lr=2e-3)
        for _ in range(epochs):
            for batch in torch.split(torch.randperm(len(x)), 64):
                loss = torch.nn.functional.cross_entropy(head(trunk(x[batch])), y[batch])
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
    return trunk.requires_grad_(False).double()


def random_convolutions(
    channels: int, *, filters: int = 128, patch: int = 5, pool: int = 2, seed: int = 0
) -> torch.nn.Module:
    """Random filters, ReLU of both signs, and means over pool x pool regions: features without any training.

    After Coates, Ng & Lee (2011), who found random patches and simple pooling to go far; here the filters are drawn
    from `seed` alone, each with mean zero and length one, so no one's data shaped them. They give
    2 * filters * pool^2 features.

    >>> import torch
    >>> random_convolutions(1, filters=4, patch=3)(torch.zeros(2, 1, 8, 8, dtype=torch.float64)).shape
    torch.Size([2, 32])
    """
    import torch

    if min(channels, filters, patch, pool) < 1:
        raise InputError(
            f"channels, filters, patch and pool must be at least 1, found {channels}, {filters}, {patch}, {pool}"
        )
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(filters, channels, patch, patch, generator=generator, dtype=torch.float64)
    weights = weights - weights.mean(dim=(1, 2, 3), keepdim=True)
    lengths = weights.flatten(1).norm(dim=1).clamp_min(1e-12)
    convolution = torch.nn.Conv2d(channels, filters, patch, padding=patch // 2, bias=False, dtype=torch.float64)
    convolution.weight.data = weights / lengths[:, None, None, None]

    class BothSigns(torch.nn.Module):
        """ReLU(x) and ReLU(-x), side by side."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Twice as many channels."""
            return torch.cat([x.relu(), (-x).relu()], dim=1)

    return torch.nn.Sequential(
        convolution, BothSigns(), torch.nn.AdaptiveAvgPool2d(pool), torch.nn.Flatten()
    ).requires_grad_(False)
