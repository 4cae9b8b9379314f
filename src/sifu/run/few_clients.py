"""Consequences of few remaining clients: a model of one client's data, and masks that need three clients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sifu.core.operator_words import unmasked_setting
from sifu.run.run_view import RunView
from sifu.store.reader import plain_name
from sifu.theory.facts import DROPPED_MASKED_ROUND, LEAST_MASKED, MASKED_STATISTICS
from sifu.theory.participation import ClientIndices


def staying_without(view: RunView, clients: Sequence[str], *, records: bool = False) -> ClientIndices:
    """Return the clients that stay after a request, whether or not it has been received.

    Args:
        view: View of the run.
        clients: Clients of the request.
        records: True if only some of their records are forgotten. Such a client stays, although it is not active until
            it has rejoined.
    """
    named = view.indices(clients)
    return np.union1d(view.active, named) if records else np.setdiff1d(view.active, named)


def consequences(view: RunView, staying: ClientIndices) -> tuple[str, ...]:
    """Return sentences on the consequences if only these clients are left; empty if there are none.

    Args:
        view: View of the run.
        staying: Clients that are left.
    """
    return tuple(filter(None, (left_alone(view, staying), masks_fail(view, staying))))


def left_alone(view: RunView, staying: ClientIndices) -> str:
    """Return a warning if a single client is left, whose data the next model would reveal; "" otherwise."""
    if staying.size != 1:
        return ""
    name = plain_name(view.reader, int(staying[0]))
    return f"{name} is the only client left: the model is made from its data alone and may reveal them to its users"


def masks_fail(view: RunView, staying: ClientIndices) -> str:
    """Return a warning if masks need more clients than are left; "" if they do not, or nothing is masked."""
    if staying.size >= LEAST_MASKED:
        return ""
    outside = view.facts.outside
    count = f"{staying.size} client{'' if staying.size == 1 else 's'} left"
    if MASKED_STATISTICS in outside:
        return (
            f"{count}, and a masked sum needs {LEAST_MASKED}: the head cannot be solved again until another client "
            f"joins, or the server is started with {unmasked_setting(view.spec.data.name)} and then sees each client's "
            "statistics"
        )
    if any(what.startswith(DROPPED_MASKED_ROUND) for what in outside):
        return f"{count}, and a masked round needs {LEAST_MASKED}: no round can run until another client joins"
    return ""
