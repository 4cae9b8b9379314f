"""The data of the clients, checked once, in the element type that training uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sifu.engines.sim.objectives import Objective
from sifu.errors import InputError
from sifu.theory.arrays import Array


class ClientData(Protocol):
    """What the simulator needs of a client: a name, samples `x` (n, ...) and targets `y` (n,) or (n, outputs)."""

    @property
    def name(self) -> str: ...

    @property
    def x(self) -> Array: ...

    @property
    def y(self) -> Array: ...


@dataclass(frozen=True)
class CheckedClient:
    """A client whose data can be trained on: `x` in the training type, `y` int64 labels or real values."""

    name: str
    x: Array
    y: Array

    @property
    def samples(self) -> int:
        """|D_i|."""
        return int(self.x.shape[0])


def input_shape(clients: Sequence[ClientData]) -> tuple[int, ...]:
    """The shape of one sample, the same for every client."""
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
    """How many outputs the targets ask for: classes seen, one for two classes, or columns of values."""
    if objective.name == "logistic":
        return 1
    if objective.name == "softmax":
        return 1 + max((int(np.max(client.y)) for client in clients if np.size(client.y)), default=0)
    return int(np.shape(clients[0].y)[1]) if np.ndim(clients[0].y) == 2 else 1


def check_clients(
    clients: Sequence[ClientData], objective: Objective, outputs: int, dtype: str, *, flat: bool
) -> tuple[CheckedClient, ...]:
    """Every client in the training type, or one sentence about the first that cannot be used."""
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
