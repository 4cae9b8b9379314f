"""Small federations whose groups tune a public network separately, and readers of their runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import sifu
import sifu_verifier
from sifu.api import verify_run
from sifu.core.closed_form_engine import recorded_blocks, recorded_fixed_point
from sifu.core.spec import Spec
from sifu.data.client_data import ClientData
from sifu.store.reader import RunReader
from sifu.store.statistics_files import read_statistics
from sifu.theory.closed_form import Statistics
from sifu.theory.merging import group_of

CLIENTS, GROUPS = 7, 3


def spec_of(**sections: Any) -> dict[str, Any]:
    sifu.allow_code("public_backbone:make")
    spec: dict[str, Any] = {
        "model": {"kind": "ridge", "outputs": 3},
        "data": {"preprocessing": "fixed"},
        "ridge": {"regularisation": 0.01},
        "features": {"kind": "module", "module": "public_backbone:make", "tune": "blocks", "block": 4},
        "groups": {"count": GROUPS, "rounds": 2, "rebuild": "later"},
        "local": {"rate": 0.05, "steps": 2, "momentum": 0.9},
        "privacy": {"noise": "seeded"},
    }
    return {name: spec.get(name, {}) | sections.get(name, {}) for name in spec.keys() | sections.keys()}


def clients_of(count: int = CLIENTS) -> list[ClientData]:
    """Return clients of different sizes, each with its own generator."""
    clients = []
    for number in range(count):
        generator = np.random.default_rng(number)
        rows = 6 + number % 3
        x = generator.random((rows, 1, 8, 8))
        clients.append(ClientData(f"client-{number:03d}", x, generator.integers(0, 3, rows)))
    return clients


def without(clients: Sequence[ClientData], names: Sequence[str]) -> list[ClientData]:
    return [client for client in clients if client.name not in names]


def whole_sum(folder: Path) -> Statistics:
    with RunReader(folder) as reader:
        fixed = recorded_fixed_point(Spec.from_mapping(reader.spec), reader.layout)
        (row,) = [row for row in reader.statistics().values() if row.is_sum]
        return read_statistics(folder, row, fixed)


def released(folder: Path) -> np.ndarray:
    with RunReader(folder) as reader:
        return np.array(reader.load_model(reader.tip))


def groups_of(folder: Path, names: Sequence[str]) -> set[int]:
    with RunReader(folder) as reader:
        return {group_of(bytes.fromhex(reader.value("group_key")), name, GROUPS) for name in names}


def blocks_of(folder: Path) -> Any:
    with RunReader(folder) as reader:
        return recorded_blocks(Spec.from_mapping(reader.spec), reader.layout)


def check(folder: Path) -> None:
    assert verify_run(folder).problems == []
    assert sifu_verifier.verify(folder) == []


def open_own(folder: Path, clients: Sequence[ClientData] | None = None) -> sifu.Run:
    sifu.allow_code("public_backbone:make")
    return sifu.open_run(folder, clients=clients_of() if clients is None else clients)
