"""Split of a data set's training samples among clients, and the watermarks on their images."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sifu.errors import InputError
from sifu_paper.draws import keyed
from sifu_paper.settings import Settings

Rows = np.ndarray
"""Row numbers of one client's samples, sorted."""


def split(settings: Settings, labels: Rows, people: Rows | None, seed: int) -> list[Rows]:
    """Return the rows of each client, by the kind of partition that the settings name.

    `one_class` gives every client samples of one class, `dirichlet` draws each client's classes, and `identity` gives
    whole people, in the order of their numbers, until a client has enough samples.
    """
    generator = keyed(seed, "partition")
    if settings.clients * settings.samples > labels.size:
        raise InputError(
            f"{settings.clients} clients of {settings.samples} samples are more than the {labels.size} of "
            f"{settings.dataset}"
        )
    if settings.partition == "one_class":
        return _one_class(labels, settings.clients, settings.samples, generator)
    if settings.partition == "dirichlet":
        return _dirichlet(labels, settings.clients, settings.samples, settings.alpha, generator)
    if people is None:
        raise InputError(f"{settings.dataset} does not say who is on its images")
    return _people(people, settings.clients, settings.samples)


def _one_class(labels: Rows, clients: int, samples: int, generator: np.random.Generator) -> list[Rows]:
    classes = np.unique(labels)
    class_of = np.arange(clients) * classes.size // clients
    parts: list[Rows] = []
    for number in np.unique(class_of):
        pool = generator.permutation(np.flatnonzero(labels == classes[number]))
        members = int((class_of == number).sum())
        if members * samples > pool.size:
            raise InputError(f"class {classes[number]} has {pool.size} samples for {members} clients of {samples}")
        parts += [np.sort(pool[k * samples : (k + 1) * samples]) for k in range(members)]
    return parts


def _dirichlet(labels: Rows, clients: int, samples: int, alpha: float, generator: np.random.Generator) -> list[Rows]:
    """Fill clients one after another from pools of classes; a class that runs out is replaced by the others."""
    pools = [generator.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    used = np.zeros(len(pools), dtype=np.int64)
    held = np.array([pool.size for pool in pools])
    parts: dict[int, Rows] = {}
    for client in generator.permutation(clients):  # pools are emptier for later clients
        proportions = generator.dirichlet(np.full(len(pools), alpha))
        taken = np.zeros_like(used)
        while (missing := samples - int(taken.sum())) > 0:
            left = held - used
            weights = np.where(taken < left, proportions, 0.0)
            weights = weights if weights.sum() > 1e-300 else (left - taken).astype(np.float64)
            taken = np.minimum(taken + generator.multinomial(missing, weights / weights.sum()), left)
        chosen = [pool[start : start + more] for pool, start, more in zip(pools, used, taken, strict=True)]
        parts[int(client)] = np.sort(np.concatenate(chosen))
        used += taken
    return [parts[client] for client in range(clients)]


def _people(people: Rows, clients: int, samples: int) -> list[Rows]:
    order = np.argsort(people, kind="stable")
    _, starts = np.unique(people[order], return_index=True)
    ends = np.append(starts[1:], people.size)
    parts, first = [], 0
    for client in range(clients):
        enough = ends[ends >= first + samples]
        if not enough.size:
            raise InputError(f"the {people.size} images of people ran out at client {client}")
        parts.append(np.sort(order[first : enough[0]]))
        first = int(enough[0])
    return parts


def marked(
    images: np.ndarray, parts: Sequence[Rows], pixels: int, largest: float, seed: int, fresh: bool = False
) -> np.ndarray:
    """Return the images with every client's mark: some pixels, drawn for the client, set to the largest value.

    In the authors' code, clients whose numbers agree modulo 10 share a mark; here each has its own. `fresh` draws
    other marks than those of training: what a model knows of a client's mark is the accuracy that it loses by them.
    """
    result = images.copy()
    height, width = images.shape[1:3]
    for client, rows in enumerate(parts):
        generator = keyed(seed, "fresh watermark" if fresh else "watermark", client)
        for place in generator.choice(height * width, size=pixels, replace=False):
            result[rows, place // width, place % width] = largest
    return result
