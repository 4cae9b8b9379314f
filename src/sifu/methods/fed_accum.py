"""FedAccum: the stored updates of the remaining clients, added up again from the initial model.

    theta' = theta + g sum_i w_i U_i        for every kept round, w_i the weights of its remaining participants

FedEraser without its calibration: no client does anything for it, so it takes no rounds. Then training goes on without
the clients. A heuristic: the stored updates were made from models that held the forgotten clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from sifu.core.certificate import Protection
from sifu.core.engine import Engine
from sifu.core.premises import Premise
from sifu.core.rollback import Exposure
from sifu.core.terms import RequestTerms
from sifu.methods.method import Method, RoundUpdates, Start, StartsFrom, heuristic_premises
from sifu.methods.plan import Plan
from sifu.methods.replay import (
    check_replayable,
    clients_gone,
    initial_model,
    load,
    move,
    plan_replay,
    rounds_to_replay,
    stored_bytes,
)
from sifu.methods.view import RunView


class FedAccum(Method):
    """Replay without calibration."""

    name: ClassVar[str] = "fed_accum"
    summary: ClassVar[str] = "add the kept updates of the others up again from the initial model; proves nothing"
    certifies: ClassVar[bool] = False
    protection: ClassVar[Protection] = "nothing"
    starts_from: ClassVar[StartsFrom] = "initial"

    def check_run(self, view: RunView) -> None:
        """Refuse a run without stored updates, and one whose updates would break a certificate."""
        check_replayable(view, self.name)

    def plan(self, view: RunView, terms: RequestTerms) -> Plan:
        """From the initial model through every kept round."""
        return plan_replay(self, view, terms, "the updates of {rounds} kept rounds are added up again")

    def premises(
        self,
        view: RunView,
        clients: Sequence[int],
        exposures: Sequence[Exposure],
        depth: int,
        terms: RequestTerms,
    ) -> tuple[Premise, ...]:
        """That it is a heuristic decides everything."""
        return heuristic_premises(view, clients, self.name)

    def bytes_kept(self, view: RunView) -> int:
        """The stored updates."""
        return stored_bytes(view)

    def starting_model(self, view: RunView, plan: Plan, engine: Engine) -> Start:
        """The sum; the updates that went into it stay for the next request."""
        kept = rounds_to_replay(view.stored_updates, clients_gone(view, plan.terms))
        model = initial_model(view).astype(np.float64)
        replayed = []
        for one in kept:
            updates = RoundUpdates(one.clients, load(view, one))
            model = move(view, model, updates)
            replayed.append(updates)
        return Start(model.astype(engine.layout.dtype), replayed=tuple(replayed))
