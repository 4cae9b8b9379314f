"""Runs whose clients train in groups first: their models are merged, and common rounds follow."""

from __future__ import annotations

from sifu.run.group_training import record_first_merge
from sifu.run.regimes.rounds import RunInRounds
from sifu.run.run_view import RunView
from sifu.store.writer import RunWriter


class RunInGroups(RunInRounds):
    """Behaviour of a run whose groups train separately at first."""

    def after_groups(self, writer: RunWriter) -> None:
        """Merge the groups' models."""
        record_first_merge(writer, RunView(writer))
