"""Partition of samples into disjoint index arrays, one for each client, and watermarks on clients' images.

All random choices come from the given generator; the same generator, labels and numbers give the same partition. The
indices of a client are sorted.

A watermark sets some pixels of every image of a client to the maximum, at places specific to the client. The paper
(section 5.3, after Sommer et al. 2020) marks clients to make forgetting visible: only the mark distinguishes a client's
images from all others. Places depend on the seed and the client's number alone, never on data. (In the authors' code
clients with equal numbers modulo 10 share one mark; here each has its own.)
"""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from sifu.core.round import keyed_generator
from sifu.data.dataset import Dataset
from sifu.errors import InputError
from sifu.theory.arrays import Array, Floats, Integers

Indices = Integers

KINDS = ("iid", "one_class", "dirichlet", "identity", "given")


def partition(
    kind: str,
    labels: ArrayLike,
    clients: int,
    samples_per_client: int | None,
    generator: np.random.Generator,
    *,
    alpha: float | None = None,
    identity: ArrayLike | None = None,
    given: ArrayLike | None = None,
    sizes: Sequence[int] | None = None,
) -> list[Indices]:
    """Split the samples with these `labels` among `clients`.

    * `iid`: samples at random.
    * `one_class`: client k holds only class number k * classes // clients, so classes are spread evenly.
    * `dirichlet`: each client's class proportions are drawn from Dirichlet(alpha) (Hsu, Qi and Brown 2019).
    * `identity`: whole people, in the order of their numbers, until a client has at least its number of samples.
    * `given`: the client ids of `given`, in sorted order; `clients` must be their number.

    Args:
        kind: One of the kinds above.
        labels: Label of each sample.
        clients: Number of clients.
        samples_per_client: Number of samples of every client. If neither this nor `sizes` is given, all samples are
            split as evenly as the kind allows (`one_class`: only samples of classes that have a client).
        generator: Source of all random choices.
        alpha: Concentration of `dirichlet`.
        identity: Person of each sample, for `identity`.
        given: Client id of each sample, for `given`.
        sizes: Number of samples of each client.

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
        return _by_given(given, targets.shape[0], count, samples_per_client, sizes)
    wanted = _sizes(count, samples_per_client, sizes)
    if kind == "identity":
        return _by_identity(identity, targets.shape[0], count, wanted)
    if kind == "one_class":
        return _by_class(_class_numbers(kind, targets), count, wanted, generator)
    even = even_sizes(targets.shape[0], count) if wanted is None else wanted
    _check_enough(sum(even), targets.shape[0], "samples")
    if kind == "iid":
        order = generator.permutation(targets.shape[0])
        return [np.sort(part).astype(np.int64) for part in np.split(order[: sum(even)], np.cumsum(even)[:-1])]
    return _by_dirichlet(_class_numbers(kind, targets), even, alpha, generator)


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


def _by_class(labels: Indices, clients: int, wanted: list[int] | None, generator: np.random.Generator) -> list[Indices]:
    classes = np.unique(labels)
    class_of = np.arange(clients) * classes.size // clients
    parts: dict[int, Indices] = {}
    for number in np.unique(class_of):
        members = np.flatnonzero(class_of == number)
        pool = generator.permutation(np.flatnonzero(labels == classes[number]))
        sizes = even_sizes(pool.size, members.size) if wanted is None else [wanted[k] for k in members]
        _check_enough(sum(sizes), pool.size, f"samples of class {classes[number]} for {members.size} clients")
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

    When a class runs out, its share goes to the client's other classes, in proportion. Later clients find emptier
    pools, so the order of clients is random.
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
            # All of the client's classes are empty (or alpha is tiny), so draw in proportion to the remaining samples.
            weights = (left - taken).astype(np.float64)
        more = generator.multinomial(missing, weights / weights.sum())
        taken = np.minimum(taken + more, left)  # every pass fills the client or empties a class
    return taken


def _by_identity(identity: ArrayLike | None, samples: int, clients: int, wanted: list[int] | None) -> list[Indices]:
    if identity is None:
        raise InputError(
            "an identity partition needs the person of each sample, which this data set does not have; celeba has it"
        )
    people = _one_a_sample("identity", identity, samples)
    order = np.argsort(people, kind="stable")
    _, starts, counts = np.unique(people[order], return_index=True, return_counts=True)
    if clients > counts.size:
        raise InputError(f"{clients} clients of whole people are requested, but there are {counts.size} people")
    ends = np.append(starts, samples)
    parts, person = [], 0
    for client in range(clients):
        later = clients - client - 1
        first = person
        if wanted is not None:
            while person < counts.size and ends[person] - ends[first] < wanted[client]:
                person += 1
            if ends[person] - ends[first] < wanted[client]:
                raise InputError(
                    f"{sum(wanted)} samples of whole people are requested by {clients} clients, but the {samples} "
                    f"available ({counts.size} people) ran out at client {client}; request fewer"
                )
        else:
            target = (samples - ends[first]) / (later + 1)
            person += 1
            # Add people while this brings the client closer to an even share and leaves one person for each later
            # client.
            while person < counts.size - later and (
                later == 0 or abs(ends[person + 1] - ends[first] - target) < abs(ends[person] - ends[first] - target)
            ):
                person += 1
        parts.append(np.sort(order[ends[first] : ends[person]]).astype(np.int64))
    return parts


def _by_given(
    given: ArrayLike | None,
    samples: int,
    clients: int,
    samples_per_client: int | None,
    sizes: Sequence[int] | None,
) -> list[Indices]:
    if given is None:
        raise InputError("a given partition needs the client id of each sample; store it as `client` in the npz file")
    if samples_per_client is not None or sizes is not None:
        raise InputError("a given partition already determines the samples of each client; leave the sizes out")
    ids, client_of = np.unique(_one_a_sample("given", given, samples), return_inverse=True)
    if ids.size != clients:
        raise InputError(f"{clients} clients are requested, but the given ids name {ids.size}")
    order = np.argsort(client_of.reshape(-1), kind="stable")
    return [
        part.astype(np.int64)
        for part in np.split(order, np.cumsum(np.bincount(client_of.reshape(-1), minlength=clients))[:-1])
    ]


def _one_a_sample(field: str, values: ArrayLike, samples: int) -> Array:
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


def _sizes(clients: int, samples_per_client: int | None, sizes: Sequence[int] | None) -> list[int] | None:
    """Return each client's size, or None to use all samples."""
    if sizes is not None:
        if samples_per_client is not None:
            raise InputError("give samples_per_client (one size for all) or sizes (one each), not both")
        if len(sizes) != clients:
            raise InputError(f"{len(sizes)} sizes were given for {clients} clients; give one for each")
        return [_whole_number(f"the size of client {client}", size) for client, size in enumerate(sizes)]
    if samples_per_client is None:
        return None
    return [_whole_number("samples_per_client", samples_per_client)] * clients


def _check_enough(wanted: int, available: int, what: str) -> None:
    if wanted > available:
        raise InputError(f"{wanted} {what} are requested, but {available} are available; request fewer")


def _whole_number(field: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise InputError(f"{field} is {value!r}; a whole number of 1 or more was expected") from None
    if number < 1 or isinstance(value, bool):
        raise InputError(f"{field} is {value}; a whole number of 1 or more was expected")
    return number


def watermarked(
    dataset: Dataset, indices: Sequence[Integers], pixels: int, seed: int, *, fresh: bool = False
) -> Dataset:
    """Return the data set with a mark on each client's training images; test samples are unchanged.

    Args:
        dataset: Data set of images stored as bytes.
        indices: Training rows of each client.
        pixels: Number of marked pixels.
        seed: Seed of the places.
        fresh: True to draw marks that differ from the marks that clients train with. The accuracy on such images shows
            how much of the accuracy is due to the mark.
    """
    images = dataset.x_train
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] > 4):
        raise InputError(
            f"a watermark needs images as bytes of shape (N, H, W) or (N, H, W, C); {dataset.name!r} has "
            f"{images.dtype} of shape {images.shape}: set data.watermark = 0"
        )
    height, width = images.shape[1:3]
    if not 1 <= pixels <= height * width:
        raise InputError(f"a watermark has 1 to {height * width} pixels on {height}x{width} images, found {pixels}")
    marked = images.copy()
    largest = dataset.scale.largest if dataset.scale else 255.0
    for client, rows in enumerate(indices):
        for place in mark_places(seed, client, height * width, pixels, fresh=fresh):
            marked[rows, place // width, place % width] = images.dtype.type(largest)  # every channel of the pixel
    return replace(dataset, x_train=marked)


def mark_places(seed: int, client: int, places: int, pixels: int, *, fresh: bool = False) -> Integers:
    """Return the indices of the pixels, out of `places`, that form the mark of a client.

    >>> mark_places(1, 0, 64, 3).size, bool(np.array_equal(mark_places(1, 0, 64, 3), mark_places(1, 1, 64, 3)))
    (3, False)
    """
    generator = keyed_generator(seed, "fresh watermark" if fresh else "watermark", client)
    return generator.choice(places, size=pixels, replace=False)
