"""Partition of samples into disjoint index arrays, one for each client.

All random choices come from the given generator, so the same generator and arguments give the same partition. The
indices of a client are sorted.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from sifu.errors import InputError
from sifu.theory.arrays import Array, Floats, Integers

Indices = Integers


def partition(
    kind: str,
    labels: ArrayLike,
    clients: int,
    samples_per_client: int | None,
    generator: np.random.Generator,
    *,
    alpha: float = 0.1,
) -> list[Indices]:
    """Split the samples with these `labels` among `clients`, and return the sorted indices of each client's samples.

    * `iid`: samples at random.
    * `one_class`: client k holds only class number k * classes // clients, so classes are spread evenly.
    * `dirichlet`: each client's class proportions are drawn from Dirichlet(alpha) (Hsu, Qi and Brown 2019).

    Every client gets `samples_per_client` samples. None splits all samples as evenly as the kind allows (`one_class`:
    only samples of classes that have a client).

    >>> parts = partition("iid", np.zeros(10), 3, None, np.random.default_rng(0))
    >>> [len(part) for part in parts]
    [4, 3, 3]
    """
    targets = np.asarray(labels)
    if clients > targets.shape[0]:
        raise InputError(
            f"{clients} clients are requested, but there are {targets.shape[0]} samples; each client needs at least one"
        )
    if kind == "one_class":
        return _by_class(_class_numbers(kind, targets), clients, samples_per_client, generator)
    sizes = _sizes(clients, samples_per_client, targets.shape[0], "samples")
    if kind == "iid":
        order = generator.permutation(targets.shape[0])
        return [np.sort(part).astype(np.int64) for part in np.split(order[: sum(sizes)], np.cumsum(sizes)[:-1])]
    return _by_dirichlet(_class_numbers(kind, targets), sizes, alpha, generator)


def given_clients(given: Array) -> tuple[tuple[str, ...], list[Indices]]:
    """Return the names of the clients in a file, and the samples of each, from the client of each sample."""
    if np.issubdtype(given.dtype, np.floating) and not np.isfinite(given).all():
        raise InputError(f"{int((~np.isfinite(given)).sum())} samples have a client that is NaN or Inf")
    ids, client_of = np.unique(given, return_inverse=True)
    order = np.argsort(client_of, kind="stable").astype(np.int64)
    return tuple(map(str, ids)), np.split(order, np.cumsum(np.bincount(client_of))[:-1])


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


def _by_dirichlet(labels: Indices, sizes: list[int], alpha: float, generator: np.random.Generator) -> list[Indices]:
    """Fill clients one after another from pools of classes, without replacement.

    When a class runs out, its share goes to the client's other classes, in proportion. Pools are emptier for later
    clients, so the order of clients is random.
    """
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
