"""The level that follows from the premises, and from nothing else (docs/theory.md, section 12.2)."""

from __future__ import annotations

from collections.abc import Sequence

from sifu.choices import Level
from sifu.core.premises.premise import Premise

FRESH_START = (
    "preprocessing", "features", "hyper-parameters", "method", "identity", "grouping", "rounds apart", "initial model",
    "noise size", "engine", "layout",
)  # fmt: skip
"""The premises that matter even for a fresh model: what came before training, what it starts from, whether the method
proves anything at all, and whether a client is who it says it is."""

BITS = ("layout",)
"""The premises that matter only where no noise hides the last bits: bounds on rounding hold for any layout."""

ON_THE_PATH = ("counterfactual", "replies", "schedule", "record")
"""The premises that matter for a model that was trained before, even if the client has no part in it: without the
client other rounds might have counted."""


def premises_that_count(premises: Sequence[Premise], *, exact: bool, fresh: bool) -> list[Premise]:
    """The premises that a level rests on: all but those on bits, unless no forgotten client has a part in the model."""
    if not exact:
        return [premise for premise in premises if premise.name not in BITS]
    names = FRESH_START if fresh else FRESH_START + ON_THE_PATH
    return [premise for premise in premises if premise.name in names]


def level_of(premises: Sequence[Premise], *, exact: bool, fresh: bool = False) -> Level:
    """The level that the premises allow.

    `exact` says that no forgotten client has a part in the model training goes on from. `fresh` says that it is a new
    initial model; one that was trained before also rests on which rounds counted (docs/theory.md, section 12.2).
    """
    statuses = {premise.status for premise in premises_that_count(premises, exact=exact, fresh=fresh)}
    if "failed" in statuses:
        return "none"
    if "assumed" in statuses:
        return "conditional"
    return "exact" if exact else "proven"
