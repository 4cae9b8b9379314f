"""Which engine a blueprint takes: rounds of training, or statistics that a head is solved from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sifu.engines.flower.blueprint import Blueprint, Patience
from sifu.engines.flower.engine import FlowerFederation
from sifu.engines.flower.roster import Roster
from sifu.engines.flower.statistics_engine import FlowerStatistics, MaskedFlowerStatistics

if TYPE_CHECKING:
    from flwr.serverapp import Grid


def make_federation(
    grid: Grid,
    roster: Roster,
    blueprint: Blueprint,
    patience: Patience | None = None,
    *,
    masked_updates: bool = False,
    masked_statistics: bool = True,
) -> FlowerFederation:
    """The engine of a blueprint; whether it sees single clients' updates or statistics."""
    if blueprint.head is None:
        return FlowerFederation(grid, roster, blueprint, patience, masked=masked_updates)
    statistics = MaskedFlowerStatistics if masked_statistics else FlowerStatistics
    return statistics(grid, roster, blueprint, patience)
