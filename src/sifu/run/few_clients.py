"""Warnings if few clients remain: a model of a single client may reveal its data, and masks need three clients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sifu.core.operator_words import unmasked_setting
from sifu.run.run_view import RunView
from sifu.store.reader import plain_name
from sifu.theory.facts import DROPPED_MASKED_ROUND, LEAST_MASKED, MASKED_STATISTICS
from sifu.theory.participation import ClientIndices


def staying_without(view: RunView, clients: Sequence[str], *, records: bool) -> ClientIndices:
    """Return the clients that stay after a request; a client that loses only some `records` stays."""
    named = view.indices(clients)
    return np.union1d(view.active, named) if records else np.setdiff1d(view.active, named)


def consequences(view: RunView, staying: ClientIndices) -> tuple[str, ...]:
    """Return the warnings that apply if only the clients `staying` remain."""
    warnings, outside = [], view.facts.outside
    count = f"{staying.size} client{'' if staying.size == 1 else 's'} left"
    if staying.size == 1:
        name = plain_name(view.reader, int(staying[0]))
        warnings.append(
            f"{name} is the only client left: the model is made from its data alone and may reveal them to its users"
        )
    if staying.size < LEAST_MASKED and MASKED_STATISTICS in outside:
        warnings.append(
            f"{count}, and a masked sum needs {LEAST_MASKED}: the head cannot be solved again until another client "
            f"joins, or the server is started with {unmasked_setting(view.spec.data.name)} and then sees each client's "
            "statistics"
        )
    elif staying.size < LEAST_MASKED and any(what.startswith(DROPPED_MASKED_ROUND) for what in outside):
        warnings.append(
            f"{count}, and a masked round needs {LEAST_MASKED}: no round can run until another client joins"
        )
    return tuple(warnings)
