"""What looks like a mistake in a spec or in clients' data, before the first round; nothing is refused for it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from sifu.core.spec import Spec
from sifu.errors import SifuWarning
from sifu.theory.participation import Participation


def data_warnings(spec: Spec, clients: Sequence[Any]) -> list[str]:
    """A sentence for each thing that someone would want to know before training."""
    sentences = []
    participation = Participation.parse(spec.server.participation)
    if participation.kind == "fixed" and participation.count > len(clients):
        sentences.append(
            f"server.participation = {spec.server.participation!r}, but there are {len(clients)} clients: all of them "
            'take part in every round. Write "all", which can be proven'
        )
    empty = [client.name for client in clients if not np.any(client.x)]
    if len(empty) == len(clients):
        sentences.append("every feature of every client is 0: there is nothing to learn from. Check how they were made")
    elif empty:
        sentences.append(f"all features of {len(empty)} of {len(clients)} clients are 0, the first is {empty[0]!r}")
    labels = [np.asarray(client.y) for client in clients]
    if all(y.dtype.kind in "biu" and y.ndim == 1 for y in labels):
        seen = {int(label) for y in labels for label in (y.min(), y.max())}
        if len(seen) == 1:
            sentences.append(f"all labels are the same class, {seen.pop()}: there is nothing to tell apart")
    return sentences


def warn_of_data(spec: Spec, clients: Sequence[Any]) -> None:
    """Say so as a warning, which the command line prints as a sentence."""
    for sentence in data_warnings(spec, clients):
        warnings.warn(sentence, SifuWarning, stacklevel=3)
