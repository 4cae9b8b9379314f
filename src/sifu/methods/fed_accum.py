"""FedAccum: the stored updates of the remaining clients, added up again from the initial model.

    theta' = theta + g sum_i w_i U_i        for every kept round, w_i the weights of its remaining participants

FedEraser without its calibration: no client does anything for it, so it takes no rounds. Then training goes on without
the clients. A heuristic: the stored updates were made from models that held the forgotten clients.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from sifu.core.engine import Engine
from sifu.core.method_info import METHOD_INFOS, MethodInfo
from sifu.methods.base import Start
from sifu.methods.stored_updates import Replaying, clients_gone, initial_model, load, move, rounds_to_replay
from sifu.planning.plan import Plan
from sifu.record.run_view import RunView


class FedAccum(Replaying):
    """Replay without calibration."""

    info: ClassVar[MethodInfo] = METHOD_INFOS["fed_accum"]
    note: ClassVar[str] = "the updates of {rounds} kept rounds are added up again"

    def starting_model(self, view: RunView, plan: Plan, engine: Engine) -> Start:
        """The sum; the updates that went into it stay for the next request."""
        kept = rounds_to_replay(view.stored_updates, clients_gone(view, plan.terms))
        model = initial_model(view).astype(np.float64)
        replayed = []
        for kept_round in kept:
            updates = load(view, kept_round)
            model = move(view, model, updates)
            replayed.append(updates)
        return Start(model.astype(engine.layout.dtype), replayed=tuple(replayed))
