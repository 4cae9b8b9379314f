"""Choice of the clients that ask to be forgotten: of one class if clients have one, else random; keyed by the seed.

Requests of one class visit the classes in turn, and then continue with the next clients of the first class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sifu import InputError, Spec
from sifu.core.round import keyed_generator
from sifu_paper.settings import Requests


def choose_requests(clients: Sequence[Any], spec: Spec, wanted: Requests, request_set: int = 0) -> list[list[str]]:
    """Return the names of the clients of each request; sets 0, 1, 2, ... start with different clients."""
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
    turned = [int(label) for label in np.roll(classes, -request_set)]
    requests = []
    for number in range(wanted.count):
        turn, place = divmod(number, len(turned))
        asking = members[turned[place]][turn * wanted.clients : (turn + 1) * wanted.clients]
        if not asking:
            raise InputError(
                f"{wanted.count} requests of {wanted.clients} clients of one class each were asked for, but class "
                f"{turned[place]} has {len(members[turned[place]])} clients"
            )
        requests.append(asking)
    return requests
