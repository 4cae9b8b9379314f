"""Runs that train a network of `shared_state_modules`: frozen below a head, or given as the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import sifu
from shared_state_modules import Network
from sifu.data.client_data import ClientData
from sifu.store.reader import RunReader


def clients_of() -> list[ClientData]:
    """Return five clients, the last one with the largest samples, one with seven rows."""
    clients = []
    for number in range(5):
        generator, rows = np.random.default_rng(number), 5 + number % 3
        x = (3.0 if number == 4 else 1.0) * generator.random((rows, 1, 8, 8))
        clients.append(ClientData(f"client-{number}", x, generator.integers(0, 3, rows)))
    return clients


HEAD: dict[str, Any] = {
    "model": {"kind": "ridge", "outputs": 3},
    "data": {"preprocessing": "fixed"},
    "ridge": {"regularisation": 0.01},
    "features": {"kind": "module", "module": "stateful_modules:make"},
}


def frozen(folder: Path) -> sifu.Run:
    sifu.allow_code("stateful_modules:make")
    return sifu.train(HEAD, run=folder / "run", clients=clients_of())


OWN: dict[str, Any] = {
    "data": {"preprocessing": "fixed"},
    "local": {"rate": 0.1, "steps": 2},
    "regularity": {"kind": "assumed"},
    "stop": {"max_rounds": 2, "target": 0.0},
}


def own_model(factor: Callable[..., float], folder: Path, without: str = "") -> sifu.Run:
    clients = {client.name: (client.x, client.y) for client in clients_of() if client.name != without}
    return sifu.train(OWN, run=folder / "run", model=lambda: Network(factor), clients=clients)


def released(folder: Path) -> np.ndarray:
    with RunReader(folder) as reader:
        return np.array(reader.load_model(reader.tip))
