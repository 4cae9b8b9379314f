"""Clients of a federation with their samples, created from a split data set, arrays or torch data sets.

All samples are checked here, before the first round: a NaN of one client would spread to all models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sifu.data.dataset import FEATURE_TYPES, Dataset, Normalise, check_pair
from sifu.errors import InputError
from sifu.theory.arrays import Array, Integers


def is_frame(data: Any) -> bool:
    """Return whether the attributes of an object are those of a data frame or a table."""
    columns = getattr(data, "column_names", None) or getattr(data, "columns", None)
    return columns is not None and hasattr(data, "__getitem__") and not isinstance(data, Mapping)


@dataclass(frozen=True)
class ClientData:
    """Samples of one client as model inputs, and their labels (int64 classes, or floats)."""

    name: str
    x: Array
    y: Array
    ids: Array | None = field(default=None, kw_only=True)
    """Identity of each sample in the user's own file, or None if the file has no column of identities."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise InputError(f"a client has the name {self.name!r}; a non-empty text was expected")
        owner = f"client {self.name!r}"
        check_pair(owner, self.x, self.y, "x", "y")
        if self.x.shape[0] == 0:
            raise InputError(f"{owner} holds no samples; leave it out, or give it some")
        if np.issubdtype(self.y.dtype, np.integer) and int(self.y.min()) < 0:
            raise InputError(f"{owner} has the class number {int(self.y.min())}; they start from 0")

    @property
    def samples(self) -> int:
        """Number of samples, |D_i| in the paper, which is the client's weight in the mean."""
        return int(self.x.shape[0])


def from_dataset(
    dataset: Dataset,
    indices: Sequence[Integers],
    dtype: str = "float64",
    flat: bool = True,
    normalise: Normalise = "unit",
    *,
    names: Sequence[str] | None = None,
) -> tuple[ClientData, ...]:
    """Return one client for each index array into the training samples.

    Args:
        dataset: Data set to split.
        indices: Rows of each client; they must be disjoint.
        dtype: Type of the features, float32 or float64.
        flat: True to flatten each image to one row of numbers.
        normalise: Normalisation (see `scale_features`).
        names: Names of the clients, by default client-000, client-001...

    Raises:
        InputError: If a row does not exist or is given twice, or if the clients are incompatible (`check_federation`).
    """
    width = max(3, len(str(len(indices) - 1)))
    if names is None:
        names = [f"client-{number:0{width}d}" for number in range(len(indices))]
    if len(names) != len(indices):
        raise InputError(f"{len(names)} names were given for {len(indices)} clients; give one for each")
    samples, holder = dataset.x_train.shape[0], np.full(dataset.x_train.shape[0], -1, dtype=np.int64)
    clients = []
    for number, (name, rows) in enumerate(zip(names, indices, strict=True)):
        rows = np.asarray(rows, dtype=np.int64)
        if rows.size and (int(rows.min()) < 0 or int(rows.max()) >= samples):
            raise InputError(
                f"client {name!r} is given rows {int(rows.min())} to {int(rows.max())}, but data set "
                f"{dataset.name!r} has rows 0 to {samples - 1}"
            )
        # A sample with two holders would stay in the model after one of them is forgotten.
        shared = rows[holder[rows] >= 0]
        if shared.size:
            raise InputError(
                f"row {int(shared[0])} is given to both {names[int(holder[shared[0]])]!r} and {name!r}; parts must be "
                "disjoint"
            )
        if np.unique(rows).size != rows.size:
            raise InputError(f"client {name!r} is given {rows.size - np.unique(rows).size} of its rows twice")
        holder[rows] = number
        x = dataset.features("train", dtype=dtype, flat=flat, normalise=normalise, rows=rows)
        ids = None if dataset.row_ids is None else dataset.row_ids[rows]
        clients.append(ClientData(name, x, _labels(dataset.y_train[rows], dtype), ids=ids))
    return check_federation(clients)


def from_arrays(arrays: Mapping[str, tuple[Any, Any]], *, dtype: str = "float64") -> tuple[ClientData, ...]:
    """Return one client for each name in `arrays`, in the mapping's order.

    Args:
        arrays: Pairs (x, y) by client name, as arrays or as values that numpy converts to arrays.
        dtype: Type of the features, float32 or float64.

    Raises:
        InputError: If an array does not hold numbers, or if the clients are incompatible (`check_federation`).
    """
    if dtype not in FEATURE_TYPES:
        raise InputError(f"feature type {dtype!r} is not supported: write {' or '.join(FEATURE_TYPES)}")
    clients = []
    for name, pair in arrays.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InputError(f"client {name!r} has a {type(pair).__name__} instead of a pair (x, y)")
        x, y = (_numbers(values, f"{field} of client {name!r}") for field, values in zip("xy", pair, strict=True))
        with np.errstate(over="ignore"):  # values that overflow float32 are refused as Inf, with the client's name
            clients.append(ClientData(name, x.astype(dtype), _labels(y, dtype)))
    return check_federation(clients)


def from_torch(datasets: Mapping[str, Any], *, dtype: str = "float64") -> tuple[ClientData, ...]:
    """Return one client for each torch data set of pairs (x, y).

    Args:
        datasets: Data sets by client name. Each sample is read once, so a random transform is applied only once.
        dtype: Type of the features, float32 or float64.

    Raises:
        InputError: If a sample is not a pair (x, y), if samples of a client differ in shape, or if the clients are
            incompatible (`check_federation`).
    """
    import torch

    def to_numpy(value: Any) -> Array:
        return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)

    arrays = {}
    for name, dataset in datasets.items():
        if isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__len__"):
            items = iter(dataset)
        else:
            items = (dataset[row] for row in range(len(dataset)))
        xs, ys = [], []
        for row, item in enumerate(items):
            if not isinstance(item, tuple | list) or len(item) != 2:
                raise InputError(f"sample {row} of client {name!r} is a {type(item).__name__}, not a pair (x, y)")
            xs.append(to_numpy(item[0]))
            ys.append(to_numpy(item[1]))
            for part, values in (("x", xs), ("y", ys)):
                if values[-1].dtype.kind not in "biuf" or values[-1].shape != values[0].shape:
                    raise InputError(
                        f"{part} of sample {row} of client {name!r} has type {values[-1].dtype} and shape "
                        f"{values[-1].shape}; numbers of shape {values[0].shape} were expected (transforms.ToTensor "
                        "turns images into such)"
                    )
        if not xs:
            raise InputError(f"client {name!r} holds no samples; leave it out, or give it some")
        x = np.stack(xs)
        # A single number per sample is one feature.
        arrays[name] = (x[:, None] if x.ndim == 1 else x, np.stack(ys))
    return from_arrays(arrays, dtype=dtype)


def check_federation(clients: Sequence[ClientData]) -> tuple[ClientData, ...]:
    """Return the clients as a tuple; refuse repeated names, and samples or labels of different shapes or types."""
    if not clients:
        raise InputError("a federation needs at least one client, found none")
    seen = set()
    first = clients[0]
    for client in clients:
        if client.name in seen:
            raise InputError(f"two clients have the name {client.name!r}; names must be unique")
        seen.add(client.name)
        for what, actual, expected in (
            ("samples of shape", client.x.shape[1:], first.x.shape[1:]),
            ("labels of shape", client.y.shape[1:], first.y.shape[1:]),
            ("samples of type", client.x.dtype, first.x.dtype),
            ("labels of type", client.y.dtype, first.y.dtype),
        ):
            if actual != expected:
                raise InputError(
                    f"client {client.name!r} has {what} {actual}, but client {first.name!r} has {expected}; all "
                    "clients train one model and must agree"
                )
    return tuple(clients)


def _numbers(values: Any, what: str) -> Array:
    try:
        array = np.asarray(values)
    except (ValueError, TypeError) as error:
        raise InputError(f"{what} cannot be read as an array ({error})") from error
    if array.dtype.kind not in "biuf":
        raise InputError(f"{what} has type {array.dtype}; real numbers were expected")
    return array


def _labels(y: Array, dtype: str) -> Array:
    """Return whole numbers as classes (int64), and other labels as regression targets in the features' type."""
    return y.astype(np.int64) if y.dtype.kind in "biu" else y.astype(dtype)
