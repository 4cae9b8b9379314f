"""Federation of an experiment: the samples of each client as inputs of its network, and test samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from sifu.errors import InputError
from sifu_paper.data import load
from sifu_paper.draws import keyed
from sifu_paper.networks import Network, network_named
from sifu_paper.partition import marked, split
from sifu_paper.settings import Settings

PUBLISHED: dict[str, tuple[float, tuple[float, ...], tuple[float, ...]]] = {
    "digits": (16.0, (0.5,), (0.5,)),
    "mnist": (255.0, (0.1307,), (0.3081,)),  # PyTorch's MNIST example
    "fashion_mnist": (255.0, (0.2860,), (0.3530,)),
    "cifar10": (255.0, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": (255.0, (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    "celeba": (255.0, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),  # PyTorch's DCGAN tutorial
}
"""Largest value, means and deviations of each channel; the pairs in common use for the training images."""
_AUTHORS_CIFAR = (255.0, (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
AUTHORS = PUBLISHED | {
    "fashion_mnist": (255.0, (0.5,), (0.5,)),
    "cifar10": _AUTHORS_CIFAR,
    "cifar100": _AUTHORS_CIFAR,
}


@dataclass(frozen=True)
class Federation:
    """Clients' inputs and labels; `fresh` are the same inputs with other watermarks, where clients have marks."""

    network: Network
    x: tuple[np.ndarray, ...]
    y: tuple[np.ndarray, ...]
    x_test: np.ndarray
    y_test: np.ndarray
    fresh: tuple[np.ndarray, ...] = ()

    @property
    def samples(self) -> np.ndarray:
        """Number of samples of each client."""
        return np.array([labels.size for labels in self.y])


@lru_cache(maxsize=2)
def federation_of(settings: Settings, seed: int, folder: Path | None = None) -> Federation:
    """Return the federation that the settings and the seed describe, from files in `folder`."""
    found = load(settings.dataset, folder)
    parts = split(settings, found.y_train, found.client_train, seed)
    network = network_named(settings.network, _shape(found.x_train, settings), len(found.classes))

    def inputs(images: np.ndarray) -> np.ndarray:
        scaled = _scaled(images, settings)
        return scaled.reshape(len(scaled), -1) if settings.network == "softmax" else scaled

    def of_clients(images: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(inputs(images[rows]) for rows in parts)

    images: np.ndarray = found.x_train
    fresh: tuple[np.ndarray, ...] = ()
    if settings.watermark:
        mark = parts, settings.watermark, PUBLISHED[settings.dataset][0], seed
        images, fresh = marked(found.x_train, *mark), of_clients(marked(found.x_train, *mark, fresh=True))
    labels = tuple(found.y_train[rows] for rows in parts)
    return Federation(network, of_clients(images), labels, inputs(found.x_test), found.y_test, fresh)


def _shape(images: np.ndarray, settings: Settings) -> tuple[int, ...]:
    height, width, channels = (*images.shape[1:], 1)[:3]
    return (height * width * channels,) if settings.network == "softmax" else (channels, height, width)


def _scaled(images: np.ndarray, settings: Settings) -> np.ndarray:
    """Return images as (N, channels, height, width), scaled by constants."""
    constants = AUTHORS if settings.constants == "authors" else PUBLISHED
    largest, mean, deviation = constants[settings.dataset]
    channels = images[..., None] if images.ndim == 3 else images
    middle, width = np.array(mean, dtype=np.float32), np.array(deviation, dtype=np.float32)
    scaled = (channels / np.float32(largest) - middle) / width
    return np.ascontiguousarray(scaled.transpose(0, 3, 1, 2), dtype=np.float32)


def requests_of(
    federation: Federation, settings: Settings, count: int, clients: int, by_class: bool, seed: int, turn: int = 0
) -> list[list[int]]:
    """Return the clients of each request: of one class if clients have one and it is wanted, else at random.

    Requests of one class visit the classes in turn. Different values of `turn` start with different clients.
    """
    everyone = len(federation.y)
    if count * clients >= everyone:
        raise InputError(f"{count} requests of {clients} clients would forget all {everyone}: ask for fewer")
    if not (by_class and settings.partition == "one_class"):
        order = keyed(seed, "requests", turn).permutation(everyone)
        return [sorted(order[k * clients : (k + 1) * clients].tolist()) for k in range(count)]
    members: dict[int, list[int]] = {}
    for client, labels in enumerate(federation.y):
        members.setdefault(int(labels[0]), []).append(client)
    classes = np.roll(keyed(seed, "request classes").permutation(sorted(members)), -turn)
    return [members[int(label)][:clients] for label in _first(classes, count, members, clients)]


def _first(classes: np.ndarray, count: int, members: dict[int, list[int]], clients: int) -> Sequence[int]:
    if count > classes.size or any(len(members[int(label)]) < clients for label in classes[:count]):
        raise InputError(f"{count} requests of {clients} clients of one class each: there are not enough")
    return [int(label) for label in classes[:count]]
