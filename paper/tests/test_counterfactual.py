"""Executed counterfactuals: distances within the bound, and violations by the paper's accounting."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sifu.core.engine import Position
from sifu.core.spec import Spec
from sifu.run.clients_and_engine import clients_from_spec, engine_from_spec
from sifu_paper.counterfactual import Measured, measure_distances


def engine_of(participation: str, seed: int = 3, clients=None):
    spec = Spec.from_mapping(
        {
            "seed": seed,
            "data": {"clients": 30, "samples_per_client": 12, "partition": "one_class"},
            "local": {"steps": 5},
            "server": {"participation": participation},
        }
    )
    return engine_from_spec(spec, clients or clients_from_spec(spec))[0], spec


def measured(engine, clients: list[int], rounds: int = 25) -> list[Measured]:
    return [distance for _, distances in measure_distances(engine, clients, rounds) for distance in distances]


@pytest.mark.parametrize("participation", ["all", "fixed(4)", "poisson(0.2)"])
def test_the_honest_bound_holds_in_every_round(participation: str) -> None:
    distances = measured(engine_of(participation)[0], [0, 7, 29])
    assert len(distances) == 75
    assert all(row.distance <= row.psi_round for row in distances)
    assert any(row.distance > 0.2 * row.psi_round for row in distances)  # and the bound is not trivial


def test_the_population_bound_is_broken_where_few_take_part() -> None:
    distances = measured(engine_of("fixed(3)")[0], list(range(0, 30, 3)), 30)
    assert any(row.distance > row.psi_population for row in distances)


def test_the_absent_clients_data_do_not_matter_and_its_slot_is_not_refilled() -> None:
    engine, spec = engine_of("fixed(4)")
    clients = clients_from_spec(spec)
    everyone, absent = np.arange(30), np.array([5])
    position = next(
        Position(0, k)
        for k in range(200)
        if 5 in engine.run_round(engine.initial_model(0), Position(0, k), everyone).participants
    )
    changed = tuple(replace(client, y=(client.y + 1) % 10) if k == 5 else client for k, client in enumerate(clients))
    other, _ = engine_of("fixed(4)", clients=changed)
    model = engine.initial_model(0)
    without = engine.run_round(model, position, everyone, absent=absent)
    assert without.participants.size == 3
    assert np.array_equal(without.model, other.run_round(model, position, everyone, absent=absent).model)
    assert not np.array_equal(
        engine.run_round(model, position, everyone).model, other.run_round(model, position, everyone).model
    )


def test_whoever_never_takes_part_is_at_distance_zero() -> None:
    engine, _ = engine_of("fixed(2)")
    part = {
        int(k)
        for n in range(3)
        for k in engine.run_round(engine.initial_model(0), Position(0, n), np.arange(30)).participants
    }
    never = next(k for k in range(30) if k not in part)
    assert all((row.distance, row.psi_round) == (0.0, 0.0) for row in measured(engine, [never], 3))
