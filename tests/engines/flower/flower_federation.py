"""One seeded problem on the embedded engine and on Flower's messages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from flwr.app import Context
from memory_grid import MemoryGrid

from sifu.core.spec import Spec
from sifu.engines.flower.client import client_app
from sifu.engines.flower.exchange import ClaimedRoster, Patience
from sifu.engines.flower.flower_engine import FlowerFederation
from sifu.engines.flower.statistics_engine import make_federation
from sifu.engines.flower.wire import profile_message, read_profile
from sifu.engines.ready import ReadyClient, blueprint, plan_of
from sifu.run.clients_and_engine import clients_from_spec, engine_from_spec
from sifu.theory.facts import CLAIMED

HASTY = Patience(timeout=0.05, pause=0.0, poll=0.01)


def small_spec(**sections: object) -> Spec:
    """Return a spec with eight clients of a few digits each."""
    base = {
        "seed": 3,
        "data": {"clients": 8, "samples_per_client": 12},
        "model": {"outputs": 10},
        "local": {"steps": 3},
        "stop": {"max_rounds": 12, "target": 0.0},
    }
    for section, values in sections.items():
        base[section] = {**base.get(section, {}), **values} if isinstance(values, dict) else values  # type: ignore
    return Spec.from_mapping(base)


def grid_of(data: list[object]) -> MemoryGrid:
    """Return a grid with a node for each client's data; the node ids do not reveal the clients' order."""
    grid = MemoryGrid()
    for place, client in enumerate(data):
        mine = ReadyClient(client.name, client.x, client.y)  # type: ignore[attr-defined]

        def make(context: Context, mine: ReadyClient = mine) -> ReadyClient:
            return mine

        grid.add(9000 - 7 * place, client_app(make))
    return grid


def profiles_of(grid: MemoryGrid, spec: Spec) -> dict[int, object]:
    """Return the profile that each node reports."""
    plan = plan_of(spec, spec.model.outputs).to_text()
    return {node: read_profile(grid.answer(_numbered(profile_message(node, plan, 5.0)))) for node in grid.apps}


def _numbered(message: object) -> object:
    message.metadata.__dict__["_message_id"] = "m"  # type: ignore[attr-defined]
    return message


def both_engines(
    spec: Spec, patience: Patience = HASTY, *, masked: bool = False, masked_statistics: bool = True
) -> tuple[object, FlowerFederation, MemoryGrid]:
    """Return the embedded engine, the Flower engine, and the grid under it."""
    data = clients_from_spec(spec)
    embedded, _ = engine_from_spec(spec, data)
    grid = grid_of(list(data))
    profiles = profiles_of(grid, spec)
    order = {client.name: place for place, client in enumerate(data)}
    ordered = sorted(profiles.values(), key=lambda profile: order[profile.name])  # type: ignore[attr-defined]
    design, _ = blueprint(spec, ordered, identity=CLAIMED, preprocessing="fixed constants")  # type: ignore[arg-type]
    roster = ClaimedRoster(grid, {node: profile.name for node, profile in profiles.items()})  # type: ignore[attr-defined]
    flower = make_federation(grid, roster, design, patience, masked_updates=masked, masked_statistics=masked_statistics)
    return embedded, flower, grid


def everyone(engine: object) -> np.ndarray:
    """Return the numbers of all clients."""
    return np.arange(len(engine.clients))  # type: ignore[attr-defined]


def linear(spec: Spec, **local: object) -> Spec:
    """Return the spec with other settings of local training."""
    return replace(spec, local=replace(spec.local, **local))  # type: ignore[arg-type]
