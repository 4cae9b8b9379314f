"""Small federations with every irregularity that the engine must handle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from sifu.engines.sim import LocalTraining, SimulatedFederation, SimulationSettings
from sifu.theory.participation import Participation


@dataclass
class Client:
    name: str
    x: Any
    y: Any


def random_clients(
    kind: str, *, sizes: tuple[int, ...], features: int = 5, outputs: int = 3, seed: int = 0, scale: float = 1.0
) -> list[Client]:
    generator = np.random.default_rng(seed)
    clients = []
    for number, size in enumerate(sizes):
        x = scale * generator.standard_normal((size, features))
        if kind == "least_squares":
            y = generator.standard_normal((size, outputs))
        else:
            y = generator.integers(0, 2 if kind == "logistic" else outputs, size)
            # the highest class occurs, so every draw has the same number of classes
            y[0] = 1 if kind == "logistic" else outputs - 1
        clients.append(Client(f"client-{number}", x, y))
    return clients


@pytest.fixture
def make_clients() -> Callable[..., list[Client]]:
    return random_clients


@pytest.fixture
def make_federation() -> Callable[..., SimulatedFederation]:
    def make(
        kind: str = "softmax",
        *,
        sizes: tuple[int, ...] = (4, 7, 3, 12, 30),
        rate: float = 0.1,
        steps: int = 5,
        features: int = 5,
        outputs: int = 3,
        data_seed: int = 0,
        scale: float = 1.0,
        participation: str = "all",
        batch_size: int | None = None,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        model: Any = None,
        **options: Any,
    ) -> SimulatedFederation:
        clients = random_clients(kind, sizes=sizes, features=features, outputs=outputs, seed=data_seed, scale=scale)
        training = LocalTraining(rate, steps, batch_size, momentum, weight_decay)
        return SimulatedFederation(
            clients,
            model or kind,
            training,
            SimulationSettings(participation=Participation.parse(participation), **options),
        )

    return make
