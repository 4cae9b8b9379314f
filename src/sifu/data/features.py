"""Frozen features: any torch module with fixed weights, applied once to each client's samples.

A linear head on such features is convex, whatever the module is: the module is preprocessing that no client's data
shaped, and only the head is trained. So certificates of an image task can be `proven` (docs/frozen-features.md).

The weights must not come from the clients' data: take a public pretrained network, one trained on public data, or
random ones. Each client can compute its own features; nothing of other clients enters them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sifu.data.client_data import ClientData, check_federation
from sifu.errors import InputError

if TYPE_CHECKING:
    import torch

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
