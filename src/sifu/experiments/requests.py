"""Which clients ask to be forgotten: of one class where clients have one, at random elsewhere; keyed by the seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sifu.core.randomness import keyed_generator
from sifu.core.spec import Spec
from sifu.errors import InputError
from sifu.experiments.settings import Requests


def choose_requests(clients: Sequence[Any], spec: Spec, wanted: Requests, request_set: int = 0) -> list[list[str]]:
    """Names of the clients of each request; set 0, 1, 2... begin with different clients."""
    if wanted.count * wanted.clients >= len(clients):
        raise InputError(
            f"{wanted.count} requests of {wanted.clients} clients would forget all {len(clients)}: ask for fewer"
        )
    if wanted.choose == "class" and spec.data.partition == "one_class":
        return _by_class(clients, spec, wanted, request_set)
    order = keyed_generator(spec.seed, "requests", request_set).permutation(len(clients))
    chunks = [order[k * wanted.clients : (k + 1) * wanted.clients] for k in range(wanted.count)]
    return [[clients[index].name for index in sorted(chunk)] for chunk in chunks]


def _by_class(clients: Sequence[Any], spec: Spec, wanted: Requests, request_set: int) -> list[list[str]]:
    members: dict[int, list[str]] = {}
    for client in clients:
        members.setdefault(int(np.bincount(client.y).argmax()), []).append(client.name)
    classes = keyed_generator(spec.seed, "request classes").permutation(sorted(members))
    if wanted.count > classes.size:
        raise InputError(
            f"{wanted.count} requests of one class each were asked for, but there are {classes.size} classes"
        )
    turned = np.roll(classes, -request_set)
    return [members[int(label)][: wanted.clients] for label in turned[: wanted.count]]
