"""Runs trained in rounds: their training, the rounds they still owe, and the models that requests affect."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from sifu.core.engine import Engine
from sifu.core.spec import StopSpec
from sifu.run.group_state import are_separate
from sifu.run.owed_rounds import owed_rounds
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
        """Return the training that adds clients the current model lacks; None if there is nothing to do.

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
        """Record the events that follow the separate rounds of groups; by default none."""

    def owed_stop(self) -> StopSpec | None:
        """Return the stop rule of rounds owed to clients whose request was refused or withdrawn; None if none are."""
        owed = owed_rounds(self.view)[0] if self.view.reader.phase == "ready" else 0
        before = self.view.path.nodes[-1].position
        return replace(self.view.spec.stop, target=0.0, min_rounds=0, max_rounds=before + owed) if owed else None

    def release_stop(self) -> StopSpec | None:
        """Return the stop rule of the training that a release needs; None if the model is up to date."""
        return self.owed_stop()

    def returning(self, engine: Engine, writer: RunWriter) -> Collection[int]:
        """Return the clients that the next release contains again, or for the first time."""
        return owed_rounds(self.view)[1]

    def networks_among(self, models: Collection[int]) -> set[int]:
        """Return the stored models that compute features, so that statistics depend on them."""
        return set()
