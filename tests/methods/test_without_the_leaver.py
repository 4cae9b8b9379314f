"""Accepted modules with state, against a federation that the leaver never belonged to.

The other federation has fewer clients and fewer samples, and the clients after the leaver have other indices. Networks
of groups without the leaver, heads on frozen features and models trained from scratch must have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sifu
import stateful_modules
from sifu.data.client_data import ClientData
from sifu.store.reader import RunReader
from stateful_modules import Kind

SEED = 1
HEAD: dict[str, Any] = {
    "model": {"kind": "ridge", "outputs": 3},
    "data": {"preprocessing": "fixed"},
    "ridge": {"regularisation": 0.01},
    "features": {"kind": "module", "module": "stateful_modules:make"},
    "privacy": {"noise": "seeded"},
    "seed": SEED,
}
OWN: dict[str, Any] = {
    "data": {"preprocessing": "fixed"},
    "local": {"rate": 0.1, "steps": 3, "momentum": 0.9},
    "regularity": {"kind": "assumed"},
    "stop": {"max_rounds": 2, "target": 0.0},
}


def clients_of(leaver: int, count: int = 5, seed: int = 0) -> list[ClientData]:
    """Return clients of 5 to 7 samples; the leaver has 40 samples, the largest ones."""
    clients = []
    for number in range(count):
        generator, rows = np.random.default_rng([seed, number]), 40 if number == leaver else 5 + number % 3
        x = (3.0 if number == leaver else 1.0) * generator.random((rows, 1, 8, 8))
        clients.append(ClientData(f"client-{number}", x, np.arange(rows) % 3))
    return clients


def released(folder: Path) -> bytes:
    with RunReader(folder) as reader:
        return reader.load_model(reader.tip).tobytes()


@pytest.mark.parametrize("leaver", [0, 2])
def test_a_head_on_frozen_features_is_that_of_the_others_alone(leaver: int, tmp_path: Path) -> None:
    stateful_modules.choose(Kind("attribute", "training", "bank"))
    sifu.allow_code("stateful_modules:make")
    clients = clients_of(leaver)
    run = sifu.train(HEAD, run=tmp_path / "run", clients=clients)
    (outcome,) = run.forget([f"client-{leaver}"], "gone")
    assert outcome.level == "exact"
    sifu.train(HEAD, run=tmp_path / "never", clients=clients[:leaver] + clients[leaver + 1 :])
    assert released(tmp_path / "run") == released(tmp_path / "never")


class Remembering(nn.Module):
    """Linear model with memory in an attribute, a late buffer, a closure or an attribute of a parameter."""

    def __init__(self, place: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer, self.place, self.held = nn.Linear(64, 3), place, [0.0]
        held = 0.0

        def largest(value: float) -> float:
            nonlocal held
            held = max(held, value)
            return held

        self.largest = largest

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores, divided by a function of the largest sample so far."""
        value = float(x.max())
        if self.place == "attribute":
            self.held.append(value)
            value = max(self.held)
        elif self.place == "closure":
            value = self.largest(value)
        elif self.place == "buffer":
            self.register_buffer("late", torch.as_tensor(max(float(getattr(self, "late", 0.0)), value)))
            value = float(self.late)  # type: ignore[arg-type]
        elif self.place == "parameter":
            value = self.layer.weight.largest = max(getattr(self.layer.weight, "largest", 0.0), value)  # type: ignore[assignment]
        scores: Tensor = self.layer(x.flatten(1))
        return scores / (1.0 + value)


@pytest.mark.parametrize("leaver", [0, 2])
@pytest.mark.parametrize("place", ["attribute", "closure", "buffer", "parameter"])
def test_a_model_from_scratch_is_that_of_the_others_alone(place: str, leaver: int, tmp_path: Path) -> None:
    clients = {client.name: (client.x, client.y) for client in clients_of(leaver)}
    make: Callable[[], nn.Module] = lambda: Remembering(place)  # noqa: E731
    run = sifu.train(OWN, run=tmp_path / "run", model=make, clients=clients)
    (outcome,) = run.forget([f"client-{leaver}"], "gone", method="scratch")
    assert outcome.level == "exact"
    del clients[f"client-{leaver}"]
    sifu.train(OWN, run=tmp_path / "never", model=make, clients=clients)
    assert released(tmp_path / "run") == released(tmp_path / "never")
