"""Replay of stored updates from the initial model, which FedAccum and FedEraser share.

Every kept round adds the weighted mean of its remaining participants' updates; rounds that were not kept are skipped.
The updates were made from models that the forgotten clients had moved, so nothing bounds anyone's influence.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sifu_paper.history import History
from sifu_paper.running import State
from sifu_paper.training import DivergedError

Kept = tuple[np.ndarray, np.ndarray]
"""Participants of a kept round, and their updates."""


def remaining_updates(state: State) -> Iterator[Kept]:
    """Yield every kept round without the forgotten clients, if somebody else took part in it."""
    for clients, updates in state.history.updates:
        stays = ~np.isin(clients, state.forgotten)
        if stays.any():
            yield clients[stays], updates[stays]


def moved(state: State, model: np.ndarray, clients: np.ndarray, updates: np.ndarray) -> np.ndarray:
    """Return a model after the weighted mean of some updates."""
    samples = state.trainer.federation.samples[clients]
    new: np.ndarray = model + samples @ updates.astype(np.float64) / samples.sum()
    if not np.isfinite(new).all():
        raise DivergedError("a replayed round has NaN or Inf")
    return new


def start_from(state: State, model: np.ndarray, updates: list[Kept]) -> None:
    """Go on from a replayed model, with the updates that it was made of."""
    initial = state.history.kept[0]
    state.history = History.from_model(model.astype(np.float32), len(state.trainer.federation.y), state.history.levels)
    state.history.kept[0], state.history.updates = initial, updates
