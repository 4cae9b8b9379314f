"""FedEraser (Liu et al. 2021): replay kept rounds, new training for the direction, stored updates for the length.

In every kept round its remaining participants take K_cali local steps from the calibrated model, d_i, and

    U~_i = ||U_i|| d_i / ||d_i||,        theta' = theta + g sum_i w_i U~_i

with U_i the stored update and w_i the weights of the remaining participants. Rounds that were not kept are left out,
nothing makes up for them. The U~_i replace the stored updates, so that the next request can replay again. Then
training goes on without the clients. A heuristic: nothing is proven of what comes out.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from sifu.core.engine import Engine, Position
from sifu.core.method_info import METHOD_INFOS, MethodInfo
from sifu.methods.base import RoundUpdates, Start
from sifu.methods.stored_updates import Replaying, clients_gone, initial_model, load, move, rounds_to_replay
from sifu.planning.plan import Plan
from sifu.record.run_view import RunView


class FedEraser(Replaying):
    """Replay with calibration."""

    info: ClassVar[MethodInfo] = METHOD_INFOS["fed_eraser"]
    note: ClassVar[str] = "{rounds} kept rounds are replayed, each with a round of calibration"

    def starting_model(self, view: RunView, plan: Plan, engine: Engine) -> Start:
        """The calibrated model; every calibration round counts as one, with its local steps and its traffic."""
        kept = rounds_to_replay(view.stored_updates, clients_gone(view, plan.terms))
        kept = kept[: plan.terms.stop(view.spec.stop).max_rounds]
        steps = view.spec.local.calibration_steps or max(1, view.spec.local.steps // 2)
        dtype = engine.layout.dtype
        model = initial_model(view).astype(np.float64)
        replayed = []
        for number, kept_round in enumerate(kept):
            directions = engine.local_updates(
                model.astype(dtype), Position(plan.order, number), kept_round.clients, steps
            )
            directions = directions.astype(np.float64)
            lengths = np.linalg.norm(load(view, kept_round).values.astype(np.float64), axis=1)
            norms = np.linalg.norm(directions, axis=1)
            # A client that would not move at all gives no direction, so it does not move the model either.
            scale = np.divide(lengths, norms, out=np.zeros_like(norms), where=norms > 0.0)
            updates = RoundUpdates(kept_round.clients, (scale[:, None] * directions).astype(dtype))
            model = move(view, model, updates)
            replayed.append(updates)
        trained = sum(kept_round.clients.size for kept_round in kept)
        return Start(
            model.astype(dtype),
            rounds=len(kept),
            local_steps=trained * steps,
            bytes_sent=2 * trained * engine.layout.size * np.dtype(dtype).itemsize,
            replayed=tuple(replayed),
        )
