"""Clients of near-equal size side by side in one tensor, so that one call trains many of them.

Clients are sorted by size and cut into blocks whose largest client has at most twice the samples of the
smallest: padding never more than doubles the data, and each block stays within a memory budget. Rows
added as padding are zeros with weight zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sifu.core.participation import ClientIndices
from sifu.sim.clients import CheckedClient
from sifu.sim.objectives import Objective

BLOCK_BYTES = 2**28
"""No tensor of a block is larger, unless a single client is."""


@dataclass(frozen=True)
class Block:
    """Padded data of some clients.

    `x` (clients, rows, width) has the bias column as its last; `targets` (clients, rows, outputs) are encoded;
    `row_weights` (clients, rows, 1) are 1/n_i on the n_i true rows and 0 on padding. `gram` is x x' a client
    where steps are cheaper between samples than between features, else None.
    """

    clients: ClientIndices
    samples: np.ndarray
    x: Tensor
    targets: Tensor
    row_weights: Tensor
    gram: Tensor | None

    def select(self, rows: np.ndarray) -> Block:
        """The block of some of its clients; itself, without a copy, when all are asked for in order."""
        if rows.size == self.clients.size and bool((rows[1:] > rows[:-1]).all()):
            return self
        index = torch.from_numpy(rows)
        return Block(
            self.clients[rows],
            self.samples[rows],
            self.x[index],
            self.targets[index],
            self.row_weights[index],
            None if self.gram is None else self.gram[index],
        )


def cut_into_groups(samples: np.ndarray, bytes_a_row: int, bytes_a_client: int) -> Iterator[np.ndarray]:
    """Client indices of each block, sorted by size first and cut where sizes or memory ask for it."""
    order = np.argsort(samples, kind="stable")
    start = 0
    for stop in range(1, order.size + 1):
        if stop < order.size:
            largest, smallest = int(samples[order[stop]]), int(samples[order[start]])
            demand = (stop + 1 - start) * max(largest * bytes_a_row, bytes_a_client)
            if largest <= 2 * smallest and demand <= BLOCK_BYTES:
                continue
        yield np.sort(order[start:stop])
        start = stop


def make_block(
    clients: Sequence[CheckedClient],
    indices: np.ndarray,
    objective: Objective,
    outputs: int,
    dtype: torch.dtype,
    *,
    between_samples: bool,
) -> Block:
    """Copy and pad the data of some clients; `between_samples` also forms their Gram matrices."""
    samples = np.array([clients[i].samples for i in indices], dtype=np.int64)
    rows, width = int(samples.max()), clients[indices[0]].x.shape[1] + 1
    x = torch.zeros((indices.size, rows, width), dtype=dtype)
    targets = torch.zeros((indices.size, rows, outputs), dtype=dtype)
    row_weights = torch.zeros((indices.size, rows, 1), dtype=dtype)
    x_view = x.numpy()
    for place, index in enumerate(indices):
        client = clients[index]
        x_view[place, : client.samples, :-1] = client.x
        x_view[place, : client.samples, -1] = 1.0
        targets[place, : client.samples] = objective.encode(torch.tensor(client.y), outputs, dtype)
        row_weights[place, : client.samples] = 1.0 / client.samples
    gram = torch.bmm(x, x.transpose(1, 2)) if between_samples else None
    return Block(indices, samples, x, targets, row_weights, gram)
