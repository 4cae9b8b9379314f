"""An engine of the world that never had some clients, by the run's client numbers, and unrecorded training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import numpy as np

from sifu.core.closed_form_engine import StatisticsEngine
from sifu.core.engine import Engine, Position, Rejection, RoundResult
from sifu.core.layout import Vector
from sifu.core.round_stream import RoundsWanted, is_evaluated, should_stop, stream_rounds
from sifu.core.spec import StopSpec
from sifu.record.training import Progress, ProgressCallback
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


def retrain_unrecorded(
    engine: Engine,
    active: ClientIndices,
    stop: StopSpec,
    branch: int,
    progress: ProgressCallback | None = None,
    start: Vector | None = None,
) -> tuple[Vector, int, float, bool]:
    """Training among `active`, recorded nowhere, from `start` or a fresh model: what Scratch would take.

    Returns the model, the rounds, the accuracy, and whether the target was reached.
    """
    first = engine.initial_model(branch) if start is None else start

    def fetch_model() -> Vector:
        return first

    rounds, accuracy = 0, math.nan
    evaluated = engine.evaluate(first, active).accuracy if is_evaluated(stop, 0) else None
    wanted = RoundsWanted(stop, first.astype(np.float64), accuracy=evaluated)
    stream = stream_rounds(engine, first, Position(branch, 0), active, wanted)
    while True:
        accuracy = accuracy if evaluated is None else evaluated
        if should_stop(stop, rounds, evaluated):
            return fetch_model(), rounds, accuracy, bool(stop.target > 0 and accuracy >= stop.target)
        done = next(stream)
        fetch_model, rounds = done.fetch_model, rounds + 1
        evaluated = done.evaluation.accuracy if done.evaluation is not None else None
        if progress:
            progress(Progress("Scratch", rounds, accuracy, stop.target, stop.max_rounds))
