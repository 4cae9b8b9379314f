"""Runs of heads on networks that groups tune: the networks stay separate, and a head combines them."""

from __future__ import annotations

from collections.abc import Collection

from sifu.run.group_state import groups_to_build
from sifu.run.regimes.closed_form import RunInClosedForm


class RunOnTunedNetworks(RunInClosedForm):
    """Behaviour of a run whose head is solved on networks that groups tune."""

    def are_separate(self) -> bool:
        """Return whether groups have yet to finish tuning and no head was solved yet."""
        solved = any(row.node.kind == "round" for row in self.view.reader.nodes_by_number().values())
        return not solved and bool(groups_to_build(self.view))

    def networks_among(self, models: Collection[int]) -> set[int]:
        """Return the stored models that groups tuned."""
        return set(models) & self.view.reader.group_models().keys()
