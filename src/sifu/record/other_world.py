"""An engine of the world that never had some clients, spoken to by the numbers that clients have in the run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import numpy as np

from sifu.core.closed_form_engine import StatisticsEngine
from sifu.core.engine import Engine, Position, Rejection, RoundResult
from sifu.core.layout import Vector
from sifu.theory.closed_form import FixedPoint, Statistics, total
from sifu.theory.participation import ClientIndices


class EngineWithout:
    """An `engine` that was given the data of the clients `there` and of nobody else; others are left out of a round."""

    def __init__(self, engine: Engine, there: ClientIndices) -> None:
        self._engine, self._there = engine, there
        self.layout, self.facts, self.clients = engine.layout, engine.facts, engine.clients

    def initial_model(self, branch: int) -> Vector:
        """A fresh model of that world."""
        return self._engine.initial_model(branch)

    def run_round(self, model: Vector, position: Position, active: ClientIndices) -> RoundResult:
        """One round among those of the `active` clients that are there."""
        result = self._engine.run_round(model, position, self._places(active))
        return replace(result, participants=self._there[result.participants])

    @property
    def fixed(self) -> FixedPoint:
        """What statistics of a head in closed form are counted in."""
        return cast("StatisticsEngine", self._engine).fixed

    def sum_of(self, clients: ClientIndices) -> Statistics:
        """The sum of the statistics of those of `clients` that are there."""

        def parts() -> Iterator[Statistics]:
            for _, sent in cast("StatisticsEngine", self._engine).collect(
                self._places(clients).tolist(), Position(0, 0)
            ):
                if sent is not None and not isinstance(sent, Rejection):
                    yield sent

        return total(self.fixed, parts())

    def _places(self, clients: ClientIndices) -> ClientIndices:
        return np.flatnonzero(np.isin(self._there, clients))
