"""Behaviour of runs that depends on their record, one class per regime (`sifu.core.spec.regime`)."""

from __future__ import annotations

from collections.abc import Collection
from typing import cast

from sifu.core.closed_form_engine import StatisticsEngine
from sifu.core.engine import Engine
from sifu.core.spec import StopSpec
from sifu.core.spec.regime import ClosedForm, Groups, Regime, by_regime
from sifu.run.closed_form_round import RecordedSolve
from sifu.run.group_state import are_separate
from sifu.run.group_training import record_first_merge
from sifu.run.run_view import RunView
from sifu.run.training import RecordedTraining
from sifu.store.writer import RunWriter


class RunInRounds:
    """Behaviour of a run of one regime; this class implements training in rounds, and other regimes extend it."""

    def __init__(self, view: RunView) -> None:
        self.view = view

    def training(self, engine: Engine, writer: RunWriter, stop: StopSpec | None = None) -> RecordedTraining:
        """Return the recorded training that continues the run until the stop rule holds."""
        return RecordedTraining(engine, writer, self.view, stop)

    def completion(self, engine: Engine, writer: RunWriter, tried: set[int]) -> RecordedTraining | None:
        """Return the training that adds reachable clients the current model lacks, or None if there are none.

        Args:
            engine: Engine of the run.
            writer: Writer of the run.
            tried: Clients that were asked before; updated with the clients that are asked now.
        """
        return None

    def are_separate(self) -> bool:
        """Return whether groups have yet to finish the rounds that they train separately."""
        return are_separate(self.view)

    def after_groups(self, writer: RunWriter) -> None:
        """Record the events that follow the separate rounds of groups, by default none."""

    def release_stop(self) -> StopSpec | None:
        """Return the stop rule of the training that a release needs, or None if the model is up to date."""
        return None

    def returning(self, engine: Engine, writer: RunWriter) -> Collection[int]:
        """Return the clients that the next release contains and the current model lacks."""
        return ()


class RunInGroups(RunInRounds):
    """Behaviour of a run whose groups train separately at first; common rounds follow the merge of their models."""

    def after_groups(self, writer: RunWriter) -> None:
        """Merge the groups' models."""
        record_first_merge(writer, RunView(writer))


class RunInClosedForm(RunInRounds):
    """Behaviour of a run whose head is solved from statistics: a round is a solve."""

    def training(self, engine: Engine, writer: RunWriter, stop: StopSpec | None = None) -> RecordedSolve:
        """Return the solve for the head of the active clients."""
        return RecordedSolve(engine, writer, self.view, stop)

    def completion(self, engine: Engine, writer: RunWriter, tried: set[int]) -> RecordedSolve | None:
        """Return a solve with reachable clients that the head lacks, or None if there are none.

        Each client is tried once; a client that reconnects is tried again.

        Args:
            engine: Engine of the run.
            writer: Writer of the run.
            tried: Clients that were asked before; updated with the clients that are asked now.
        """
        solve = self.training(engine, writer)
        there = set(cast("StatisticsEngine", engine).reachable(sorted(solve.missing())))
        tried &= there
        if there <= tried:
            return None
        tried |= there
        return solve

    def release_stop(self) -> StopSpec | None:
        """Return the stop rule of a solve, which is skipped if the head already covers exactly the active clients."""
        return self.view.spec.stop

    def returning(self, engine: Engine, writer: RunWriter) -> Collection[int]:
        """Return the active clients that the current head lacks."""
        return self.training(engine, writer).missing()


BEHAVIOURS: dict[type[Regime], type[RunInRounds]] = {
    Regime: RunInRounds,
    Groups: RunInGroups,
    ClosedForm: RunInClosedForm,
}


def behaviour_of(view: RunView) -> RunInRounds:
    """Return the behaviour of a run."""
    return by_regime(BEHAVIOURS, view.regime)(view)
