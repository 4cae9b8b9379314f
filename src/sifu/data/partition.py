"""Partition of samples into disjoint index arrays, one for each client.

All random choices come from the given generator, so the same generator and arguments give the same partition. The
indices of a client are sorted.
"""

from __future__ import annotations

import difflib
import math
import operator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from sifu.errors import InputError
from sifu.theory.arrays import Array, Floats, Integers

Indices = Integers

KINDS = ("iid", "one_class", "dirichlet", "given")


def partition(
    kind: str,
    labels: ArrayLike,
    clients: int,
    samples_per_client: int | None,
    generator: np.random.Generator,
    *,
    alpha: float | None = None,
    given: ArrayLike | None = None,
) -> list[Indices]:
    """Split the samples with these `labels` among `clients`.

    * `iid`: samples at random.
    * `one_class`: client k holds only class number k * classes // clients, so classes are spread evenly.
    * `dirichlet`: each client's class proportions are drawn from Dirichlet(alpha) (Hsu, Qi and Brown 2019).
    * `given`: each client gets the samples with its id in `given`; `clients` must be the number of ids.

    Args:
        kind: One of `KINDS`.
        labels: Label of each sample.
        clients: Number of clients.
        samples_per_client: Number of samples of every client; None to split all samples as evenly as the kind allows
            (`one_class`: only samples of classes that have a client).
        generator: Source of all random choices.
        alpha: Concentration of `dirichlet`.
        given: Client id of each sample, for `given`.

    Returns:
        Sorted indices of each client's samples.

    >>> parts = partition("iid", np.zeros(10), 3, None, np.random.default_rng(0))
    >>> [len(part) for part in parts]
    [4, 3, 3]
    """
    if kind not in KINDS:
        close = difflib.get_close_matches(str(kind), KINDS, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise InputError(f"partition {kind!r} is unknown{hint}: write one of {', '.join(KINDS)}")
    targets = np.asarray(labels)
    if targets.ndim == 0:
        raise InputError("the labels to split are a single number; an array with one row per sample was expected")
    count = _whole_number("clients", clients)
    if count > targets.shape[0]:
        raise InputError(
            f"{count} clients are requested, but there are {targets.shape[0]} samples; each client needs at least one"
        )
    if kind == "given":
        return _by_given(given, targets.shape[0], count, samples_per_client)
    wanted = None if samples_per_client is None else _whole_number("samples_per_client", samples_per_client)
    if kind == "one_class":
        return _by_class(_class_numbers(kind, targets), count, wanted, generator)
    sizes = _sizes(count, wanted, targets.shape[0], "samples")
    if kind == "iid":
        order = generator.permutation(targets.shape[0])
        return [np.sort(part).astype(np.int64) for part in np.split(order[: sum(sizes)], np.cumsum(sizes)[:-1])]
    return _by_dirichlet(_class_numbers(kind, targets), sizes, alpha, generator)


def given_names(given: ArrayLike) -> tuple[str, ...]:
    """Return the client ids of a `given` partition as names, in the order of its clients."""
    return tuple(str(client) for client in np.unique(np.asarray(given)))


def even_sizes(samples: int, clients: int) -> list[int]:
    """Return sizes that differ by at most one and add up to `samples`.

    >>> even_sizes(10, 4)
    [3, 3, 2, 2]
    """
    base, more = divmod(samples, clients)
    return [base + (client < more) for client in range(clients)]


def _by_class(labels: Indices, clients: int, wanted: int | None, generator: np.random.Generator) -> list[Indices]:
    classes = np.unique(labels)
    class_of = np.arange(clients) * classes.size // clients
    parts: dict[int, Indices] = {}
    for number in np.unique(class_of):
        members = np.flatnonzero(class_of == number)
        pool = generator.permutation(np.flatnonzero(labels == classes[number]))
        what = f"samples of class {classes[number]} for {members.size} clients"
        sizes = _sizes(members.size, wanted, pool.size, what)
        if min(sizes) == 0:
            raise InputError(
                f"class {classes[number]} has {pool.size} samples for {members.size} clients; each needs at least one"
            )
        for client, part in zip(members, np.split(pool[: sum(sizes)], np.cumsum(sizes)[:-1]), strict=True):
            parts[int(client)] = np.sort(part).astype(np.int64)
    return [parts[client] for client in range(clients)]


def _by_dirichlet(
    labels: Indices, sizes: list[int], alpha: float | None, generator: np.random.Generator
) -> list[Indices]:
    """Fill clients one after another from pools of classes, without replacement.

    When a class runs out, its share goes to the client's other classes, in proportion. Pools are emptier for later
    clients, so the order of clients is random.
    """
    if alpha is None or not math.isfinite(alpha) or alpha <= 0.0:
        raise InputError(f"a dirichlet partition needs a finite alpha above 0, found {alpha}")
    pools = [generator.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    used = np.zeros(len(pools), dtype=np.int64)
    held = np.array([pool.size for pool in pools], dtype=np.int64)
    parts: dict[int, Indices] = {}
    for client in generator.permutation(len(sizes)):
        proportions = generator.dirichlet(np.full(len(pools), float(alpha)))
        taken = _draw_counts(proportions, sizes[client], held - used, generator)
        chosen = [pool[start : start + more] for pool, start, more in zip(pools, used, taken, strict=True)]
        parts[int(client)] = np.sort(np.concatenate(chosen)).astype(np.int64)
        used += taken
    return [parts[client] for client in range(len(sizes))]


def _draw_counts(proportions: Floats, size: int, left: Indices, generator: np.random.Generator) -> Indices:
    """Return the number of samples of each class: `size` in total by `proportions`, at most `left` of each."""
    taken = np.zeros_like(left)
    while (missing := size - int(taken.sum())) > 0:
        weights = np.where(taken < left, proportions, 0.0)
        if not weights.sum() > 1e-300:
            # The client's classes are all empty, or alpha is tiny: draw in proportion to the remaining samples.
            weights = (left - taken).astype(np.float64)
        more = generator.multinomial(missing, weights / weights.sum())
        taken = np.minimum(taken + more, left)  # every pass fills the client or empties a class
    return taken


def _by_given(given: ArrayLike | None, samples: int, clients: int, samples_per_client: int | None) -> list[Indices]:
    if given is None:
        raise InputError("a given partition needs the client id of each sample; store it as `client` in the npz file")
    if samples_per_client is not None:
        raise InputError("a given partition determines the samples of each client; leave samples_per_client out")
    ids, client_of = np.unique(_one_per_sample("given", given, samples), return_inverse=True)
    if ids.size != clients:
        raise InputError(f"{clients} clients are requested, but the given ids name {ids.size}")
    order = np.argsort(client_of.reshape(-1), kind="stable")
    return np.split(order.astype(np.int64), np.cumsum(np.bincount(client_of.reshape(-1)))[:-1])


def _one_per_sample(field: str, values: ArrayLike, samples: int) -> Array:
    array = np.asarray(values)
    if array.shape != (samples,):
        raise InputError(f"{field} has shape {array.shape}; ({samples},) was expected, one entry per sample")
    if np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).all():
        raise InputError(f"{field} holds {int((~np.isfinite(array)).sum())} values that are NaN or Inf")
    return array


def _class_numbers(kind: str, labels: Array) -> Indices:
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise InputError(
            f"a {kind} partition needs one whole class number per sample, found labels of type {labels.dtype} and "
            f"shape {labels.shape}; use iid for regression"
        )
    return labels.astype(np.int64)


def _sizes(clients: int, wanted: int | None, available: int, what: str) -> list[int]:
    """Return the number of samples of each client: `wanted`, or an even share of the available samples."""
    if wanted is None:
        return even_sizes(available, clients)
    if wanted * clients > available:
        raise InputError(f"{wanted * clients} {what} are requested, but {available} are available; request fewer")
    return [wanted] * clients


def _whole_number(field: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise InputError(f"{field} is {value!r}; a whole number of 1 or more was expected") from None
    if number < 1 or isinstance(value, bool):
        raise InputError(f"{field} is {value}; a whole number of 1 or more was expected")
    return number
