"""Data of the embedded clients, checked once and stored in padded tensors, and the losses of linear models.

Every client is padded to a number of rows that depends only on its own number of samples and the batch size
(`padded_rows`). Clients with equal padding form a block. A round works on parts of blocks, and the parts depend only on
the participants. The shape of every operation, and so every last bit of the result, is therefore the same whether or
not a client that does not take part exists (docs/theory.md, section 6.6). Padding rows are zeros with weight zero, and
each client's data is stored once. The size of a part is limited, so a round allocates little memory however many
clients take part.

Clients of similar size are adjacent in memory, in the element type of training, so that one call trains many of them.

For outputs z of one sample and target t (a one-hot row, a 0/1 label, or real values):

    softmax        f = log sum_j exp(z_j) - z_t        df/dz = softmax(z) - t     d2f/dz2 <= 1/2
    logistic       f = log(1 + exp(z)) - t z           df/dz = sigmoid(z) - t     d2f/dz2 <= 1/4
    least_squares  f = 1/2 sum_j (z_j - t_j)^2         df/dz = z - t              d2f/dz2  = 1

The last column is the factor that turns the largest eigenvalue of X'X/n into a smoothness constant. `least_squares`
differs from `nn.MSELoss`, which averages over outputs, has no factor 1/2, and so has another curvature factor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from sifu.engines.sim.threads import one_thread
from sifu.errors import InputError
from sifu.theory.arrays import Array, Floats, Integers
from sifu.theory.participation import ClientIndices
from sifu.theory.rounding import enlargement

PART_ROWS = 2**14
"""Maximum number of rows of a part, padding included; a single client may exceed it."""
PART_BYTES = 2**27
"""Maximum size of a copy of a part's samples; a single client may exceed it."""
COPY_BYTES = 2**17
"""Size from which each client's samples are multiplied separately; samples of smaller clients are copied together."""
FINE, MEDIUM, COARSE = 8, 4, 2
"""Numbers of padded sizes between one power of two and the next.

They apply to large clients, small clients, and clients trained in mini-batches, whose padding costs little. Every
distinct size costs a few calls per round.
"""
LARGE = 64
"""Number of samples from which a client counts as large."""


PartPlaces = slice | Integers
"""Positions among the requested clients; a slice, which is the faster index, if they are contiguous."""


@dataclass(frozen=True)
class Block:
    """Padded data of some clients; outputs precede rows.

    `x` (clients, rows, width) has the bias column last. `targets` (clients, outputs, rows) are encoded. `row_weights`
    (clients, 1, rows) are 1/n_i on the n_i true rows and 0 on padding. `gram` holds x x' of each client if steps in
    sample space are cheaper than steps in feature space; otherwise it is None. `lengths` are ||X_i||_F, rounded up.
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
        """X_i of each client, cached because creating a view takes a tenth of the time of a product with it."""
        return self.x.unbind()

    @functools.cached_property
    def turned(self) -> tuple[Tensor, ...]:
        """Views of X_i' of each client."""
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
        """Yield the clients at `rows` of this block in parts.

        The boundaries of the parts do not depend on other clients of the block.

        Args:
            rows: Rows of the clients in this block.
            places: Their positions among all requested clients; None if all requested clients are in this block.
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
        self._beside = side_by_side(rows)
        self._index = slice(int(rows[0]), int(rows[-1]) + 1) if self._beside else torch.from_numpy(rows)
        self._x = self._take(block.x) if self._beside else None
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

    @property
    def x(self) -> Tensor:
        """Samples (clients, rows, width), gathered on first access."""
        if self._x is None:
            self._x = self._take(self.block.x)
        return self._x

    def let_go(self) -> None:
        """Release gathered samples; the next access gathers them again."""
        if not self._beside:
            self._x = None

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

    def pulled_back(self, dual: Tensor) -> Tensor:
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
    """Return the number of rows each client is padded to, from its samples and the batch size alone.

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
    *,
    between_samples: bool,
) -> Block:
    """Copy the data of some clients into a block.

    Args:
        clients: All clients.
        indices: Indices of the clients to copy.
        padded: Number of rows each of them is padded to.
        objective: Loss that encodes the targets.
        outputs: Number of outputs of the model.
        dtype: Element type of the block.
        between_samples: True to compute the Gram matrices.

    Returns:
        The block, in the order of `indices`.
    """
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
    row_weights = torch.from_numpy(np.where(real, 1.0 / samples[:, None], 0.0)[:, None, :]).to(dtype)
    targets = targets.transpose(1, 2).contiguous()
    return Block(indices, samples, x, targets, row_weights, gram, lengths * enlargement(padded * width))


ObjectiveName = Literal["softmax", "logistic", "least_squares"]


@dataclass(frozen=True)
class Objective:
    """A loss; `curvature_factor` is its largest curvature with respect to the outputs of a sample.

    Functions of outputs and encoded targets take the dimension of the outputs as `dim`; the default is the last one.
    """

    name: ObjectiveName
    curvature_factor: float
    residual: Callable[..., Tensor]
    """df/dz of each row, from outputs and encoded targets."""
    row_loss: Callable[..., Tensor]
    """f of each row, from outputs and encoded targets."""
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
        """Return whether each row is predicted correctly; always False for real-valued targets.

        The first of equal scores is the prediction.
        """
        if self.name == "softmax":
            # `max` returns the same index as `argmax`, five times as fast.
            return encoded.gather(dim, scores.max(dim=dim, keepdim=True).indices).squeeze(dim) > 0.5
        if self.name == "logistic":
            return ((scores > 0) == (encoded > 0.5)).squeeze(dim)
        return torch.zeros_like(scores.select(dim, 0), dtype=torch.bool)


def _softmax(scores: Tensor, dim: int) -> Tensor:
    """Compute softmax over `dim`; for a short last dimension this is three times as fast as torch's own function."""
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
        ...

    @property
    def x(self) -> Array:
        """Samples."""
        ...

    @property
    def y(self) -> Array:
        """Targets."""
        ...


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


def check_clients(
    clients: Sequence[ClientData], objective: Objective, outputs: int, dtype: str, *, flat: bool
) -> tuple[CheckedClient, ...]:
    """Validate the clients and convert their data to the training type.

    Args:
        clients: The clients' data.
        objective: The loss, which determines the kind of targets.
        outputs: Number of outputs of the model.
        dtype: Element type of training.
        flat: True to flatten each sample.

    Returns:
        The clients in their order.

    Raises:
        InputError: If a client's data cannot be used; the message names the first such client.
    """
    names: set[str] = set()
    checked = []
    for client in clients:
        if client.name in names:
            raise InputError(f"two clients are called {client.name!r}; every client needs its own name")
        names.add(client.name)
        samples = np.shape(client.x)[0]
        if samples == 0:
            raise InputError(f"client {client.name!r} has no samples; leave it out of the federation")
        if np.shape(client.y)[:1] != (samples,):
            raise InputError(f"client {client.name!r} has {samples} samples but targets of shape {np.shape(client.y)}")
        with np.errstate(over="ignore"):
            x = np.ascontiguousarray(client.x, dtype=dtype)
        _refuse_not_finite(client.name, "samples", x)
        y = _targets(client, objective, outputs, dtype)
        checked.append(CheckedClient(client.name, x.reshape(samples, -1) if flat else x, y))
    return tuple(checked)


def _targets(client: ClientData, objective: Objective, outputs: int, dtype: str) -> Array:
    y = np.asarray(client.y)
    _refuse_not_finite(client.name, "targets", y)
    if not objective.labels:
        if y.reshape(y.shape[0], -1).shape[1] != outputs:
            raise InputError(
                f"client {client.name!r} has targets of shape {y.shape}; {outputs} values each were expected"
            )
        with np.errstate(over="ignore"):
            values = y.reshape(y.shape[0], outputs).astype(dtype)
        _refuse_not_finite(client.name, "targets", values)
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


def _refuse_not_finite(name: str, what: str, values: Array) -> None:
    if np.issubdtype(values.dtype, np.inexact):
        bad = values.size - int(np.count_nonzero(np.isfinite(values)))
        if bad:
            raise InputError(
                f"client {name!r} has {bad} values in its {what} that are NaN or infinite; repair or leave them out"
            )
