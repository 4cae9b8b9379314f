"""What a user can choose: words, and the terms of a request.

This module imports nothing, so that the command line answers at once; spec and mathematics share its words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

Unit = Literal["client", "joint"]
"""Whether a request covers each of its clients alone, or all of them together."""
Scope = Literal["all", "latest"]
"""Whether a budget covers every later release, or the latest one only."""
Calibration = Literal["exact", "classical"]
"""How noise follows from a budget (docs/theory.md, sections 7.1 and 7.2)."""
Retention = Literal["paper", "strict"]
"""Whether models from before the rollback are kept, or erased with the rest."""
Release = Literal["healed", "now"]
"""Whether a request is done when its model has come to its target, or with the model it starts from; rounds follow."""
Level = Literal["exact", "proven", "conditional", "none"]
"""What a certificate is worth, strongest first."""
LEVELS: tuple[Level, ...] = ("none", "conditional", "proven", "exact")
"""The same, weakest first: a level's place says how strong it is."""
Decision = Literal["verified", "approved", "refused", "withdrawn"]
"""What can be decided on a request that waits."""
Approval = Literal["none", "one", "two"]
"""How many people must approve a request before it is carried out."""
Decided = Literal["recorded", "unchanged", "posted"]
"""What became of a decision: in the ledger, there already, or in the inbox of a run that another process writes to."""
Device = Literal["auto", "cpu", "cuda"]
"""Where rounds are computed."""
Precision = Literal["float32", "tf32", "tf32x3"]
"""How networks compute on a GPU."""
SigmaChoice = float | Literal["auto"]
"""The noise of a request: a number, or auto to choose it from recorded scalars."""


class TermsGiven(TypedDict, total=False):
    """The terms a caller may give beside the clients; what is left out, or None, comes from the run's spec."""

    epsilon: float | None
    delta: float | None
    sigma: SigmaChoice | None
    unit: Unit | None
    scope: Scope | None
    calibration: Calibration | None
    retention: Retention | None
    reserve: float | None
    method: str | None
    min_level: Level | None
    max_rounds: int | None
    release: Release | None
    target: float | None
    records: Sequence[int] | None
