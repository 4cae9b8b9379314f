"""Fixtures of kernels, which run on a GPU if there is one and in Triton's interpreter otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import suite_setup  # noqa: F401  before anything of ours is imported
from sifu.engines.sim import LocalTraining, ModuleModel, SimulatedFederation, SimulationSettings
from sifu.engines.sim.networks import ConvNet
from sifu.theory.participation import Participation


@dataclass(frozen=True)
class SomeClient:
    """Client with random data."""

    name: str
    x: np.ndarray
    y: np.ndarray


def some_clients(seed: int, count: int, samples: int, shape: tuple[int, ...], classes: int) -> tuple[SomeClient, ...]:
    """Return clients of unequal sizes: every second one has a sample less."""
    generator = np.random.default_rng(seed)
    clients = []
    for number in range(count):
        size = samples - number % 2
        x = generator.standard_normal((size, *shape))
        clients.append(SomeClient(f"c{number}", x, generator.integers(0, classes, size)))
    return tuple(clients)


@pytest.fixture
def make_federation() -> Callable[..., tuple[SimulatedFederation, tuple[SomeClient, ...]]]:
    """Return a function that makes a small federation of a ConvNet, with its data."""

    def make(
        model: ConvNet,
        *,
        seed: int = 1,
        clients: int = 4,
        samples: int = 5,
        participation: str = "fixed(2)",
        dtype: str = "float32",
        training: LocalTraining | None = None,
        **more: Any,
    ) -> tuple[SimulatedFederation, tuple[SomeClient, ...]]:
        training = training or LocalTraining(0.05, 2, 2, 0.9)
        data = some_clients(seed, clients, samples, model.input_shape, model.outputs)
        federation = SimulatedFederation(
            data,
            ModuleModel(model),
            training,
            SimulationSettings(participation=Participation.parse(participation), dtype=dtype, seed=seed, **more),
        )
        return federation, data

    return make
