"""Heads in closed form and groups on Flower's simulation runtime, with separate processes for the clients."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from flower_federation import small_spec

from sifu.core.engine import Position, run_group_rounds
from sifu.run.clients_and_engine import clients_from_spec, engine_from_spec
from sifu.theory.closed_form import total
from sifu_paper.flower_simulation import enter_federation, simulate

WITH_RAY = importlib.util.find_spec("ray") is not None
PLACE = Position(0, 0)
GROUPS = [np.array([0, 2, 4]), np.array([1, 3, 5])]


@pytest.mark.flower
@pytest.mark.skipif(not WITH_RAY, reason="Flower's simulation is not installed")
def test_masked_heads_and_groups_have_the_bits_of_the_embedded_engine(tmp_path: Path) -> None:
    head = small_spec(
        data={"clients": 6},
        model={"kind": "ridge", "outputs": 10},
        features={"kind": "random_fourier", "count": 16, "bandwidth": 3.0},
    )
    softmax = small_spec(data={"clients": 6}, local={"rate": 0.1})
    results: dict[str, object] = {}

    def serve(grid: object) -> None:
        engine = enter_federation(grid, tmp_path, head, clients_from_spec(head), "fixed constants")  # type: ignore
        results["all"] = engine.collect_sum(range(6), PLACE)  # type: ignore[attr-defined]
        results["without"] = engine.collect_sum([0, 1, 3, 4, 5], Position(1, 0))  # type: ignore[attr-defined]
        engine = enter_federation(grid, tmp_path, softmax, clients_from_spec(softmax), "fixed constants")  # type: ignore
        models = [engine.initial_model(0)] * 2
        for number in range(2):
            models = [done.model for done in run_group_rounds(engine, models, Position(0, number), GROUPS)]
        results["groups"] = models

    simulate(tmp_path, 6, serve)  # type: ignore[arg-type]
    embedded, _ = engine_from_spec(head, clients_from_spec(head))
    parts = dict(embedded.collect(range(6), PLACE))  # type: ignore[attr-defined]
    for name, clients in (("all", range(6)), ("without", [0, 1, 3, 4, 5])):
        expected = total(embedded.fixed, (parts[client] for client in clients))  # type: ignore[attr-defined]
        assert results[name].statistics.digest() == expected.digest()  # type: ignore[attr-defined]
    embedded, _ = engine_from_spec(softmax, clients_from_spec(softmax))
    models = [embedded.initial_model(0)] * 2
    for number in range(2):
        models = [done.model for done in run_group_rounds(embedded, models, Position(0, number), GROUPS)]
    np.testing.assert_allclose(results["groups"], models, rtol=0, atol=1e-12)  # type: ignore[arg-type]
