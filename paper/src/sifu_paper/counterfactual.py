"""Execution of the counterfactual behind Psi: the same schedule, one client absent, its slots not refilled.

Training with everyone and training without the client start from the same model and use the same draws; the second
leaves the client out after the draw. Then ||theta^n - phi^n|| can be compared with Psi(n, c) round by round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sifu.core.engine import Engine, Position, RoundResult
from sifu.core.layout import Vector
from sifu.theory.participation import ClientIndices
from sifu.theory.tracking import SensitivityTracker, summarise_round


class ReplayingEngine(Engine, Protocol):
    """Engine that can leave clients out of a round after the draw."""

    def run_round(
        self,
        model: Vector,
        position: Position,
        active: ClientIndices,
        *,
        want_gram: bool = False,
        want_updates: bool = False,
        absent: ClientIndices | None = None,
    ) -> RoundResult: ...


@dataclass(frozen=True)
class Measured:
    """True distance and two bounds after some rounds, for one removed client."""

    client: int
    round: int
    distance: float
    psi_round: float
    psi_population: float


def measure_distances(
    engine: ReplayingEngine, clients: Sequence[int], rounds: int, every: int = 1, factor: float = 1.0
) -> Iterator[tuple[Vector, list[Measured]]]:
    """Yield the model every few rounds, and each client's alpha = ||theta^n - phi^n|| and Psi by both accountings.

    `factor` is the assumed expansion B of a whole local training, 1 in the paper.
    """
    everyone = np.arange(len(engine.clients), dtype=np.int64)
    chosen = np.asarray(clients, dtype=np.int64)
    population = sum(client.samples for client in engine.clients)
    model = engine.initial_model(0)
    without = {int(client): model for client in chosen}
    by_round, by_population = (SensitivityTracker(len(engine.clients)) for _ in range(2))
    for start in range(rounds):
        position = Position(0, start)
        result = engine.run_round(model, position, everyone)
        for client, theirs in without.items():
            absent = np.array([client], dtype=np.int64)
            without[client] = engine.run_round(theirs, position, everyone, absent=absent).model
        model = result.model
        for tracker, weights in ((by_round, None), (by_population, population)):
            _, scalars = summarise_round(
                result.participants,
                result.samples,
                result.drifts,
                result.mean_shift,
                result.rounding,
                factors=np.full(result.participants.size, factor),
                averagedness=np.ones(result.participants.size),
                server_rate=engine.facts.server_rate,
                population_samples=weights,
            )
            tracker.update(scalars)
        if (start + 1) % every == 0 or start + 1 == rounds:
            exact = model.astype(np.float64)
            yield (
                model,
                [
                    Measured(
                        client,
                        start + 1,
                        float(np.linalg.norm(exact - theirs.astype(np.float64))),
                        float(by_round.total(np.array([client]))[0]),
                        float(by_population.total(np.array([client]))[0]),
                    )
                    for client, theirs in without.items()
                ],
            )
