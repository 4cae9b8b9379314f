"""Runs of closed-form heads: a round is a solve, and no rounds are owed."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

from sifu.core.closed_form_engine import StatisticsEngine
from sifu.core.engine import Engine
from sifu.core.spec import StopSpec
from sifu.run.closed_form_round import RecordedSolve
from sifu.run.regimes.rounds import RunInRounds
from sifu.store.writer import RunWriter


class RunInClosedForm(RunInRounds):
    """Behaviour of a run whose head is solved from statistics."""

    def training(self, engine: Engine, writer: RunWriter, stop: StopSpec | None = None) -> RecordedSolve:
        """Return the solve for the head of the active clients."""
        return RecordedSolve(engine, writer, self.view, stop)

    def completion(self, engine: Engine, writer: RunWriter, tried: set[int]) -> RecordedSolve | None:
        """Return a solve with reachable clients that the head lacks; None if there is nothing to do.

        Each client is tried once; a client that reconnects is tried again.
        """
        solve = self.training(engine, writer)
        there = set(cast("StatisticsEngine", engine).reachable(sorted(solve.missing())))
        tried &= there
        if there <= tried and not solve.lacks_networks():
            return None
        tried |= there
        return solve

    def owed_stop(self) -> StopSpec | None:
        """Return None: a closed-form head owes no rounds."""
        return None

    def release_stop(self) -> StopSpec | None:
        """Return the stop rule of a solve, which is skipped if the head already covers exactly the active clients."""
        return self.view.spec.stop

    def returning(self, engine: Engine, writer: RunWriter) -> Collection[int]:
        """Return the active clients that the current head lacks."""
        return self.training(engine, writer).missing()
