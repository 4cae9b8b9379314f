"""FedAccum: add the stored updates of the remaining clients up again, from the initial model. It proves nothing."""

from __future__ import annotations

from sifu_paper.methods.replay import moved, remaining_updates, start_from
from sifu_paper.running import State


def fed_accum(state: State, most: int) -> int:
    """Replay the kept rounds as they were: no client works for it, so it takes no rounds."""
    kept = list(remaining_updates(state))
    model = state.history.kept[0].astype(float)
    for clients, updates in kept:
        model = moved(state, model, clients, updates)
    start_from(state, model, kept)
    return 0
