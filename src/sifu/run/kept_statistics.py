"""Engine that works from the clients' stored statistics; it needs neither their data nor a training library."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from sifu.core.closed_form_engine import recorded_fixed_point
from sifu.core.engine import Evaluation, LacksData, Position, RoundResult
from sifu.core.layout import ModelLayout, Vector
from sifu.core.spec import Spec
from sifu.errors import InputError
from sifu.run.run_view import RunView
from sifu.store.statistics_files import OwnStatistics
from sifu.theory.closed_form import Statistics
from sifu.theory.facts import ClientProfile, TrainingFacts
from sifu.theory.participation import ClientIndices


def own_statistics(view: RunView) -> OwnStatistics:
    """Return the clients' stored statistics."""
    reader = view.reader
    return OwnStatistics.among(reader.statistics().values(), recorded_fixed_point(view.spec, reader.layout))


class KeptStatistics(LacksData):
    """`Engine` and `StatisticsEngine` of the recorded clients, without their data."""

    def __init__(self, clients: Sequence[ClientProfile], facts: TrainingFacts, layout: ModelLayout, spec: Spec) -> None:
        self.clients, self.facts, self.layout = tuple(clients), facts, layout
        self.fixed = recorded_fixed_point(spec, layout)
        self.absent = frozenset(range(len(self.clients)))

    def initial_model(self, branch: int) -> Vector:
        """Return a model of zeros."""
        return np.zeros(self.layout.size)

    def reachable(self, clients: Sequence[int]) -> list[int]:
        """Return an empty list: no client can be reached."""
        return []

    def collect(self, clients: Sequence[int], position: Position) -> Iterator[tuple[int, Statistics]]:
        """Raise an error if `clients` is not empty, because no client can be asked; otherwise return no statistics."""
        for client in clients:
            raise self._gone(client)
        return iter(())

    def run_round(self, model: Vector, position: Position, active: ClientIndices) -> RoundResult:
        """Raise an error, because a round needs data."""
        raise self._gone(int(active[0]))

    def evaluate(self, model: Vector, clients: ClientIndices) -> Evaluation:
        """Return an evaluation without samples."""
        count = len(clients)
        return Evaluation(clients, np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(count))

    def _gone(self, client: int) -> InputError:
        return InputError(
            f"the data of client {self.clients[client].name!r} are missing, and its statistics are not stored"
        )
