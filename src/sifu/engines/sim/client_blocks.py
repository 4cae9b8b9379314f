"""Data of a linear model's clients in padded tensors, so that one call trains many clients.

Every client is padded to a number of rows that depends only on its own number of samples and the batch size
(`padded_rows`). Clients with equal padding form a block and are adjacent in memory. A round works on parts of blocks,
and the parts depend only on the participants. The shape of every operation, and so the result to the last bit, is
therefore the same with or without clients that do not take part (docs/theory.md, section 6.6). Padding rows are zeros
with weight zero, and each client's data are stored once. The size of a part is limited, so a round allocates little
memory however many clients take part.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sifu.engines.sim.embedded_clients import CheckedClient, Objective
from sifu.engines.sim.threads import one_thread
from sifu.theory.arrays import Floats, Integers
from sifu.theory.participation import ClientIndices
from sifu.theory.rounding import enlargement

PART_ROWS = 2**14
"""Maximum number of rows of a part, padding included; a single client may exceed it."""
PART_BYTES = 2**27
"""Maximum size of a copy of a part's samples; a single client may exceed it."""
COPY_BYTES = 2**17
"""Size in bytes from which a client's samples are multiplied separately; smaller clients are copied together."""
FINE, MEDIUM, COARSE = 8, 4, 2
"""Numbers of padded sizes between one power of two and the next.

They apply, in this order, to large clients, to small clients, and to clients trained in mini-batches, for which padding
costs little. Every distinct size costs a few calls per round.
"""
LARGE = 64
"""Number of samples from which a client counts as large."""


PartPlaces = slice | Integers
"""Positions among the requested clients; a slice, which is the faster index, if they are contiguous."""


@dataclass(frozen=True)
class Block:
    """Padded data of some clients; outputs precede rows.

    `x` (clients, rows, width) has the bias column last. `targets` (clients, outputs, rows) are encoded. `row_weights`
    (clients, 1, rows) are eta_i/n_i on the n_i true rows and 0 on padding; eta_i is the client's step. `gram` holds
    x x' of each client if steps in sample space are cheaper than steps in feature space; otherwise it is None.
    `lengths` are ||X_i||_F, rounded up.
    """

    clients: ClientIndices
    samples: Integers
    x: Tensor
    targets: Tensor
    row_weights: Tensor
    gram: Tensor | None
    lengths: Floats

    @functools.cached_property
    def each(self) -> tuple[Tensor, ...]:
        """Views of X_i of each client, cached because creating a view takes a tenth of the time of a product."""
        return self.x.unbind()

    @functools.cached_property
    def turned(self) -> tuple[Tensor, ...]:
        """View of the transposed samples X_i' of each client."""
        return self.x.transpose(1, 2).unbind()

    @property
    def one_by_one(self) -> bool:
        """True if the samples of each client are multiplied separately."""
        _, padded, width = self.x.shape
        return padded * width * self.x.element_size() >= COPY_BYTES

    def bring_forward(self, rows: Integers) -> None:
        """Move the clients at `rows` to the front, in this order, followed by the other clients."""
        order = np.concatenate([rows, np.setdiff1d(np.arange(self.clients.size), rows)])
        for values in (self.clients, self.samples, self.lengths):
            values[:] = values[order]
        index = torch.from_numpy(order)
        for tensor in (self.x, self.targets, self.row_weights, self.gram):
            if tensor is not None:
                columns = max(1, PART_BYTES // (order.size * tensor.element_size()))
                for some in torch.split(tensor.flatten(1), columns, dim=1):
                    some.copy_(some.index_select(0, index))

    def parts(self, rows: Integers, places: Integers | None = None) -> Iterator[Part]:
        """Yield the clients at `rows` of this block in parts, whose boundaries do not depend on other clients.

        Args:
            rows: Rows of the clients in this block.
            places: Positions of these clients among all requested clients, or None if this block has all of them.
        """
        padded, width = self.x.shape[1:]
        count = max(1, min(PART_ROWS // padded, PART_BYTES // (padded * width * self.x.element_size())))
        for start in range(0, rows.size, count):
            stop = min(start + count, rows.size)
            yield Part(self, rows[start:stop], slice(start, stop) if places is None else places[start:stop])


class Part:
    """Some clients of a block, with products that copy their samples only where this is faster.

    The clients are at `rows` of the `block`; `places` are their positions among all requested clients. `one_by_one` is
    True if the samples of each client are multiplied separately, without copying them first.
    """

    def __init__(self, block: Block, rows: Integers, places: PartPlaces) -> None:
        self.places, self.size = places, rows.size
        self.block, self.rows = block, rows
        # Contiguous clients are accessed through a view.
        self._index = slice(int(rows[0]), int(rows[-1]) + 1) if side_by_side(rows) else torch.from_numpy(rows)
        self.one_by_one = block.one_by_one

    @functools.cached_property
    def targets(self) -> Tensor:
        """Encoded targets (clients, outputs, rows)."""
        return self._take(self.block.targets)

    @functools.cached_property
    def row_weights(self) -> Tensor:
        """Weights of the rows (see `Block`)."""
        return self._take(self.block.row_weights)

    @functools.cached_property
    def gram(self) -> Tensor | None:
        """X_i X_i' of each client if steps in sample space are cheaper, else None."""
        return None if self.block.gram is None else self._take(self.block.gram)

    @property
    def clients(self) -> ClientIndices:
        """Indices of the clients."""
        return self.block.clients[self.rows]

    @property
    def samples(self) -> Integers:
        """Number of samples of each client."""
        return self.block.samples[self.rows]

    @property
    def lengths(self) -> Floats:
        """||X_i||_F of each client, rounded up."""
        return self.block.lengths[self.rows]

    def _take(self, values: Tensor) -> Tensor:
        """Return the entries of these clients in `values`, as a view if they are contiguous."""
        return values[self._index] if isinstance(self._index, slice) else values.index_select(0, self._index)

    @functools.cached_property
    def x(self) -> Tensor:
        """Samples (clients, rows, width), gathered on first access."""
        return self._take(self.block.x)

    def release_samples(self) -> None:
        """Release gathered samples; the next access gathers them again."""
        self.__dict__.pop("x", None)

    def outputs(self, model: Tensor) -> Tensor:
        """Return X_i W of each client as (clients, outputs, rows), from W' (outputs, width)."""
        count, padded, width = self.size, *self.block.x.shape[1:]
        if self.one_by_one:
            products = model.new_empty((count, model.shape[0], padded))
            for own, row in zip(products.unbind(), self.rows.tolist(), strict=True):
                torch.mm(model, self.block.turned[row], out=own)
            return products
        products = (self.x.reshape(count * padded, width) @ model.T.contiguous()).reshape(count, padded, -1)
        return products.transpose(1, 2).contiguous()

    def transposed_products(self, dual: Tensor) -> Tensor:
        """Return X_i' V_i of each client, transposed: (clients, outputs, width), from V' (clients, outputs, rows)."""
        if not self.one_by_one:
            return torch.bmm(dual, self.x)
        products = dual.new_empty((self.size, dual.shape[1], self.block.x.shape[2]))
        for own, row, out in zip(dual.unbind(), self.rows.tolist(), products.unbind(), strict=True):
            torch.mm(own, self.block.each[row], out=out)
        return products

    def summed(self, dual: Tensor) -> Tensor:
        """Return sum_i X_i' V_i, transposed: (outputs, width), as one product over the rows of all clients."""
        count, outputs, padded = dual.shape
        side_by_side = dual.transpose(0, 1).reshape(outputs, count * padded)
        return side_by_side @ self.x.reshape(count * padded, -1)


def side_by_side(rows: Integers) -> bool:
    """Return whether the rows are consecutive and increasing."""
    return int(rows[-1]) - int(rows[0]) + 1 == rows.size and bool((rows[1:] > rows[:-1]).all())


def padded_rows(samples: Integers, batch_size: int | None = None) -> Integers:
    """Return the number of rows each client is padded to, which depends only on its samples and the batch size.

    A client whose data fit into one batch is never padded beyond the batch size. The padded size thus shows whether a
    client trains on whole batches.

    >>> padded_rows(np.array([3, 16, 17, 100, 105, 1000])).tolist()
    [3, 16, 20, 104, 112, 1024]
    >>> padded_rows(np.array([3, 16, 17, 100, 105, 1000]), batch_size=100).tolist()
    [3, 16, 20, 100, 128, 1024]
    """
    whole = np.full(samples.shape, True) if batch_size is None else samples <= batch_size
    classes = np.where(whole, np.where(samples >= LARGE, FINE, MEDIUM), COARSE)
    power = np.left_shift(1, np.frexp(samples.astype(np.float64))[1].astype(np.int64) - 1)  # largest power <= samples
    step = np.maximum(1, power // classes)
    rows: Integers = -(-samples // step) * step
    return rows if batch_size is None else np.where(whole, np.minimum(rows, batch_size), rows)


def groups_of(rows: Integers) -> Iterator[Integers]:
    """Yield the indices of the clients with equal `rows`, fewest rows first."""
    for size in np.unique(rows):
        yield np.flatnonzero(rows == size)


def padded_samples(clients: Sequence[CheckedClient], rows: int) -> Floats:
    """Return the samples of `clients` in float64 with a bias column, padded with zero rows to `rows`."""
    samples = np.array([client.samples for client in clients])
    padded = np.zeros((len(clients), rows, clients[0].x.shape[1] + 1))
    _fill(padded, clients, samples)
    return padded


def _fill(padded: NDArray[np.floating], clients: Sequence[CheckedClient], samples: Integers) -> None:
    rows = np.concatenate([client.x for client in clients])
    if int(samples.min()) == padded.shape[1]:
        padded[..., :-1] = rows.reshape(len(clients), padded.shape[1], -1)
        padded[..., -1] = 1.0
    else:
        real = np.arange(padded.shape[1]) < samples[:, None]
        padded[..., :-1][real] = rows
        padded[real, -1] = 1.0


def make_block(
    clients: Sequence[CheckedClient],
    indices: Integers,
    padded: int,
    objective: Objective,
    outputs: int,
    dtype: torch.dtype,
    rates: Floats,
    *,
    between_samples: bool,
) -> Block:
    """Return the data of some clients in a block, in the order of `indices`."""
    samples = np.array([clients[i].samples for i in indices], dtype=np.int64)
    width = clients[indices[0]].x.shape[1] + 1
    x = torch.zeros((indices.size, padded, width), dtype=dtype)
    targets = torch.zeros((indices.size, padded, outputs), dtype=dtype)
    gram = torch.zeros((indices.size, padded, padded), dtype=dtype) if between_samples else None
    real = np.arange(padded) < samples[:, None]
    lengths = np.zeros(indices.size)
    step = max(1, PART_BYTES // (padded * width * x.element_size()))
    for start in range(0, indices.size, step):
        some = slice(start, start + step)
        chosen = [clients[i] for i in indices[some]]
        _fill(x[some].numpy(), chosen, samples[some])
        labels = torch.from_numpy(np.concatenate([client.y for client in chosen]))
        targets[some][torch.from_numpy(real[some])] = objective.encode(labels, outputs, dtype)
        if gram is not None:
            with one_thread():  # the last bits of a BLAS product depend on its number of threads
                torch.bmm(x[some], x[some].transpose(1, 2), out=gram[some])
        lengths[some] = torch.linalg.vector_norm(x[some], dim=(1, 2), dtype=torch.float64).numpy()
    row_weights = torch.from_numpy(np.where(real, (rates / samples)[:, None], 0.0)[:, None, :]).to(dtype)
    targets = targets.transpose(1, 2).contiguous()
    return Block(indices, samples, x, targets, row_weights, gram, lengths * enlargement(padded * width))
