"""FedEraser (Liu et al. 2021): replay with lengths from stored updates and directions from new training.

In each kept round the remaining participants take half of the local steps from the calibrated model, which gives d_i;
||U_i|| d_i / ||d_i|| replaces the stored update U_i, also for later requests. It proves nothing.
"""

from __future__ import annotations

import itertools

import numpy as np

from sifu_paper.methods.replay import Kept, moved, remaining_updates, start_from
from sifu_paper.running import State
from sifu_paper.training import PlainTrainer


def fed_eraser(state: State, most: int) -> int:
    """Replay the kept rounds, calibrated; each counts as a round."""
    trainer = state.trainer
    if not isinstance(trainer, PlainTrainer):
        raise TypeError("FedEraser needs clients' updates, which only the plain loop hands out")
    steps = max(1, state.settings.steps // 2)
    model = state.history.kept[0].astype(float)
    replayed: list[Kept] = []
    for number, (clients, updates) in enumerate(itertools.islice(remaining_updates(state), most)):
        directions = trainer.updates(model.astype(np.float32), (state.requests, number), clients, steps)
        lengths, norms = (np.linalg.norm(rows.astype(float), axis=1) for rows in (updates, directions))
        scale = np.divide(
            lengths, norms, out=np.zeros_like(norms), where=norms > 0.0
        )  # who does not move, moves nothing
        calibrated = (scale[:, None] * directions).astype(np.float32)
        model = moved(state, model, clients, calibrated)
        replayed.append((clients, calibrated))
    start_from(state, model, replayed)
    return len(replayed)
